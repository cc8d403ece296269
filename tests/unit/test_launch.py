"""Restart budget, the cause of a trainer's end, and reading files that are still written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.jsonlines import JsonLines
from services.launch.child import describe_exit, last_error
from services.launch.failures import trainer_failure
from services.launch.restarts import RestartBudget
from services.launch.rundir import RunDir

TORCHRUN = """\
W1130 21:04:31 5197 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 5236 closing signal SIGTERM
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
======================================================
trainer FAILED
------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-30_21:04:31
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 5236)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 5236
------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_21:04:31
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {code}
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
======================================================
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.open(tmp_path / "run")


def test_restarts_back_off_and_run_out() -> None:
    budget = RestartBudget(limit=4, window_s=100.0, first_delay_s=1.0, max_delay_s=3.0)
    assert [budget.next_delay(float(now)) for now in range(5)] == [1.0, 2.0, 3.0, 3.0, None]


def test_old_restarts_are_forgotten() -> None:
    budget = RestartBudget(limit=1, window_s=100.0, first_delay_s=1.0)
    assert budget.next_delay(0.0) == 1.0
    assert budget.next_delay(100.0) is None
    assert budget.next_delay(100.1) == 1.0


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (0, "exited with code 0"),
        (1, "exited with code 1"),
        (-9, "was killed by signal 9 (SIGKILL)"),
        (-11, "was killed by signal 11 (SIGSEGV)"),
        (-200, "was killed by signal 200"),
    ],
)
def test_exit_codes_in_words(code: int, says: str) -> None:
    assert describe_exit(code) == says


def test_what_the_trainer_wrote_comes_first(run: RunDir) -> None:
    log = run.logs / "trainer.log"
    log.write_text(TORCHRUN.replace("{code}", "2 (pid: 7)"))
    run.error.write_text(json.dumps({"exit_code": 2, "message": "data.train.path: no such file", "rank": 1}))
    failure = trainer_failure(run, 1, log)
    assert (failure.message, failure.exit_code) == ("data.train.path: no such file", 2)


def test_the_signal_that_killed_a_rank_is_found_behind_torchrun(run: RunDir) -> None:
    log = run.logs / "trainer.log"
    log.write_text(TORCHRUN.replace("{code}", "-9 (pid: 5237)  (SIGKILL)"))
    failure = trainer_failure(run, 1, log)
    assert failure.message.startswith("trainer rank 1 was killed by signal 9 (SIGKILL)")
    assert failure.exit_code == 1


def test_the_last_exception_of_a_rank_is_quoted(run: RunDir) -> None:
    log = run.logs / "trainer.log"
    log.write_text(
        "Traceback (most recent call last):\nRuntimeError: out of memory\n" + TORCHRUN.replace("{code}", "1 (pid: 7)")
    )
    assert "trainer rank 1 exited with code 1: RuntimeError: out of memory" in trainer_failure(run, 1, log).message


def test_torchrun_itself_killed(run: RunDir) -> None:
    assert trainer_failure(run, -9, run.logs / "none.log").message == "trainer was killed by signal 9 (SIGKILL)"


def test_the_last_error_line_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_error(log) is None
    log.write_text("error: first\nsomething\nerror: second\nmore\n")
    assert last_error(log) == "second"


def test_json_lines_gives_whole_rows_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = JsonLines(path)
    assert rows.read() == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert rows.read() == [{"a": 1}, {"a": 2}]
    assert rows.read() == []
    with path.open("a") as file:
        file.write(': 3}\nnot json\n[1]\n\n{"a": 4}\n')
    assert rows.read() == [{"a": 3}, {"a": 4}]
    assert rows.skipped == 2


def test_json_lines_survives_a_file_that_was_cut_back(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    rows = JsonLines(path)
    rows.read()
    path.write_text('{"a": 1}\n')
    assert rows.read() == []
    with path.open("a") as file:
        file.write('{"a": 9}\n')
    assert rows.read() == [{"a": 9}]
