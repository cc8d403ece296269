"""One supervised process: its command, its log file, and how it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import services
from services import processes


class Child:
    """A process in a group of its own that writes to `log` and dies with its parent."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self.restarts = 0
        self._command = list(command)
        self._env = dict(env)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """Start it with `more` arguments appended; what it prints is appended to its log."""
        env = {**os.environ, **self._env, processes.PARENT_ENV: str(os.getpid())}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, *more],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def exit_code(self) -> int | None:
        """Negative: the signal that killed it. `None`: it runs, or was never started."""
        return self._process.poll() if self._process else None

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> None:
        """Collect it; it must be ending already."""
        if self._process is not None:
            self._process.wait()

    def terminate(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)


def child_environment(run_dir: Path, threads: int) -> dict[str, str]:
    """What every child gets on top of the supervisor's own environment."""
    env = {
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        processes.RUN_DIR_ENV: str(run_dir),
    }
    root = Path(services.__file__).resolve().parent.parent
    if root.name not in ("site-packages", "dist-packages"):  # run from a checkout
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    return env


def python_module(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def describe_exit(code: int) -> str:
    """For example "was killed by signal 9 (SIGKILL)" or "exited with code 1"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


def last_error(log: Path) -> str | None:
    """The last `error: ...` line of a log, without the word."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [line for line in lines if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else None


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; `None` when the file is missing or not (yet) a whole object."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
