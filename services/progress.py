"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]
_ROWS_SHOWN = 8
_PLAIN_LINES = 50
_PLAIN_PAUSE_S = 10.0


class View(Protocol):
    """Where the supervisor tells its user how things go. A context manager."""

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def warmup(self, step: int, steps: int, loss: float | None) -> None:
        """The supervised warm-up did `step` of `steps`."""

    def row(self, row: Row) -> None:
        """A row of `metrics.jsonl`."""

    def services(self, states: Sequence[tuple[str, str]]) -> None:
        """(name, state) of every process, whenever one may have changed."""

    def note(self, text: str) -> None:
        """Something happened that the user should know."""


def make_view(console: Console) -> View:
    return LiveView(console) if console.is_terminal else PlainView(console)


class PlainView:
    """One line per event; an iteration line for every fiftieth of the run, and at least every ten seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.time) -> None:
        self._console = console
        self._clock = clock
        self._warmup_shown = -1
        self._shown_at = clock()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def warmup(self, step: int, steps: int, loss: float | None) -> None:
        tenth = 10 * step // steps if steps else 10
        if tenth != self._warmup_shown:
            self._warmup_shown = tenth
            self.note(f"warm-up {step}/{steps}" + (f"  loss {loss:.3f}" if loss is not None else ""))

    def row(self, row: Row) -> None:
        if row.get("kind") == "eval":
            self.note(f"evaluation of version {row.get('version')}: accuracy {_percent(row.get('accuracy'))}")
        elif row.get("kind") == "iteration" and self._due(row):
            self._shown_at = self._clock()
            cells = "  ".join(f"{title} {show(row)}" for title, show in _COLUMNS[1:])
            self.note(f"iteration {_done(row)}/{row.get('iterations')}  {cells}")

    def services(self, states: Sequence[tuple[str, str]]) -> None:
        return

    def note(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(self._clock()))
        self._console.print(f"{stamp} {text}", highlight=False, markup=False, soft_wrap=True)

    def _due(self, row: Row) -> bool:
        if self._clock() - self._shown_at >= _PLAIN_PAUSE_S:
            return True
        done, iterations = _done(row), int(row.get("iterations") or 0)
        return done in (1, iterations) or done % max(1, iterations // _PLAIN_LINES) == 0


class LiveView:
    """A progress bar, the last iterations, and the state of every process, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[more]}"),
            console=console,
            expand=True,
        )
        self._warmup_task = self._bar.add_task("warm-up", total=None, more="", visible=False)
        self._run_task = self._bar.add_task("iterations", total=None, more="", visible=False)
        self._rows: deque[Row] = deque(maxlen=_ROWS_SHOWN)
        self._accuracy: list[tuple[Any, Any]] = []
        self._states: Sequence[tuple[str, str]] = ()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)

    def __enter__(self) -> View:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def warmup(self, step: int, steps: int, loss: float | None) -> None:
        more = f"loss {loss:.3f}" if loss is not None else ""
        self._bar.update(self._warmup_task, completed=step, total=steps, more=more, visible=True)

    def row(self, row: Row) -> None:
        if row.get("kind") == "eval":
            self._accuracy.append((row.get("version"), row.get("accuracy")))
        elif row.get("kind") == "iteration":
            self._rows.append(row)
            self._bar.update(self._run_task, completed=_done(row), total=row.get("iterations"), visible=True)

    def services(self, states: Sequence[tuple[str, str]]) -> None:
        self._states = tuple(states)

    def note(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._bar]
        if self._rows:
            table = Table(box=None, pad_edge=False, header_style="dim")
            for title, _show in _COLUMNS:
                table.add_column(title, justify="right", no_wrap=True)
            for row in self._rows:
                table.add_row(*(show(row) for _title, show in _COLUMNS))
            parts.append(table)
        if self._accuracy:
            first, last = self._accuracy[0], self._accuracy[-1]
            later = f" → {_percent(last[1])} (version {last[0]})" if len(self._accuracy) > 1 else ""
            parts.append(Text(f"accuracy {_percent(first[1])} (version {first[0]}){later}", style="green"))
        if self._states:
            parts.append(Text("  ".join(f"{name}: {state}" for name, state in self._states), style="dim"))
        return Group(*parts)


def _done(row: Row) -> int:
    """Finished iterations; rows count from 0."""
    return int(row.get("iteration") or 0) + 1


def _number(key: str, form: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        value = row.get(key)
        return format(value, form) if isinstance(value, (int, float)) else "-"

    return show


def _percent(value: Any) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, (int, float)) else "-"


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("iteration", lambda row: str(_done(row))),
    ("version", _number("version", "d")),
    ("reward", _number("reward", ".3f")),
    ("samples/s", _number("samples_per_s", ".1f")),
    ("tokens/s", _number("tokens_per_s", ".0f")),
    ("seconds", _number("iteration_s", ".2f")),
    ("generate", _number("generation_s", ".2f")),
    ("train", _number("train_s", ".2f")),
    ("wait", _number("wait_s", ".2f")),
    ("bubble", lambda row: _percent(row.get("bubble_share"))),
    ("stale", _number("staleness_max", "d")),
    ("length", _number("length_mean", ".1f")),
)
