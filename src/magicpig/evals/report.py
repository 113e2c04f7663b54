"""The report of an evaluation: results.json, plots, and a page that holds all of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from magicpig import plotting
from magicpig.evals import plots, tables
from magicpig.evals.records import Record
from magicpig.evals.summary import AVERAGE, summary
from magicpig.evals.tables import Table, markdown_table, terminal_table
from magicpig.files import write_whole
from magicpig.plotting import data_uri

__all__ = ["markdown_table", "terminal_table", "write_report"]

RESULTS_FILE = "results.json"
PAGE_FILE = "report.html"
CAPTIONS = {
    "by_keys_read": "Averages over tasks against the share of far keys read, with standard errors. "
    "The dashed line is full attention. Points at one place are drawn side by side.",
    "by_task": "Every task and method.",
}


def write_report(
    folder: str | Path,
    records: Iterable[Record],
    about: Mapping[str, Any],
    settings: Mapping[str, Any],
    title: str = "Evaluation",
) -> list[Path]:
    """Writes results.json, the plots and report.html, and returns their paths, the page's last.

    about, settings: as `about()` and `Records` have them. Needs matplotlib: see `plotting.require`.
    """
    plotting.require()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    cells = summary(records)
    if not cells:
        raise ValueError("there are no records to report")
    results = {
        "title": title,
        "about": about,
        "settings": settings,
        "cells": [{**asdict(cell), "moved_bytes": cell.moved_bytes} for cell in cells],
    }
    light, dark = (plots.draw(cells, theme) for theme in ("light", "dark"))
    pictures = [_picture(name, light[name], dark[name]) for name in light]
    page = _page(title, about, settings, pictures, tables.tables(cells))
    files = {
        RESULTS_FILE: (json.dumps(results, indent=2, allow_nan=False) + "\n").encode(),
        **light,
        PAGE_FILE: page.encode(),
    }
    for name, data in files.items():
        write_whole(folder / name, data)
    return [folder / name for name in files]


def _page(
    title: str,
    about: Mapping[str, Any],
    settings: Mapping[str, Any],
    pictures: list[str],
    blocks: list[Table],
) -> str:
    metrics = dict.fromkeys(block.metric for block in blocks)
    terms = [(metric, tables.METRICS[metric]) for metric in metrics] + list(tables.COSTS.items())
    body = [
        f"<h1>{escape(title)}</h1>",
        *([f"<pre>{escape(str(about['command']))}</pre>"] if "command" in about else []),
        *pictures,
        *map(_html_table, blocks),
        "<h2>What the columns say</h2>",
        _definitions(terms),
        f"<p>{escape(tables.NOTE)}</p>",
        "<h2>Settings</h2>",
        _definitions(_flat(settings)),
        "<h2>Versions and hardware</h2>",
        _definitions(_flat({name: about[name] for name in about if name != "command"})),
    ]
    return PAGE.format(title=escape(title), body="\n".join(body))


def _html_table(table: Table) -> str:
    head = "".join(f"<th{_side(name)}>{escape(name)}</th>" for name in ("method", *table.columns))
    rows = []
    for method, *texts in table.rows:
        cells = [f'<th scope="row">{escape(method)}</th>']
        for column, text in zip(table.columns, texts, strict=True):
            score, plus_minus, error = text.partition(" ± ")
            small = f" <small>± {escape(error)}</small>" if plus_minus else ""
            cells.append(f"<td{_side(column)}>{escape(score)}{small}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f"<h2>{escape(table.title)}</h2>\n<div class=wide><table><thead><tr>{head}</tr></thead>\n"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _side(column: str) -> str:
    """Averages stand out, and costs are apart from scores."""
    if column == AVERAGE:
        return " class=average"
    return " class=first-cost" if column == next(iter(tables.COSTS)) else ""


def _picture(name: str, light: bytes, dark: bytes) -> str:
    caption = next(text for end, text in CAPTIONS.items() if name.endswith(f"{end}.png"))
    width = int.from_bytes(light[16:20], "big") * 96 // plots.DPI  # PNG: in the first chunk
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{data_uri(dark)}">'
        f'<img src="{data_uri(light)}" width={width} alt="{escape(caption)} The tables below '
        f'have the figures."></picture><figcaption>{escape(caption)}</figcaption></figure>'
    )


def _definitions(terms: Iterable[tuple[str, str]]) -> str:
    lines = [f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in terms]
    return f"<dl>{''.join(lines)}</dl>"


def _flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Names and texts of values inside values, as one list."""
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        path = f"{before} {name}".strip().replace("_", " ")
        if isinstance(value, Mapping):
            pairs += _flat(value, path)
        elif isinstance(value, list | tuple) and any(isinstance(part, Mapping) for part in value):
            pairs += _flat({str(i): part for i, part in enumerate(value)}, path)
        elif path.endswith(" bytes") and isinstance(value, int):
            pairs.append((path.removesuffix(" bytes"), f"{value / 1e9:.1f} GB"))
        else:
            pairs.append((path, _text(value)))
    return pairs


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "none"
    return "unknown" if value is None else str(value)


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ --back: #ffffff; --text: #1f2328; --faint: #626a73; --line: #d5d9de; --tint: #f4f6f8; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --back: #16191d; --text: #e6e8ea; --faint: #9aa3ad; --line: #3a4048; --tint: #20252b; }}
}}
body {{ background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
  max-width: 1240px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; margin: 0 0 1rem; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 .5rem; }}
pre {{ background: var(--tint); padding: .6rem .8rem; border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; }}
figure {{ margin: 1.5rem 0; }}
img {{ max-width: 100%; height: auto; }}
figcaption, small {{ color: var(--faint); }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }}
th, td {{ padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }}
thead th {{ font-weight: 600; vertical-align: bottom; }}
th:first-child {{ text-align: left; position: sticky; left: 0; background: var(--back); }}
tbody tr:hover > * {{ background: var(--tint); }}
.average {{ font-weight: 600; }}
.first-cost {{ border-left: 1px solid var(--line); }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; }}
dt {{ font-weight: 600; }}
dd {{ margin: 0; overflow-wrap: anywhere; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""
