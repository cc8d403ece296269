"""Runs `python -m trainer.prepare`, which makes (or finds) the model that every process then loads."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services import processes
from services.config import Config
from services.errors import EXIT_FAILED, EXIT_USAGE, StreamRLError, UsageError
from services.jsonlines import JsonLines
from services.launch.child import Child, child_environment, describe_exit, last_error, python_module
from services.launch.rundir import RunDir
from services.launch.supervisor import Interrupts
from services.progress import View

_POLL_S = 0.05
_STOP_GRACE_S = 5.0


class Interrupted(StreamRLError):
    """The user stopped it."""

    def __init__(self, interrupts: Interrupts) -> None:
        super().__init__("stopped while the model was prepared")
        self.exit_code = interrupts.exit_code()


def prepare_model(
    run: RunDir,
    config_path: Path,
    overrides: Sequence[str],
    config: Config,
    view: View,
    interrupts: Interrupts,
    head: Child | None = None,
) -> Path:
    """The directory of the prepared model. Raises what the preparation failed with, as one line.

    A `head` that runs beside it and cannot be used ends it early, with the head's words.
    """
    log = run.logs / "prepare.log"
    child = Child(
        "prepare",
        python_module("services.processes", *prepare_command(config_path, overrides)),
        child_environment(run.path, config.trainer.threads),
        log,
    )
    before = log.stat().st_size if log.exists() else 0
    lines = JsonLines(log, before)
    child.start()
    try:
        return _follow(child, lines, view, interrupts, head)
    finally:
        _stop(child)


def prepare_command(config_path: Path, overrides: Sequence[str]) -> list[str]:
    return python_module(
        "trainer.prepare", str(config_path), *(part for value in overrides for part in ("--set", value))
    )


def _follow(child: Child, lines: JsonLines, view: View, interrupts: Interrupts, head: Child | None) -> Path:
    last: dict[str, Any] = {}
    while True:
        code = child.exit_code()  # before reading, so that nothing it wrote is missed
        for event in lines.read():
            last = event
            if event.get("event") == "warmup":
                view.warmup(int(event["step"]), int(event["steps"]), event.get("loss"))
        if interrupts.received:
            raise Interrupted(interrupts)
        if head is not None and head.exit_code() == EXIT_USAGE:
            raise UsageError(last_error(head.log) or f"head {describe_exit(EXIT_USAGE)} (see {head.log})")
        if code is not None:
            break
        time.sleep(_POLL_S)
    if code == 0 and last.get("event") == "ready":
        view.note(f"model: {last['model']}" + (" (from the cache)" if last.get("cached") else ""))
        return Path(last["model"])
    said = last.get("message") if last.get("event") == "error" else last_error(child.log)
    kind = UsageError if code == EXIT_USAGE else StreamRLError
    error = kind(str(said) if said else f"preparing the model {describe_exit(code)} (see {child.log})")
    error.exit_code = code if code > 0 else EXIT_FAILED
    raise error


def _stop(child: Child) -> None:
    child.terminate()
    deadline = time.monotonic() + _STOP_GRACE_S
    while child.running() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if child.running() and child.pid is not None:
        processes.signal_all([*processes.descendants(child.pid), child.pid], signal.SIGKILL)
        child.wait()
