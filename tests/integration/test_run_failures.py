"""Whole runs in which something is killed, or stopped by its user."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import DEADLINE_S, Running, assert_whole_ledger, command, environment, make_model, started, write_config
from transformers import AutoModelForCausalLM

from trainer import checkpoint

ITERATIONS, PROMPTS, GROUP = 12, 6, 4
ENDS_WITHIN_S = 10.0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    return tmp_path


def slow_config(place: Path, **sections: dict[str, Any]) -> Path:
    """Generation that takes about a second per iteration, so that a kill lands in the middle of one."""
    values: dict[str, dict[str, Any]] = {
        "pipeline": {"iterations": ITERATIONS, "prompts_per_iteration": PROMPTS},
        "engine": {
            "kind": "emulated",
            "slots": 8,
            "max_sequence_tokens": 64,
            "emulated": {"ptl_base_s": 0.03, "lengths": "uniform", "mean": 16},
        },
        "sgs": {"unit_timeout_s": 5.0, "reconnect_s": 60.0},
        "checkpoint": {"every": 2},
    }
    return write_config(place, **{**values, **sections})


def in_iteration(run: Running, number: int) -> None:
    """Until `number` iterations are done, and then into the next one."""
    run.until(lambda: bool(list(run.out.glob("*"))) and len(run.iterations()) >= number)
    time.sleep(0.3)


def children(run: Running) -> list[psutil.Process]:
    return psutil.Process(run.process.pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_killed_unit_costs_no_sample(place: Path) -> None:
    with started(slow_config(place)) as run:
        in_iteration(run, 2)
        [unit] = run.find("services.cli unit", "unit-1")
        unit.send_signal(signal.SIGKILL)
        code, err = run.wait()
    assert code == 0, err
    assert_whole_ledger(run, ITERATIONS, PROMPTS, GROUP)
    assert "unit unit-1 lost" in run.log("head")
    units = {row["unit"] for row in run.rows("ledger.jsonl") if row["iteration"] == ITERATIONS - 1}
    assert units <= {"unit-0", "unit-1"}


@pytest.mark.parametrize("mode", ["stream", "async"])
def test_a_killed_head_costs_no_sample(place: Path, mode: str) -> None:
    pipeline = {"iterations": ITERATIONS, "prompts_per_iteration": PROMPTS, "mode": mode}
    with started(slow_config(place, pipeline=pipeline)) as run:
        in_iteration(run, 2)
        [head] = run.find("services.cli sgs")
        head.send_signal(signal.SIGKILL)
        code, err = run.wait()
    assert code == 0, err
    assert_whole_ledger(run, ITERATIONS, PROMPTS, GROUP)


def test_a_killed_trainer_ends_everything_with_a_word(place: Path) -> None:
    with started(slow_config(place)) as run:
        in_iteration(run, 1)
        below = children(run)
        [rank] = run.find("-m trainer ", "-u") or run.find(" trainer ", "--run-dir", "config.yaml")[-1:]
        rank.send_signal(signal.SIGKILL)
        start = time.monotonic()
        code, err = run.wait()
        assert time.monotonic() - start < ENDS_WITHIN_S  # promised to users; not a measure of speed
    assert code == 1
    assert "was killed by signal 9" in err
    assert alive(below) == []
    for name in ("head", "unit-0", "unit-1"):
        assert re.search(r"ended: .*trainer.*killed by signal 9", run.log(name)), run.log(name)[-500:]


def test_nothing_outlives_a_killed_supervisor(place: Path) -> None:
    with started(slow_config(place)) as run:
        in_iteration(run, 1)
        below = children(run)
        run.process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        while alive(below) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert alive(below) == []


def test_interrupt_leaves_a_checkpoint_and_no_process(place: Path) -> None:
    config = slow_config(place)
    with started(config) as run:
        in_iteration(run, 3)
        below = children(run)
        run.process.send_signal(signal.SIGINT)
        code, _err = run.wait()
    assert code == 130
    assert alive(below) == []
    assert "Traceback" not in run.log("trainer"), run.log("trainer")[-3000:]
    newest = checkpoint.newest(run.directory / "checkpoints")
    assert newest is not None
    state = checkpoint.read(newest)
    assert state.iteration >= 3 and state.loader["cursor"] == state.iteration * PROMPTS
    AutoModelForCausalLM.from_pretrained(newest)
    summary = run.summary()
    assert not summary["finished"] and summary["iterations"] == state.iteration
    assert (run.directory / "report.html").exists()


def test_a_resumed_run_has_the_same_ledger(place: Path) -> None:
    """Parts on their own: head and units stay, the trainer is killed, and a second one continues."""
    config = slow_config(place, engine={"slots": 8, "max_sequence_tokens": 64})
    run_dir = place / "resumed"
    with services(config, units=1) as head:
        with subprocess.Popen(trainer(config, head, run_dir), cwd=place, env=environment()) as first:
            wait_for(lambda: (run_dir / "checkpoints" / "step-000004" / "COMPLETE").exists(), first)
            for each in [*psutil.Process(first.pid).children(recursive=True), psutil.Process(first.pid)]:
                each.send_signal(signal.SIGKILL)
        more = ("--resume", "auto", "--set", "trainer.ranks=2")
        again = subprocess.run([*trainer(config, head, run_dir), *more], cwd=place, env=environment())
        assert again.returncode == 0
    rows = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    ids = sorted((row["prompt_id"], row["k"]) for row in rows)
    assert ids == sorted((f"train/{p}", k) for p in range(ITERATIONS * PROMPTS) for k in range(GROUP))
    iterations = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in iterations] == list(range(ITERATIONS))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["samples"] == len(ids) and summary["samples_lost"] == summary["samples_duplicated"] == 0
    assert summary["finished"] and summary["resumed_at"] >= 4


class services:
    """`streamrl sgs` and `streamrl unit`, each started alone; the value is the head's address."""

    def __init__(self, config: Path, units: int, env: dict[str, str] | None = None) -> None:
        self._config = config
        self._units = units
        self._env = env or environment()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> str:
        ready = self._config.parent / "head-ready.json"
        self._start("sgs", self._config, "--ready-file", ready)
        wait_for(ready.exists, self._processes[0])
        address = str(json.loads(ready.read_text())["address"])
        for number in range(self._units):
            self._start("unit", self._config, "--sgs", address, "--id", f"alone-{number}")
        return address

    def _start(self, *arguments: object) -> None:
        cwd = self._config.parent
        self._processes.append(subprocess.Popen(command(*arguments), cwd=cwd, env=self._env))

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(DEADLINE_S) for process in self._processes]
        assert codes == [0] * len(codes)


