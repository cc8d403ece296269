"""The HTML page around the charts: one file that loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import yaml

from services.report.charts import Chart
from services.report.data import RunData, as_number

_CSS = """
body{font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:#1f2933;background:#f7f8fa;margin:0}
main{max-width:1040px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:17px;margin:0 0 4px}
.sub{color:#7b8794;margin:0 0 20px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:12px;margin-bottom:20px}
.card,section{background:#fff;border:1px solid #e4e7eb;border-radius:8px}
.card{padding:12px 16px}.card b{display:block;font-size:19px;font-variant-numeric:tabular-nums}
.card span{color:#7b8794;font-size:13px}
section{padding:18px 20px;margin-bottom:16px}
section p{color:#52606d;margin:0 0 10px;font-size:14px}
section svg{width:100%;height:auto;display:block}
table{border-collapse:collapse;font-size:14px}td{padding:2px 18px 2px 0;vertical-align:top}td:first-child{color:#7b8794}
pre{font-size:12.5px;line-height:1.45;overflow:auto;margin:10px 0 0}summary{cursor:pointer;font-weight:600}
.warn{background:#fff8e6;border-color:#f0d68a}
"""


def render(data: RunData, charts: Sequence[Chart]) -> str:
    notes = _notes(data)
    body = [
        f"<h1>{escape(data.name)}</h1>",
        f'<p class="sub">{escape(_subtitle(data))}</p>',
        f'<section class="warn">{"<br>".join(map(escape, notes))}</section>' if notes else "",
        f'<div class="cards">{"".join(_card(*card) for card in _cards(data))}</div>',
        *(_section(chart) for chart in charts),
        _details("Summary", _table(data.summary)) if data.summary else "",
        _details("Configuration", f"<pre>{escape(yaml.safe_dump(data.config, sort_keys=False))}</pre>")
        if data.config
        else "",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(data.name)} - streamrl</title><style>{_CSS}</style></head><body><main>\n"
        + "\n".join(filter(None, body))
        + "\n</main></body></html>\n"
    )


def _subtitle(data: RunData) -> str:
    pipeline, sgs, trainer = (data.config.get(key) or {} for key in ("pipeline", "sgs", "trainer"))
    mode = data.summary.get("mode") or pipeline.get("mode")
    parts = [
        f"{mode} pipeline" if mode else "",
        f"{len(data.iterations)} iterations",
        f"{sgs['units']} DP units" if "units" in sgs else "",
        f"{trainer['ranks']} trainer ranks" if "ranks" in trainer else "",
        f"{trainer['backend']} backend" if "backend" in trainer else "",
    ]
    return " · ".join(filter(None, parts))


def _notes(data: RunData) -> list[str]:
    notes = []
    if not data.summary:
        notes.append("The run left no summary: it was cut short or is still going on.")
    elif data.summary.get("finished") is False:
        notes.append("The run was stopped before its last iteration.")
    if data.skipped:
        notes.append(f"{data.skipped} incomplete rows were passed over.")
    return notes


def _cards(data: RunData) -> list[tuple[str, str]]:
    shown: list[tuple[str, str, Callable[[float], str]]] = [
        ("samples_per_s", "samples/s", lambda v: f"{v:,.1f}"),
        ("tokens_per_s", "tokens/s", lambda v: f"{v:,.0f}"),
        ("wall_s", "wall time", _duration),
        ("bubble_share", "trainer waiting", lambda v: f"{100 * v:.1f} %"),
        ("staleness_max", "largest staleness", lambda v: f"{v:.0f}"),
        ("samples_lost", "samples lost", lambda v: f"{v:.0f}"),
        ("samples_duplicated", "samples duplicated", lambda v: f"{v:.0f}"),
    ]
    cards = []
    for key, name, form in (("accuracy", "held-out accuracy", "{:.1%}"), ("reward", "mean reward", "{:.3f}")):
        start, end = as_number(data.summary.get(f"{key}_start")), as_number(data.summary.get(f"{key}_end"))
        if start == start and end == end:
            cards.append((f"{form.format(start)} → {form.format(end)}", name))
    for key, name, show in shown:
        value = as_number(data.summary.get(key))
        if value == value:
            cards.append((show(value), name))
    return cards


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _card(value: str, name: str) -> str:
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>'


def _section(chart: Chart) -> str:
    caption = f"<p>{escape(chart.caption)}</p>" if chart.caption else ""
    return f"<section><h2>{escape(chart.title)}</h2>{caption}{chart.svg}</section>"


def _details(title: str, inner: str) -> str:
    return f"<section><details><summary>{escape(title)}</summary>{inner}</details></section>"


def _table(values: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(str(key))}</td><td>{escape(_cell(value))}</td></tr>" for key, value in values.items()
    )
    return f"<table>{rows}</table>"


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
