"""The command line as a user meets it: real processes, their exit codes and what they print."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from services import processes
from services.cli import main

DEADLINE_S = 60.0
CONFIG = """
model: {path: unused}
data: {train: {kind: jsonl, path: train.jsonl}}
reward: {fn: "mine:score"}
engine: {kind: emulated}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMRL_")}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **more}


def streamrl(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment(**env))


def refused(*arguments: object) -> str:
    """The one line on stderr of a command that must end with exit code 2."""
    done = streamrl(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@contextmanager
def serving(name: str, *arguments: object, **env: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A service process and the line it announced itself with; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", name, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**env),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=DEADLINE_S)[1]
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


def stopped(process: subprocess.Popen[str], sig: signal.Signals) -> tuple[int, str]:
    process.send_signal(sig)
    _out, log = process.communicate(timeout=DEADLINE_S)
    return process.returncode, log


# ---------------------------------------------------------------- help and wrong input


@pytest.mark.parametrize("command", ["run", "sgs", "unit", "trainer", "prepare", "status", "report"])
def test_help_teaches_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"Example: streamrl {command}" in " ".join(capsys.readouterr().out.split())


def test_help_needs_no_heavy_import() -> None:
    code = (
        "import sys\n"
        "from services.cli import _run\n"
        "assert _run(['--help'], False) == 0\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'grpc', 'trainer'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S, capture_output=True)


def test_wrong_input_is_one_line_and_exit_code_2(config: Path, tmp_path: Path) -> None:
    assert "did you mean `pipeline`?" in refused("run", config, "--set", "pipelin.mode=async")
    assert "no such file" in refused("run", tmp_path / "nope.yaml")
    assert "HOST:PORT" in refused("unit", config, "--sgs", "nowhere")
    assert "no such run directory" in refused("report", tmp_path / "nope")
    assert "nothing to report" in refused("report", tmp_path)
    assert "--frobnicate" in refused("run", config, "--frobnicate")
    assert "Missing argument" in refused("run")
    assert not list(tmp_path.glob("runs*"))


def test_nothing_listens_beyond_loopback_without_a_token(config: Path) -> None:
    assert "without authentication" in refused("sgs", config, "--host", "0.0.0.0")
    assert "without authentication" in refused("run", config, "--set", "sgs.host=0.0.0.0")
    assert "metrics.host" in refused("run", config, "--set", "metrics.host=0.0.0.0")
    assert "metrics" in refused("sgs", config, "--set", "metrics.host=0.0.0.0")


def test_a_busy_port_is_named(config: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert f"cannot bind 127.0.0.1:{port}" in refused("sgs", config, "--port", port)
        assert str(port) in refused("sgs", config, "--set", f"metrics.port={port}")


def test_a_unit_without_a_model_says_how_to_make_one(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    text = CONFIG.replace("{path: unused}", "{init: {}}").replace("emulated", "embedded")
    path.write_text(text + 'warmup: {examples: "mine:examples"}\n')
    assert "streamrl prepare" in refused("unit", path, "--sgs", "127.0.0.1:1")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = streamrl("run", tmp_path / "nope.yaml", "--debug")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_a_head_that_is_not_there() -> None:
    done = streamrl("status", "--sgs", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: head at 127.0.0.1:1: UNAVAILABLE")
    assert len(done.stderr.splitlines()) == 1


# ---------------------------------------------------------------- head and unit


def status_of(address: str, **env: str) -> dict[str, Any]:
    done = streamrl("status", "--sgs", address, "--json", **env)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def attached_units(address: str, count: int, **env: str) -> list[dict[str, Any]]:
    """Status of the units once there are `count`."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        units = status_of(address, **env)["units"]
        if len(units) == count:
            return list(units)
        assert time.monotonic() < deadline, units
        time.sleep(0.1)


def test_a_head_and_a_unit_announce_serve_and_stop(config: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    with serving("sgs", config, "--ready-file", ready) as (head, announced):
        assert json.loads(ready.read_text()) == announced
        assert announced["pid"] == head.pid
        address = announced["address"]
        with serving("unit", config, "--sgs", address, "--id", "unit-a") as (unit, unit_announced):
            (seen,) = attached_units(address, 1)
            assert seen["unit_id"] == "unit-a"
            assert seen["engine"] == "emulated"
            assert seen["metrics_address"] == unit_announced["metrics"]
            table = streamrl("status", "--sgs", address).stdout
            assert "unit-a" in table
            assert "newest weights: none yet" in table
            for metrics, name in ((announced, "streamrl_head_units 1.0"), (unit_announced, "streamrl_unit_samples")):
                with urlopen(f"http://{metrics['metrics']}/metrics", timeout=DEADLINE_S) as reply:
                    assert name in reply.read().decode()
            code, log = stopped(unit, signal.SIGINT)
            assert code == 0
            assert re.search(r"unit-a: ended: received SIGINT", log)
        attached_units(address, 0)
        code, log = stopped(head, signal.SIGTERM)
        assert code == 0
        assert re.search(r"head: ended: received SIGTERM", log)


def test_status_carries_the_token(config: Path) -> None:
    with serving("sgs", config, STREAMRL_TOKEN="secret") as (_head, announced):
        assert status_of(announced["address"], STREAMRL_TOKEN="secret")["units"] == []
        done = streamrl("status", "--sgs", announced["address"])
        assert done.returncode == 1
        assert "UNAUTHENTICATED" in done.stderr


def test_a_service_says_the_reason_that_its_supervisor_left(config: Path, tmp_path: Path) -> None:
    (tmp_path / processes.ENDED_FILE).write_text("trainer was killed by signal 9\n")
    with serving("sgs", config, **{processes.RUN_DIR_ENV: str(tmp_path)}) as (head, _announced):
        code, log = stopped(head, signal.SIGTERM)
        assert code == 0
        assert "head: ended: trainer was killed by signal 9" in log


def test_a_service_ends_with_its_parent(config: Path, tmp_path: Path) -> None:
    """The parent is killed, so only the kernel can tell the service."""
    ready, log = tmp_path / "ready.json", tmp_path / "head.log"
    parent_code = (
        "import os, subprocess, sys, time\n"
        f"env = {{**os.environ, {processes.PARENT_ENV!r}: str(os.getpid())}}\n"
        f"command = [sys.executable, '-m', 'services.cli', 'sgs', {str(config)!r}, '--ready-file', {str(ready)!r}]\n"
        f"subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=open({str(log)!r}, 'w'))\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], env=environment())
    try:
        wait_for(ready.exists)
        head = json.loads(ready.read_text())["pid"]
    finally:
        parent.kill()
        parent.wait()
    try:
        wait_for(lambda: not is_alive(head))
    finally:
        if is_alive(head):
            os.kill(head, signal.SIGKILL)
    assert f"its parent (process {parent.pid}) died" in log.read_text()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