def trainer(config: Path, head: str, run_dir: Path) -> list[str]:
    return command("trainer", config, "--sgs", head, "--run-dir", run_dir)


def wait_for(condition: Any, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def test_parts_alone_with_a_token(place: Path) -> None:
    """Head, unit, trainer and status by hand; without the token nobody gets an answer."""
    (place / "token").write_text("a secret\n")
    config = slow_config(
        place,
        security={"token_file": str(place / "token")},
        pipeline={"iterations": 2, "prompts_per_iteration": 4},
        engine={"slots": 8, "max_sequence_tokens": 64},
    )
    run_dir = place / "alone"
    with services(config, units=1) as head:
        done = subprocess.run(trainer(config, head, run_dir), cwd=place, env=environment())
        assert done.returncode == 0
        status = command("status", "--sgs", head, "--json")
        known = subprocess.run(
            status, capture_output=True, text=True, env={**environment(), "STREAMRL_TOKEN": "a secret"}
        )
        assert known.returncode == 0, known.stderr
        [unit] = json.loads(known.stdout)["units"]
        # The trainer does not wait for anybody to take its last weights; protobuf's JSON has int64 as text.
        assert unit["unit_id"] == "alone-0" and int(unit["version"]) in (1, 2)
        stranger = subprocess.run(status, capture_output=True, text=True, env=environment())
        assert stranger.returncode != 0
        assert stranger.stderr.count("\n") == 1 and "token" in stranger.stderr
    assert (run_dir / "model" / "config.json").exists()
