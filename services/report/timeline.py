"""From spans to what can be drawn: how many samples ran when, merged bars, and windows worth a closer look. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from services.report.data import Floats, RunData


@dataclass(frozen=True)
class Window:
    """A stretch of the run, Unix seconds."""

    title: str
    start: float
    end: float


def occupancy(intervals: Floats, edges: Floats) -> Floats:
    """Mean number of intervals that cover each bin.

    `intervals`: [n, 2] start and end; `edges`: [bins + 1], ascending. Returns [bins]. Exact, in O((n + bins) log n).
    """
    starts, ends = np.sort(intervals[:, 0]), np.sort(intervals[:, 1])
    covered = _seconds_past(starts, edges) - _seconds_past(ends, edges)
    return np.diff(covered) / np.diff(edges)


def _seconds_past(points: Floats, at: Floats) -> Floats:
    """Sum over points p of max(0, t - p), for each t of `at`."""
    before = np.searchsorted(points, at, side="right")
    sums = np.concatenate([[0.0], np.cumsum(points - points[0])]) if len(points) else np.zeros(1)
    origin = points[0] if len(points) else 0.0
    return before * (at - origin) - sums[before]


def merge(intervals: Iterable[tuple[float, float]], window: Window, resolution: float) -> list[tuple[float, float]]:
    """`intervals` cut to `window`, with neighbours closer than `resolution` seconds made one; at least that long."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if end < window.start or start > window.end:
            continue
        start, end = max(start, window.start), min(max(end, start + resolution), window.end)
        if merged and start - merged[-1][1] <= resolution:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def iteration_bounds(data: RunData) -> list[tuple[int, float, float]]:
    """(iteration, start, end) for every finished iteration, in order."""
    times, seconds = data.column("time"), data.column("iteration_s")
    return [
        (int(row["iteration"]), float(end - span), float(end))
        for row, end, span in zip(data.iterations, times, seconds, strict=True)
        if isinstance(row.get("iteration"), int) and np.isfinite(end) and np.isfinite(span)
    ]


def extent(data: RunData) -> tuple[float, float] | None:
    """First start and last end of anything on the timeline; `None` when it is empty."""
    pairs = [(span.start, span.end) for spans in data.spans.values() for span in spans]
    pairs += [(float(found[:, 0].min()), float(found[:, 1].max())) for found in data.samples.values() if len(found)]
    if not pairs:
        return None
    start, end = min(start for start, _ in pairs), max(end for _, end in pairs)
    return start, max(end, start + 1e-3)


def windows(data: RunData, iterations: int = 3) -> list[Window]:
    """The whole run, then `iterations` consecutive ones early (the first is a warm-up), in the middle and last."""
    whole = extent(data)
    if whole is None:
        return []
    found = [Window("Whole run", *whole)]
    bounds = iteration_bounds(data)
    if len(bounds) <= iterations:
        return found
    latest = len(bounds) - iterations
    for name, first in (("Early", min(1, latest)), ("Middle", latest // 2), ("Last", latest)):
        part = bounds[first : first + iterations]
        title = f"{name}: iterations {part[0][0] + 1} to {part[-1][0] + 1}"
        window = Window(title, part[0][1], part[-1][2])
        if window.end > window.start and all(_overlap(window, other) < 0.5 for other in found[1:]):
            found.append(window)
    return found


def _overlap(one: Window, other: Window) -> float:
    """Share of `one` that `other` covers."""
    return max(0.0, min(one.end, other.end) - max(one.start, other.start)) / (one.end - one.start)


def lanes(data: RunData) -> Sequence[str]:
    """Top to bottom: units, then weights, then trainer ranks."""
    order = {"unit": 0, "weights": 1, "trainer": 2}
    names = {*data.spans, *data.samples}
    return sorted(names, key=lambda lane: (order.get(lane.partition("/")[0], 3), len(lane), lane))
