"""The files a run leaves: metrics.jsonl, timeline.jsonl, ledger.jsonl and summary.json."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
        self._pending: list[dict[str, Any]] = []

    def metrics(self, row: Mapping[str, Any]) -> None:
        """One row of rank 0, for people and the live progress."""
        if self._rank == 0:
            self._append(METRICS, [row])

    def span(self, lane: str, kind: str, start: float, end: float, iteration: int, **extra: Any) -> None:
        """A stretch of work on the timeline, Unix seconds; written at the next `flush`."""
        self._pending.append({"lane": lane, "kind": kind, "start": start, "end": end, "iteration": iteration, **extra})

    def ledger(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """One row per sample id: what became of it."""
        self._append(LEDGER, rows)

    def flush(self) -> None:
        # Swapped first: the service loop adds spans from its own thread.
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


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    partial.replace(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file; a last line cut by a kill is left out, a missing file is empty."""
    if not path.exists():
        return []
    *lines, _cut = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


def truncate_after(directory: Path, iteration: int) -> None:
    """Drop rows of iterations at or past `iteration`: a resumed run does them again."""
    for name in (METRICS, TIMELINE, LEDGER):
        path = directory / name
        if path.exists():
            kept = [row for row in read_rows(path) if row.get("iteration", -1) < iteration]
            path.write_text("".join(json.dumps(row) + "\n" for row in kept))
