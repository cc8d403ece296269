"""What a person reads while a run goes on."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from services.progress import LiveView, PlainView, make_view


def row(iteration: int, iterations: int, **more: Any) -> dict[str, Any]:
    values = {"version": iteration + 1, "reward": 0.5, "samples_per_s": 12.34, "bubble_share": 0.25, **more}
    return {"kind": "iteration", "iteration": iteration, "iterations": iterations, **values}


def plain_lines(iterations: int) -> list[str]:
    out = io.StringIO()
    with make_view(Console(file=out, width=60)) as view:
        assert isinstance(view, PlainView)
        for iteration in range(iterations):
            view.row(row(iteration, iterations))
    return out.getvalue().splitlines()


def test_plain_lines_count_from_one_and_carry_the_numbers() -> None:
    (line,) = plain_lines(1)
    assert "iteration 1/1" in line
    assert "samples/s 12.3" in line
    assert "bubble 25.0 %" in line
    assert "tokens/s -" in line


@pytest.mark.parametrize("iterations", [30, 1000])
def test_plain_lines_stay_few_and_end_with_the_last_iteration(iterations: int) -> None:
    lines = plain_lines(iterations)
    assert min(iterations, 50) <= len(lines) <= 52
    assert f"iteration {iterations}/{iterations}" in lines[-1]


def test_plain_warmup_is_one_line_per_tenth() -> None:
    out = io.StringIO()
    view = PlainView(Console(file=out, width=60))
    for step in range(1, 201):
        view.warmup(step, 200, 1.0)
    assert 10 <= len(out.getvalue().splitlines()) <= 11
    assert "warm-up 200/200" in out.getvalue()


def test_the_live_view_shows_progress_accuracy_and_services() -> None:
    out = io.StringIO()
    view = make_view(Console(file=out, width=140, force_terminal=True))
    assert isinstance(view, LiveView)
    with view:
        view.warmup(3, 10, 1.5)
        view.row({"kind": "eval", "iteration": 0, "version": 0, "accuracy": 0.25})
        for iteration in range(20):
            view.row(row(iteration, 20, reward=float("nan") if iteration == 3 else 0.875))
        view.row({"kind": "eval", "iteration": 20, "version": 20, "accuracy": 0.9})
        view.services([("head", "running"), ("unit-0", "running, restarted 1x")])
        view.note("unit-0 [x] was killed")
    text = out.getvalue()
    for shown in ("20/20", "0.875", "25.0 %", "90.0 %", "restarted 1x", "unit-0 [x] was killed"):
        assert shown in text
