"""Why the trainer failed, in one line: from what it wrote, else from what torchrun printed about its workers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from services.errors import EXIT_FAILED
from services.launch.child import describe_exit, last_error, read_json
from services.launch.rundir import RunDir

_ROOT_CAUSE = re.compile(r"Root Cause .*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)): (.+)$", re.MULTILINE)
_TAIL_BYTES = 200_000


@dataclass(frozen=True)
class Failure:
    message: str
    exit_code: int


def trainer_failure(run: RunDir, launcher_code: int, log: Path) -> Failure:
    """`launcher_code` is torchrun's own: negative when torchrun itself was killed."""
    written = read_json(run.error)
    if written is not None:
        code = written.get("exit_code")
        return Failure(str(written.get("message")), code if isinstance(code, int) and code > 0 else EXIT_FAILED)
    if launcher_code < 0:
        return Failure(f"trainer {describe_exit(launcher_code)}", EXIT_FAILED)
    text = _tail(log)
    cause = _ROOT_CAUSE.search(text)
    who, code = (f"trainer rank {cause[1]}", int(cause[2])) if cause else ("trainer", launcher_code)
    said = None if code < 0 else last_error(log) or _last_exception(text)
    return Failure(f"{who} {describe_exit(code)}" + (f": {said}" if said else "") + f" (see {log})", EXIT_FAILED)


def _last_exception(text: str) -> str | None:
    """The last exception line that is not torchrun's own."""
    found = [f"{name}: {message}" for name, message in _EXCEPTION.findall(text) if "ChildFailedError" not in name]
    return found[-1] if found else None


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        return file.read().decode(errors="replace")
