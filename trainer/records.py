"""The files a run leaves: metrics.jsonl, timeline.jsonl, ledger.jsonl and summary.json."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from services.jsonlines import JsonLines

METRICS = "metrics.jsonl"
TIMELINE = "timeline.jsonl"
LEDGER = "ledger.jsonl"
SUMMARY = "summary.json"
ERROR = "error.json"


class Records:
    """Appends rows; every rank writes its own rows to the same files, each batch in one append."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._rank = rank
        self._lock = threading.Lock()
        self._pending: list[dict[str, Any]] = []

    def metrics(self, row: Mapping[str, Any]) -> None:
        """One row of rank 0, for people and the live progress."""
        if self._rank == 0:
            self._append(METRICS, [row])

    def span(self, lane: str, kind: str, start: float, end: float, iteration: int, **extra: Any) -> None:
        """A stretch of work on the timeline, Unix seconds; written at the next `flush`. Any thread may call it."""
        with self._lock:
            self._pending.append(
                {"lane": lane, "kind": kind, "start": start, "end": end, "iteration": iteration, **extra}
            )

    def ledger(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """One row per sample id: what became of it."""
        self._append(LEDGER, rows)

    def flush(self) -> None:
        with self._lock:
            rows, self._pending = self._pending, []
        self._append(TIMELINE, rows)

    def summary(self, values: Mapping[str, Any]) -> None:
        if self._rank == 0:
            write_json(self._directory / SUMMARY, values)

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if not text:
            return
        with (self._directory / name).open("ab", buffering=0) as file:
            file.write(text.encode())


def earlier_run(directory: Path) -> Path | None:
    """A file that a run left in `directory`, if any."""
    left = (directory / name for name in (METRICS, LEDGER, TIMELINE, SUMMARY))
    return next((path for path in left if path.exists()), None)


def truncate_from(directory: Path, iteration: int) -> list[dict[str, Any]]:
    """Drop rows of iterations at or past `iteration`, which a resumed run does again; returns the metrics that stay.

    A line that a kill cut off goes too. It is never of an iteration that stays: all ranks had written those before
    the checkpoint of `iteration` was finished.
    """
    kept: dict[str, list[dict[str, Any]]] = {}
    for name in (TIMELINE, LEDGER, METRICS):
        path = directory / name
        kept[name] = [row for row in JsonLines(path).read() if row.get("iteration", -1) < iteration]
        if path.exists():
            _replace(path, "".join(json.dumps(row) + "\n" for row in kept[name]))
    (directory / SUMMARY).unlink(missing_ok=True)
    return kept[METRICS]


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    _replace(path, json.dumps(value, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)
