"""The report: what is computed for it, and that its page stands alone."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import UsageError
from services.report import has_data, write_report
from services.report.data import read_run
from services.report.timeline import Window, extent, lanes, merge, occupancy, windows

T0 = 1_700_000_000.0


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def iteration_row(index: int, seconds: float = 2.0) -> dict[str, Any]:
    values = {"reward": 0.1 * index, "samples": 8, "tokens": 80, "samples_per_s": 4.0, "tokens_per_s": 40.0}
    times = {"iteration_s": seconds, "generation_s": 1.5, "train_s": 0.8, "wait_s": 0.4, "publish_s": 0.1}
    more = {"staleness_max": index % 2, "logprob_gap_max": 1e-6, "length_mean": 10.0, "length_max": 20}
    head = {"kind": "iteration", "iteration": index, "iterations": 9, "version": index + 1}
    return {**head, "time": T0 + seconds * (index + 1), **values, **times, **more}


def span(lane: str, kind: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    return {"lane": lane, "kind": kind, "start": T0 + start, "end": T0 + end, "iteration": int(start // 2), **more}


def make_run(directory: Path, iterations: int = 9) -> Path:
    directory.mkdir()
    metrics: list[dict[str, Any]] = [{"kind": "eval", "iteration": 0, "version": 0, "accuracy": 0.25, "samples": 20}]
    timeline = []
    for index in range(iterations):
        at = 2.0 * index
        metrics.append(iteration_row(index))
        for unit in ("unit/unit-0", "unit/<b>"):
            timeline += [span(unit, "sample", at + 0.1 * k, at + 1.0 + 0.1 * k, tokens=5 + k) for k in range(5)]
        timeline.append(span("trainer/0", "wait", at, at + 0.4))
        timeline.append(span("trainer/0", "train", at + 0.4, at + 1.2))
        timeline.append(span("weights/unit-0", "stage", at + 1.3, at + 1.7))
        timeline.append(span("weights/unit-0", "commit", at + 1.7, at + 1.71))
    metrics.append({"kind": "eval", "iteration": iterations, "version": iterations, "accuracy": 0.9, "samples": 20})
    write_rows(directory / "metrics.jsonl", metrics)
    write_rows(directory / "timeline.jsonl", timeline)
    summary = {"finished": True, "mode": "stream", "wall_s": 18.0, "accuracy_start": 0.25, "accuracy_end": 0.9}
    (directory / "summary.json").write_text(json.dumps(summary))
    (directory / "config.yaml").write_text("sgs: {units: 2}\nrun: {name: '<script>alert(1)</script>'}\n")
    return directory


class Page(HTMLParser):
    """Collects what a browser would load, and the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
                self.loads.append(value or "")


def test_the_page_loads_nothing_and_shows_every_chart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    text = write_report(run).read_text()
    page = Page(text)
    assert all(load.startswith(("#", "data:")) for load in page.loads), page.loads
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert not re.search(r"url\(\s*['\"]?(?!#|data:)", text)
    assert "@import" not in text
    assert "25.0% → 90.0%" in text
    for title in ("Learning", "Whole run", "Early", "Last", "Where the time goes", "Completion lengths", "On-policy"):
        assert re.search(rf"<h2>[^<]*{title}", text), title
    assert page.tags.count("svg") == page.tags.count("h2")
    assert {path.stem for path in (run / "plots").glob("*.png")} == {"learning", "stages", "timeline-0"}


def test_a_run_that_was_cut_short_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", iterations=2)
    (run / "summary.json").unlink()
    for name in ("metrics.jsonl", "timeline.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"kind": "itera\n{"kind": "iterati')
    text = write_report(run).read_text()
    assert "cut short" in text
    assert "2 incomplete rows" in text


@pytest.mark.parametrize("kept", ["metrics.jsonl", "timeline.jsonl"])
def test_either_file_alone_is_enough(tmp_path: Path, kept: str) -> None:
    run = make_run(tmp_path / "run", iterations=3)
    for name in {"metrics.jsonl", "timeline.jsonl", "config.yaml", "summary.json"} - {kept}:
        (run / name).unlink()
    assert "<svg" in write_report(run).read_text()


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", iterations=3)
    rows = [
        {**iteration_row(0), "reward": None, "logprob_gap_max": float("nan")},
        {"kind": "iteration", "iteration": 1},
    ]
    write_rows(run / "metrics.jsonl", rows)
    write_rows(run / "timeline.jsonl", [{"lane": "trainer/0", "kind": "train", "start": None, "end": 3}, {"x": 1}])
    write_report(run)
    assert read_run(run).skipped == 2


def test_without_data_there_is_no_report(tmp_path: Path) -> None:
    assert not has_data(tmp_path)
    with pytest.raises(UsageError, match="nothing to report"):
        write_report(tmp_path)
    with pytest.raises(UsageError, match="no such run directory"):
        write_report(tmp_path / "nope")


def test_windows_are_the_whole_run_and_three_closer_looks(tmp_path: Path) -> None:
    data = read_run(make_run(tmp_path / "run"))
    whole, early, middle, last = windows(data)
    assert (whole.start, whole.end) == extent(data) == (T0, T0 + 17.71)
    assert early.title == "Early: iterations 2 to 4"
    assert middle.title == "Middle: iterations 4 to 6"
    assert last.title == "Last: iterations 7 to 9"
    assert (last.start, last.end) == (T0 + 12, T0 + 18)


def test_lanes_are_units_then_weights_then_ranks(tmp_path: Path) -> None:
    assert lanes(read_run(make_run(tmp_path / "run"))) == ["unit/<b>", "unit/unit-0", "weights/unit-0", "trainer/0"]


intervals = st.lists(
    st.tuples(st.floats(0, 100), st.floats(0, 30)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=30
)


@given(intervals, st.integers(1, 40))
def test_occupancy_is_the_mean_number_running(found: list[tuple[float, float]], bins: int) -> None:
    edges = np.linspace(10.0, 90.0, bins + 1)
    expected = [
        sum(max(0.0, min(end, right) - max(start, left)) for start, end in found) / (right - left)
        for left, right in pairwise(edges)
    ]
    array = np.array(found, dtype=np.float64).reshape(-1, 2)
    np.testing.assert_allclose(occupancy(array, edges), expected, atol=1e-9)


@given(intervals, st.floats(0.01, 5))
def test_merged_bars_cover_what_they_stand_for(found: list[tuple[float, float]], resolution: float) -> None:
    window = Window("", 10.0, 90.0)
    bars = merge(found, window, resolution)
    for (_, left_end), (right_start, _) in pairwise(bars):
        assert right_start - left_end > resolution
    for start, end in found:
        if end < window.start or start > window.end:
            continue
        low, high = max(start, window.start), min(end, window.end)
        assert any(bar_start <= low and high <= bar_end for bar_start, bar_end in bars)


def test_a_gap_wider_than_the_resolution_stays_visible() -> None:
    found = [(1.0, 2.0), (2.05, 3.0), (3.2, 4.0), (9.0, 9.0)]
    assert merge(found, Window("", 0.0, 10.0), 0.1) == [(1.0, 3.0), (3.2, 4.0), (9.0, 9.1)]
