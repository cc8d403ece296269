"""The figures of a report: SVG for the page, and PNGs of those that are shown elsewhere."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from services.report.data import Floats, RunData, column
from services.report.timeline import Window, iteration_bounds, lanes, merge, occupancy, windows

_INK, _SOFT, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, GREEN, ORANGE, RED, PURPLE, GREY = "#2f6fde", "#2a9d63", "#e8871e", "#d64545", "#7c5cc4", "#c3cad3"
_KINDS = {
    "train": (GREEN, "training"),
    "step": ("#14663d", "optimizer step"),
    "wait": ("#f3b8b8", "waiting for samples"),
    "publish": (PURPLE, "publishing"),
    "stage": ("#b9a7e6", "staging weights"),
    "commit": ("#3d2780", "commit"),
    "eval": ("#62b6cb", "evaluation"),
    "checkpoint": ("#8d7b5c", "checkpoint"),
}
_STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _SOFT,
    "axes.edgecolor": _GRID,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titley": 1.0,  # else every axis is measured to find the title's place
    "grid.color": _GRID,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "white",
    "svg.fonttype": "none",
}
_AS_PNG = ("learning", "timeline-0", "stages")
_BINS = 700
_BOUNDARIES_SHOWN = 60
_WIDTH, _ABOVE, _BELOW, _BESIDE = 9.6, 0.35, 0.45, 0.15


@dataclass(frozen=True)
class Chart:
    name: str
    title: str
    caption: str
    svg: str


_TIMELINE_CAPTION = (
    "Blue: samples being decoded on each unit, darker is more. White on a unit and red on the trainer are bubbles: "
    "nobody works there. Grey lines are iteration boundaries."
)
_STAGES_CAPTION = (
    "Areas: how the trainer spent each iteration. Generation (first prompt to last sample) and publishing run beside "
    "it where the pipeline overlaps them."
)
_EXACTNESS_CAPTION = (
    "Largest difference between the engine's and the trainer's log-probability of a token, and how many versions the "
    "oldest trained token was behind."
)


def draw_all(data: RunData, plots: Path) -> list[Chart]:
    """Every chart the data allows; PNGs of learning, timeline and stages go to `plots`."""
    plots.mkdir(parents=True, exist_ok=True)
    for old in plots.glob("*.png"):
        old.unlink()
    charts: list[Chart] = []

    def add(name: str, title: str, caption: str, figure: Figure) -> None:
        charts.append(_save(name, title, caption, figure, plots))

    with mpl.rc_context(_STYLE):
        if data.iterations or data.evals:
            caption = "Mean reward per iteration (line: moving average) and held-out accuracy by weight version."
            add("learning", "Learning", caption, _learning(data))
        for index, window in enumerate(windows(data)):
            caption = "" if index else _TIMELINE_CAPTION
            add(f"timeline-{index}", f"Timeline. {window.title}", caption, _timeline(data, window))
        if data.iterations:
            add("stages", "Where the time goes", _STAGES_CAPTION, _stages(data))
            caption = "Mean and maximum per iteration, and the distribution over the run."
            add("lengths", "Completion lengths", caption, _lengths(data))
            add("exactness", "On-policy checks", _EXACTNESS_CAPTION, _exactness(data))
    return charts


def _save(name: str, title: str, caption: str, figure: Figure, plots: Path) -> Chart:
    if name in _AS_PNG:
        figure.savefig(plots / f"{name}.png", dpi=130)
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    return Chart(name, title, caption, svg[svg.index("<svg") :])


def _figure(height: float, columns: int = 1, left: float = 0.6, above: float = _ABOVE) -> tuple[Figure, list[Any]]:
    """Axes side by side; sizes in inches, `left` and `above` are what labels and a legend take.

    The margins are fixed: a layout engine draws everything twice to measure it.
    """
    figure = Figure(figsize=(_WIDTH, height))
    width = _WIDTH / columns
    axes = [
        figure.add_axes(
            (
                (column * width + left) / _WIDTH,
                _BELOW / height,
                (width - left - _BESIDE) / _WIDTH,
                1 - (above + _BELOW) / height,
            )
        )
        for column in range(columns)
    ]
    return figure, axes


def _numbers(data: RunData) -> Floats:
    """Iterations as people count them, from 1."""
    return data.column("iteration") + 1


def _learning(data: RunData) -> Figure:
    figure, (left, right) = _figure(3.0, 2)
    x, reward = _numbers(data), data.column("reward")
    left.plot(x, reward, color=BLUE, alpha=0.35, linewidth=1)
    left.plot(x, _smooth(reward), color=BLUE, linewidth=2)
    left.set(title="Mean reward", xlabel="iteration")
    version, accuracy = column(data.evals, "version"), column(data.evals, "accuracy")
    right.plot(version, 100 * accuracy, color=GREEN, linewidth=2, marker="o", markersize=5)
    for at in {0, len(accuracy) - 1} if len(accuracy) else set():
        right.annotate(
            f"{100 * accuracy[at]:.1f} %",
            (version[at], 100 * accuracy[at]),
            (0, 7),
            textcoords="offset points",
            ha="center",
        )
    right.set(title="Held-out accuracy, %", xlabel="weight version", ylim=(0, 108))
    _whole_numbers(left, right)
    return figure


def _smooth(values: Floats) -> Floats:
    """Centred moving average over about a twentieth of the run; NaN does not spread."""
    width = max(1, len(values) // 20) | 1
    known = np.isfinite(values)
    kernel = np.ones(width)
    total = np.convolve(np.where(known, values, 0.0), kernel, "same")
    count = np.convolve(known.astype(float), kernel, "same")
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)[: len(values)]


def _stages(data: RunData) -> Figure:
    figure, (axes,) = _figure(3.2)
    x = _numbers(data)
    train, wait, whole = (np.nan_to_num(data.column(key)) for key in ("train_s", "wait_s", "iteration_s"))
    rest = np.maximum(0.0, whole - train - wait)
    edges = np.arange(len(x) + 1) + (x[0] - 0.5 if len(x) else 0.5)
    axes.stackplot(
        np.repeat(edges, 2)[1:-1],
        *(np.repeat(part, 2) for part in (train, wait, rest)),
        colors=[GREEN, "#f3b8b8", GREY],
        labels=["training", "waiting for samples", "other"],
        linewidth=0,
    )
    axes.plot(x, data.column("generation_s"), color=BLUE, linewidth=1.5, label="generation (beside)")
    axes.plot(x, data.column("publish_s"), color=PURPLE, linewidth=1.5, label="publishing (beside)")
    axes.set(title="Seconds per iteration", xlabel="iteration", xlim=(edges[0], edges[-1]))
    axes.set_ylim(bottom=0)
    axes.legend(ncols=5, loc="lower right", bbox_to_anchor=(1, 1.0))
    _whole_numbers(axes)
    return figure


def _lengths(data: RunData) -> Figure:
    figure, (left, right) = _figure(2.8, 2)
    x = _numbers(data)
    left.plot(x, data.column("length_max"), color=ORANGE, linewidth=1.2, label="maximum")
    left.plot(x, data.column("length_mean"), color=BLUE, linewidth=2, label="mean")
    left.set(title="Tokens per completion", xlabel="iteration")
    left.set_ylim(bottom=0)
    left.legend()
    if len(data.lengths):
        counts, edges = np.histogram(data.lengths, bins=min(60, max(5, int(np.ptp(data.lengths)) + 1)))
        right.stairs(counts, edges, fill=True, color=BLUE, alpha=0.8)
        right.set_ylim(bottom=0)
        for share, name in ((50, "P50"), (90, "P90"), (99, "P99")):
            at = float(np.percentile(data.lengths, share))
            right.axvline(at, color=_INK, linewidth=0.8, linestyle=":")
            right.annotate(
                name, (at, 1.0), (2, -9), xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=7
            )
    right.set(title="Distribution over the run", xlabel="tokens", ylabel="samples")
    _whole_numbers(left)
    return figure


def _exactness(data: RunData) -> Figure:
    figure, (left, right) = _figure(2.6, 2)
    x, gap = _numbers(data), data.column("logprob_gap_max")
    left.plot(x, gap, color=RED, linewidth=1.5)
    if np.any(gap > 0):
        left.set_yscale("log")
        left.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value:.0e}"))  # plain text: maths is slow
        left.yaxis.set_minor_formatter(NullFormatter())
    left.set(title="Largest log-probability gap", xlabel="iteration")
    right.step(x, data.column("staleness_max"), where="mid", color=PURPLE, linewidth=1.5)
    right.set(title="Largest staleness, versions", xlabel="iteration")
    right.set_ylim(bottom=-0.1, top=max(1.5, float(np.nanmax(np.append(data.column("staleness_max"), 0))) + 0.5))
    _whole_numbers(left, right)
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _timeline(data: RunData, window: Window) -> Figure:
    rows = lanes(data)
    titles = [_lane_title(lane) for lane in rows]
    left, above = 0.2 + 0.065 * max(map(len, titles)), 0.45  # two rows of legend
    figure, (axes,) = _figure(above + _BELOW + 0.36 * len(rows), left=left, above=above)
    origin = windows(data)[0].start
    edges = np.linspace(window.start, window.end, _BINS + 1)
    counts = {lane: occupancy(found, edges) for lane, found in data.samples.items()}
    busiest = max((float(found.max()) for found in counts.values()), default=0.0)
    shown: set[str] = set()
    for row, lane in enumerate(rows):
        if lane in counts:
            box = (edges[0] - origin, edges[-1] - origin, row + 0.38, row - 0.38)
            axes.imshow(
                counts[lane][None, :],
                cmap="Blues",
                vmin=0,
                vmax=1.15 * busiest or 1.0,
                extent=box,
                aspect="auto",
                interpolation="nearest",
                zorder=2,
            )
        shown |= _bars(axes, data, lane, row, window, origin)
    ends = [end - origin for _number, _start, end in iteration_bounds(data) if window.start <= end <= window.end]
    for end in ends if len(ends) <= _BOUNDARIES_SHOWN else ():
        axes.axvline(end, color=_SOFT, linewidth=0.6, zorder=3)
    axes.set(
        xlim=(window.start - origin, window.end - origin),
        ylim=(len(rows) - 0.5, -0.5),
        xlabel="seconds since the first event",
    )
    axes.set_yticks(range(len(rows)), titles)
    axes.grid(False)
    axes.tick_params(axis="y", length=0)
    handles = [Patch(color="#6aaed6", label=f"decoding (up to {busiest:.0f} samples)")] if counts else []
    handles += [Patch(color=color, label=title) for kind, (color, title) in _KINDS.items() if kind in shown]
    if handles:
        axes.legend(
            handles=handles, ncols=min(5, len(handles)), loc="lower right", bbox_to_anchor=(1, 1.0), handlelength=1.2
        )
    return figure


def _bars(axes: Any, data: RunData, lane: str, row: int, window: Window, origin: float) -> set[str]:
    """Draw the spans of one lane; returns the kinds that were there."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for span in data.spans.get(lane, ()):
        by_kind.setdefault(span.kind, []).append((span.start, span.end))
    resolution = (window.end - window.start) / 1500
    drawn = set()
    for kind, (color, _title) in _KINDS.items():
        bars = merge(by_kind.get(kind, ()), window, resolution)
        if bars:
            spans = [(start - origin, end - start) for start, end in bars]
            axes.broken_barh(spans, (row - 0.38, 0.76), facecolors=color, linewidth=0, zorder=2)
            drawn.add(kind)
    return drawn


def _lane_title(lane: str) -> str:
    kind, _, name = lane.partition("/")
    return {"trainer": f"trainer rank {name}", "unit": name, "weights": f"weights to {name}"}.get(kind, lane)


def _whole_numbers(*axes: Any) -> None:
    for one in axes:
        one.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
