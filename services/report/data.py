"""What a run left behind, as arrays. Rows that a cut-off run left incomplete are counted and passed over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from services.jsonlines import JsonLines
from services.launch.child import read_json

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Span:
    """Work on a lane, Unix seconds."""

    kind: str
    start: float
    end: float
    iteration: int


@dataclass(frozen=True)
class RunData:
    name: str
    config: dict[str, Any]
    summary: dict[str, Any]
    iterations: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    spans: dict[str, list[Span]]
    """By lane, without samples."""
    samples: dict[str, Floats]
    """By unit lane: [samples, 2] start and end, Unix seconds."""
    lengths: Floats
    """Completion tokens of every sample on the timeline."""
    skipped: int
    """Rows that could not be used."""

    def column(self, key: str) -> Floats:
        """One value per iteration; NaN where a row has none."""
        return column(self.iterations, key)


def column(rows: Sequence[dict[str, Any]], key: str) -> Floats:
    return np.array([as_number(row.get(key)) for row in rows], dtype=np.float64)


def as_number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def read_run(run_dir: Path) -> RunData:
    metrics, timeline = JsonLines(run_dir / "metrics.jsonl"), JsonLines(run_dir / "timeline.jsonl")
    rows = metrics.read()
    spans: dict[str, list[Span]] = {}
    samples: dict[str, list[tuple[float, float]]] = {}
    lengths: list[float] = []
    unusable = 0
    for row in timeline.read():
        lane, kind = str(row.get("lane", "")), str(row.get("kind", ""))
        start, end = as_number(row.get("start")), as_number(row.get("end"))
        if not lane or not (end >= start > 0):  # also false for NaN
            unusable += 1
        elif kind == "sample":
            samples.setdefault(lane, []).append((start, end))
            lengths.append(as_number(row.get("tokens")))
        else:
            iteration = as_number(row.get("iteration"))
            spans.setdefault(lane, []).append(Span(kind, start, end, int(iteration) if iteration >= 0 else -1))
    tokens = np.array(lengths, dtype=np.float64)
    return RunData(
        name=run_dir.resolve().name,
        config=_config(run_dir / "config.yaml"),
        summary=read_json(run_dir / "summary.json") or {},
        iterations=[row for row in rows if row.get("kind") == "iteration"],
        evals=[row for row in rows if row.get("kind") == "eval"],
        spans={lane: sorted(found, key=lambda span: span.start) for lane, found in spans.items()},
        samples={lane: np.array(found, dtype=np.float64) for lane, found in samples.items()},
        lengths=tokens[np.isfinite(tokens)],
        skipped=unusable + metrics.skipped + timeline.skipped,
    )


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    tree = yaml.safe_load(path.read_text())
    return tree if isinstance(tree, dict) else {}
