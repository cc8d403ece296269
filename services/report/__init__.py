"""The report of one run: `report.html`, self-contained, and its main charts as PNGs under `plots/`."""

from __future__ import annotations

from pathlib import Path

from services.errors import UsageError


def has_data(run_dir: Path) -> bool:
    """Whether there is anything to report on."""
    return any(
        (run_dir / name).exists() and (run_dir / name).stat().st_size for name in ("metrics.jsonl", "timeline.jsonl")
    )


def write_report(run_dir: Path) -> Path:
    """Write `report.html` and `plots/*.png` below `run_dir`; returns the page. Raises `UsageError` without data."""
    if not run_dir.is_dir():
        raise UsageError(f"{run_dir}: no such run directory")
    if not has_data(run_dir):
        raise UsageError(f"{run_dir}: nothing to report: neither metrics.jsonl nor timeline.jsonl has a row")
    from services.report.charts import draw_all
    from services.report.data import read_run
    from services.report.page import render

    data = read_run(run_dir)
    page = run_dir / "report.html"
    partial = page.with_name(".report.html.partial")
    partial.write_text(render(data, draw_all(data, run_dir / "plots")), encoding="utf-8")
    partial.replace(page)
    return page
