"""The supervisor over real head and unit processes, with a stand-in for the trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

DEADLINE_S = 90.0
CONFIG = """
model: {path: unused}
data: {train: {kind: jsonl, path: train.jsonl}}
reward: {fn: "mine:score"}
engine: {kind: emulated}
sgs: {units: 2, reconnect_s: 60}
"""
DRIVER = """
import sys
from pathlib import Path
from rich.console import Console
from services import processes
from services.config import load_config
from services.launch.child import Child, child_environment
from services.launch.rundir import RunDir
from services.launch.run import head_service, unit_service
from services.launch.supervisor import Interrupts, Service, Supervisor
from services.progress import make_view

run, trainer = RunDir.open(Path(sys.argv[1])), sys.argv[2:]
config = load_config(run.config)
processes.adopt_orphans()
with Interrupts() as interrupts, make_view(Console(stderr=True)) as view:
    command = [sys.executable, "-m", "services.processes", sys.executable, *trainer]
    child = Child("trainer", command, child_environment(run.path, 1), run.logs / "trainer.log")
    units = [unit_service(run, config, f"unit-{i}") for i in range(config.sgs.units)]
    outcome = Supervisor(run, view, interrupts, Service(child), head_service(run, config), units).supervise()
print(outcome.message)
sys.exit(outcome.exit_code)
"""
WAITS = "import time; print('up', flush=True); time.sleep(600)"
CHECKPOINTS = """
import signal, sys, time
from pathlib import Path
def stop(*_):
    time.sleep(0.5)
    Path(sys.argv[1]).write_text("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
time.sleep(600)
"""

LAUNCHES = """
import signal, subprocess, sys
rank = subprocess.Popen([sys.executable, *sys.argv[1:]])
def stop(*_):
    rank.kill()
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
sys.exit(rank.wait())
"""


@dataclass
class Running:
    """A supervisor in a process of its own."""

    process: subprocess.Popen[str]
    run: Path
    said: str = ""

    def log(self, name: str) -> str:
        path = self.run / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def find(self, *words: str) -> psutil.Process:
        found = [p for p in self.descendants() if all(word in " ".join(p.cmdline()) for word in words)]
        assert len(found) == 1, found
        return found[0]

    def wait(self) -> tuple[int, str]:
        out, self.said = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out.strip()


@contextmanager
def supervised(tmp_path: Path, *trainer: str, config: str = CONFIG) -> Iterator[Running]:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(config)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMRL_")}
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(run), *trainer],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=kept,
    )
    running = Running(process, run)
    try:
        yield running
    finally:
        if process.poll() is None:
            below = running.descendants()
            for each in [psutil.Process(process.pid), *below]:
                each.kill()
        process.communicate()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def all_up(running: Running) -> None:
    wait_for(lambda: all(f"unit unit-{i} attached" in running.log("head") for i in range(2)))
    wait_for(lambda: "up" in running.log("trainer"))


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def test_services_that_die_are_replaced_and_ctrl_c_saves_first(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoint"
    with supervised(tmp_path, "-c", CHECKPOINTS, str(saved)) as running:
        all_up(running)
        address = json.loads((running.run / "services/head.json").read_text())["address"]

        running.find("cli unit", "--id unit-1").kill()
        wait_for(lambda: running.log("head").count("unit unit-1 attached") == 2)

        running.find("cli sgs").kill()
        wait_for(lambda: running.log("head").count("head listens") == 2)
        wait_for(lambda: running.log("head").rpartition("head listens")[2].count("attached") == 2)
        assert json.loads((running.run / "services/head.json").read_text())["address"] == address

        below = running.descendants()
        running.process.send_signal(signal.SIGINT)
        code, message = running.wait()
        assert code == 130
        assert message == "stopped by Ctrl-C"
        assert saved.read_text() == "saved"
        assert "stopping: nothing is trained yet" in running.said
        assert gone(below)
        for name in ("head", "unit-0", "unit-1"):
            assert f"{name}: ended: stopped by Ctrl-C" in running.log(name)


def test_ctrl_c_asks_the_ranks_and_not_their_impatient_launcher(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoint"
    with supervised(tmp_path, "-c", LAUNCHES, "-c", CHECKPOINTS, str(saved)) as running:
        all_up(running)
        below = running.descendants()
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == (130, "stopped by Ctrl-C")
        assert saved.read_text() == "saved"
        assert gone(below)


def test_a_trainer_that_is_killed_ends_the_run_and_says_so(tmp_path: Path) -> None:
    with supervised(tmp_path, "-c", WAITS) as running:
        all_up(running)
        below = running.descendants()
        running.find("-c", "print('up'").kill()
        code, message = running.wait()
        assert code == 1
        assert message == "trainer was killed by signal 9 (SIGKILL)"
        assert gone(below)
        assert f"head: ended: {message}" in running.log("head")


def test_a_trainer_that_fails_on_purpose_gives_message_and_exit_code(tmp_path: Path) -> None:
    error = json.dumps({"exit_code": 2, "message": "data.train.path: train.jsonl: no such file", "rank": 0})
    code = f"import sys; open(sys.argv[1], 'w').write({error!r}); sys.exit(1)"
    with supervised(tmp_path, "-c", code, str(tmp_path / "run/error.json")) as running:
        assert running.wait() == (2, "data.train.path: train.jsonl: no such file")


def test_nothing_survives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    with supervised(tmp_path, "-c", WAITS) as running:
        all_up(running)
        below = running.descendants()
        assert len(below) == 4
        running.process.kill()
        running.process.wait()
        wait_for(lambda: gone(below))
        assert f"its parent (process {running.process.pid}) died" in running.log("head")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("engine: {kind: emulated}", "engine: {kind: emulated, emulated: {lengths: trace}}"), "trace"),
        (("sgs: {", "sgs: {host: 0.0.0.0, "), "without authentication"),
    ],
)
def test_a_service_that_cannot_start_ends_the_run_with_its_own_words(
    tmp_path: Path, change: tuple[str, str], says: str
) -> None:
    with supervised(tmp_path, "-c", WAITS, config=CONFIG.replace(*change)) as running:
        code, message = running.wait()
        assert code == 2
        assert says in message
        assert "\n" not in message
