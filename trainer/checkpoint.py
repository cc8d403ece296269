"""Checkpoints that are whole or do not count: everything that must move together, and a marker written last."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.errors import UsageError

_STATE = "trainer.json"
_MARKER = "COMPLETE"


@dataclass(frozen=True)
class TrainerState:
    """`iteration` counts finished ones and equals the weights' version; `loader` is the loader's state.

    The loader's cursor stands before the first prompt of `iteration`, not past those that were asked for ahead: what
    was in flight is generated again.
    """

    iteration: int
    loader: dict[str, Any]


def step_directory(root: Path, iteration: int) -> Path:
    return root / f"step-{iteration:06d}"


def finished(directory: Path) -> bool:
    return (directory / _MARKER).exists()


def begin(directory: Path) -> None:
    """Make room: what a killed run left half-written there goes."""
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def finish(directory: Path, state: TrainerState) -> None:
    """Write the state, then the marker; call after every rank has written its part."""
    (directory / _STATE).write_text(json.dumps(asdict(state)))
    for path in directory.iterdir():
        _sync(path)
    (directory / _MARKER).touch()
    _sync(directory)


def read(directory: Path) -> TrainerState:
    """Raises `UsageError` when `directory` is not a finished checkpoint."""
    if not finished(directory):
        raise UsageError(f"{directory}: not a finished checkpoint (no {_MARKER} file)")
    return TrainerState(**json.loads((directory / _STATE).read_text()))


def export_model(directory: Path, target: Path) -> None:
    """Copy what `from_pretrained` needs out of a checkpoint."""
    partial = target.with_name(f".{target.name}.partial")
    for path in (partial, target):
        if path.exists():
            shutil.rmtree(path)
    shutil.copytree(directory, partial, ignore=shutil.ignore_patterns("optimizer.*", _STATE, _MARKER))
    partial.rename(target)


def newest(root: Path) -> Path | None:
    """The newest finished checkpoint; half-written ones are passed over."""
    return max((marker.parent for marker in root.glob(f"step-*/{_MARKER}")), default=None)


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep`. The marker goes first, so a cut removal does not count either."""
    for marker in sorted(root.glob(f"step-*/{_MARKER}"))[:-keep]:
        _remove(marker.parent)


def discard_from(root: Path, iteration: int, but: Path | None) -> None:
    """Remove checkpoints at or past `iteration` except `but`: a run that resumes there writes them again."""
    first = step_directory(root, iteration)
    for directory in root.glob("step-*"):
        if directory >= first and (but is None or directory.resolve() != but.resolve()):
            _remove(directory)


def _remove(directory: Path) -> None:
    (directory / _MARKER).unlink(missing_ok=True)
    shutil.rmtree(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
