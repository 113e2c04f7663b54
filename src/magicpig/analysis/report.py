"""An analysis as files: analysis.json, PNG plots, and report.html that holds them all."""

from __future__ import annotations

import html
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from magicpig.analysis import findings, plots, words
from magicpig.analysis.summary import Results, rows_of, worst_heads
from magicpig.plotting import data_uri

REPORT, DATA = "report.html", "analysis.json"

CAPTIONS = {
    "errors.png": "Error of attention's output, |estimate - exact| / |exact| of a head, against "
    "the share of far keys whose rows are read. Lower left is better. Top-k, oracle and priority "
    "sampling know all scores, which no method that decodes does: they show what could be reached. "
    "Hash tables and codes run as they do when decoding. Labels: bits per table, tables.",
    "heads.png": "Every dot is a head. To the right are heads with flat attention: much of it lies "
    "in the tail, the far keys outside the top 2 %. Top-k leaves the tail out, so its error grows "
    "with it; sampling speaks for the tail, at the price of chance.",
    "layers.png": "Mean error by layer. The dense layers read everything when decoding and are "
    "left out of all other figures unless they say otherwise.",
    "observations.png": "What hashing rests on. 1: first tokens look alike, whatever they are. "
    "2: the mean key points the same way in all inputs. 3: mean key and sink key point in "
    "opposite directions. Keys are taken as they stand in the cache.",
    "mass.png": "How much of the attention the top 20 % of keys receive. Heads that are dark "
    "cannot be served by top-k with few keys.",
    "inclusion.png": "How often a key is drawn, by its cosine to the query, against the formula "
    "by which its weight is corrected. Bars: three standard errors.",
}
DECISIVE_ONES = (
    "Decisive: of the far keys that have a tenth or more of a query's attention, those that "
    "are read. Few heads have such keys, so a mean error hardly shows when they are missed; but "
    "what is copied from a long text hangs on them."
)
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1080px; margin: 2em auto;
       padding: 0 1em; }
h1 { font-size: 1.6em } h2 { font-size: 1.2em; margin-top: 2.2em }
table { border-collapse: collapse; font-size: .85em; font-variant-numeric: tabular-nums }
th, td { padding: .2em .7em; text-align: right; border-bottom: 1px solid #eceef0 }
th:first-child, td:first-child { text-align: left }
.scroll { overflow-x: auto }
img { max-width: 100% } figure { margin: 1em 0 }
figcaption, .note { color: #59636e; font-size: .9em }
ul { list-style: none; padding: 0 } li { margin: .7em 0; padding-left: 10.5em; position: relative }
.verdict { position: absolute; left: 0; width: 9.5em; font-size: .8em; font-weight: 600;
           color: #fff; border-radius: 4px; text-align: center; padding: .15em 0 }
.good { background: #1a7f37 } .part { background: #9a6700 } .bad { background: #b3261e }
"""
CLASSES = {
    words.AGREES: "good",
    words.HELPS: "good",
    words.IN_PART: "part",
    words.HELPS_IN_PART: "part",
    words.DIFFERS: "bad",
    words.DOES_NOT_HELP: "bad",
}
OBSERVED = {
    "sink_state_similarity": "first token, state",
    "sink_key_similarity": "first token, key",
    "later_state_similarity": "later token, state",
    "later_key_similarity": "later token, key",
    "mean_key_stability": "mean key between inputs",
    "mean_key_stability_lowest_head": "lowest head",
    "mean_sink_cosine": "mean key and sink key",
    "mean_sink_cosine_lowest_head": "lowest head",
    "mean_sink_cosine_highest_head": "highest head",
}


def write(results: Results, folder: Path) -> list[Path]:
    """Writes all files into the folder; those of an earlier analysis are replaced.

    They are made beside it first, so that an interrupt leaves the folder as it was.
    """
    pictures = plots.draw(results)
    files = {
        DATA: (json.dumps(rounded(results), indent=1, allow_nan=False) + "\n").encode(),
        **pictures,
        REPORT: page(results, pictures).encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".analysis-", dir=folder))
    try:
        for name, data in files.items():
            (making / name).write_bytes(data)
        for name in files:
            os.replace(making / name, folder / name)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return [folder / name for name in files]


def rounded(x: Any) -> Any:
    """The same with five digits of every float; what is not a finite number is null."""
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.5g}") if abs(x) < float("inf") else None
    return x


def described(about: Results) -> str:
    """One line on what was studied."""
    return (
        f"{about['inputs']} excerpts of {about['tokens']:,} tokens, the last {about['positions']} "
        f"queries of each, {len(about['layers'])} layers x {about['num_heads']} heads "
        f"({about['num_kv_heads']} KV heads of {about['head_dim']}), {about['dtype']}; "
        f"{about['sinks']} first and {about['local']} or more last tokens exact in every method, "
        f"{about['far_keys']:,} far keys; dense layers: "
        f"{', '.join(map(str, about['dense_layers'])) or 'none'}"
    )


def page(results: Results, pictures: dict[str, bytes]) -> str:
    """The report: one HTML file that needs no other."""
    about = results["about"]
    title = html.escape(f"Attention of {about['model']}")
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>"
        f'<p class="note">{html.escape(described(about))}.</p>',
        "<h2>Findings</h2><ul>",
        *(_finding(found) for found in results["findings"]),
        f'</ul><p class="note">{html.escape(findings.BORDERS)}</p>',
        "<h2>Error against keys read</h2>",
        _figure("errors.png", pictures),
        _figure("heads.png", pictures),
        _figure("layers.png", pictures),
        f'<p class="note">{html.escape(DECISIVE_ONES)}</p>',
        error_table(results),
        "<h2>Errors that are asked for</h2>",
        _target_table(results),
        "<h2>Mass of the top keys</h2>",
        _figure("mass.png", pictures),
        _mass_table(results),
        "<h2>The three observations</h2>",
        _figure("observations.png", pictures),
        _observation_table(results),
        "<h2>How keys are drawn</h2>",
        _figure("inclusion.png", pictures),
        _inclusion_table(results),
        "</body></html>",
    ]
    return "\n".join(parts)


def _finding(found: dict[str, str]) -> str:
    verdict, name, sentence = (html.escape(found[key]) for key in ("verdict", "name", "sentence"))
    return (
        f'<li><span class="verdict {CLASSES[found["verdict"]]}">{verdict}</span>'
        f"<b>{name[0].upper()}{name[1:]}.</b> {sentence}</li>"
    )


def _figure(name: str, pictures: dict[str, bytes]) -> str:
    caption = html.escape(CAPTIONS[name])
    return (
        f'<figure><img alt="{caption}" src="{data_uri(pictures[name])}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _table(header: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def error_rows(results: Results) -> list[list[str]]:
    """For tables: method, keys read, decisive ones among them, errors."""
    return [
        [
            row["name"],
            f"{100 * row['share']:.2f} %",
            "" if row["decisive"] is None else f"{100 * row['decisive']:.1f} %",
            *(f"{row[figure]:.3f}" for figure in ("mean", "median", "p90", "p99")),
        ]
        for row in sorted(
            results["errors"], key=lambda row: list(plots.LOOKS).index(plots.words_of(row["name"]))
        )
    ]


def error_table(results: Results) -> str:
    header = ["method", "far keys read", "decisive", "mean error", "median", "p90", "p99"]
    return _table(header, error_rows(results))


def _target_table(results: Results) -> str:
    header = ["bits", "target", "predicted", "mean error", "median", "p90", "p99"]
    rows = [
        [
            str(row["bits_per_dim"]),
            f"{row['target']:g}",
            *(f"{row[figure]:.3f}" for figure in ("predicted", "mean", "median", "p90", "p99")),
            *(f"{100 * row[figure]:.2f} %" for figure in ("share", "least", "most")),
        ]
        for row in results["targets"]
    ]
    return _table([*header, "far keys read", "5 % of heads less than", "5 % more than"], rows)


def _mass_table(results: Results) -> str:
    names = [row["name"] for row in results["errors"] if row["name"] in ("topk:2%", "topk:20%")]
    names += [row["name"] for row in rows_of(results["errors"], "lsh")][:1]
    header = ["lowest heads", "top 20 % of all", "top 20 % of far", "tail", *names]
    rows = [
        [
            f"layer {row['layer']}, head {row['head']}",
            *(f"{100 * row[key]:.1f} %" for key in ("top", "top_of_far", "tail")),
            *(f"{row['errors'][name]:.3f}" for name in names),
        ]
        for row in worst_heads(results["heads"])
    ]
    return _table(header, rows)


def _observation_table(results: Results) -> str:
    rows = [
        [str(row["layer"]), *(f"{row[name]:.3f}" for name in OBSERVED)]
        for row in results["observations"]
    ]
    return _table(["layer", *OBSERVED.values()], rows)


def _inclusion_table(results: Results) -> str:
    tables = results["inclusion"][0]
    name = f"({tables['bits_per_table']}, {tables['num_tables']})"
    header = [f"cosine, {name}", "keys", "drawn", "expected", "rate", "formula", "standard error"]
    rows = [
        [
            f"{row['cosine_from']:.2f} to {row['cosine_to']:.2f}",
            f"{row['keys']:,}",
            f"{row['drawn']:,}",
            f"{row['expected']:,.1f}",
            f"{row['rate']:.5f}",
            f"{row['formula']:.5f}",
            f"{max(row['grouped_error'], row['binomial_error']):.5f}",
        ]
        for row in tables["bins"]
    ]
    return _table(header, rows)
