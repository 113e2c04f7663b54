"""Tables, reports and plots of an evaluation."""

import base64
import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console
from samples import PNG, SETTINGS, many, record

from magicpig import files
from magicpig.evals import plots, tables
from magicpig.evals.about import about, command
from magicpig.evals.report import markdown_table, terminal_table, write_report
from magicpig.evals.summary import AVERAGE, summary

# Tables


def test_all_tables_say_the_same():
    cells = summary(many())
    markdown = markdown_table(cells)
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(terminal_table(cells))
    terminal = console.export_text()
    assert markdown.count("**") == 2 * len(tables.tables(cells)) == 8
    for length in (4096, 8192):
        for protocol in ("easy", "hard"):
            assert f"**{length:,} tokens, {protocol}**" in markdown
            assert f"{length:,} tokens, {protocol}" in terminal
    for one in cells:
        assert f"| {one.score:.1f} ± {one.error:.1f} |" in markdown
        assert f"{one.score:.1f}±{one.error:.1f}" in terminal
    header, rule, row = markdown.splitlines()[2:5]
    assert header.split(" | ")[:4] == ["| method", "vt", "cwe", AVERAGE]
    assert header.count("|") == rule.count("|") == row.count("|")
    assert "| 20 % | 0.5 | 0.1 | 0.2 | 100 % | 4 |" in row
    for column in tables.COSTS:
        assert column in header
        assert column in terminal


def test_tables_show_what_is_missing():
    some = [
        *many(lengths=(4096,), methods=("full",)),
        record("vt", index=9, method="topk:2%", cost=None),
    ]
    table = tables.tables(summary(some))[0]
    assert table.rows[1] == [
        "topk:2%",
        *("100.0", "?", "100.0 (1 of 2 tasks)"),
        *("?", "?", "?", "?", "?", "1"),
    ]
    some.append(record("cwe", index=0, method="topk:2%"))
    some.append(record("cwe", index=1, method="topk:2%"))
    assert tables.tables(summary(some))[0].rows[1][-1] == "1-2"


def test_tables_leave_out_what_no_method_has():
    """Perplexities have no outputs to compare."""
    one = record(score=12.3, metric="perplexity", output="")
    cells = [replace(cell, same_as_full=None) for cell in summary([one])]
    (table,) = tables.tables(cells)
    assert "same" not in table.columns
    assert "keys read" in table.columns
    assert len(table.rows[0]) == len(table.columns) + 1
    assert "same" in tables.tables(summary([one, {**one, "method": "full"}]))[0].columns


def test_a_single_task_has_no_column_of_averages():
    table = tables.tables(summary([record(score=12.3456, metric="perplexity")]))[0]
    assert table.columns == ["vt", *tables.COSTS]
    assert table.rows[0][1] == "12.346"
    assert table.title == "4,096 tokens, easy, perplexity"


# Reports


class Page(HTMLParser):
    """Texts by tag, attributes of tags, and whether all that was opened was closed."""

    VOID = ("meta", "img", "source")

    def __init__(self, text):
        super().__init__()
        self.texts, self.attributes, self.open = {}, {}, []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes.setdefault(tag, []).append(dict(attrs))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open[-2:]):
            self.texts.setdefault(tag, []).append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    facts = {**about(), "command": "magicpig eval ruler --samples '<5>'"}
    write_report(folder, many(), facts, SETTINGS, "RULER & more")
    return folder


def test_a_report_has_results_plots_and_a_page_and_nothing_else(folder):
    plotted = {"score_by_keys_read.png", "score_by_task.png"}
    assert {path.name for path in folder.iterdir()} == {"results.json", "report.html", *plotted}
    for name in plotted:
        assert (folder / name).read_bytes().startswith(PNG)
    results = json.loads((folder / "results.json").read_text())
    assert results["settings"] == json.loads(json.dumps(SETTINGS))
    assert results["about"]["command"] == "magicpig eval ruler --samples '<5>'"
    cells = summary(many())
    assert len(results["cells"]) == len(cells)
    for one, told in zip(cells, results["cells"], strict=True):
        assert {name: getattr(one, name) for name in told} == told


def test_the_page_stands_alone(folder):
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert "script" not in page.attributes
    assert "link" not in page.attributes
    assert not re.search(r"https?://|url\(", text)
    sources = [image["src"] for image in page.attributes["img"]]
    sources += [source["srcset"] for source in page.attributes["source"]]
    assert len(sources) == 4
    for source in sources:
        kind, _, data = source.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(PNG)
    assert all(image["alt"] for image in page.attributes["img"])


def test_the_page_says_everything(folder):
    page = Page((folder / "report.html").read_text())
    assert page.texts["h1"] == ["RULER & more"]
    assert page.texts["pre"] == ["magicpig eval ruler --samples '<5>'"]
    assert len(page.attributes["table"]) == 4
    for one in summary(many()):
        assert f"{one.score:.1f}" in "".join(page.texts["td"])
        assert f"± {one.error:.1f}" in page.texts["small"]
    terms = page.texts["dt"]
    for name in (*tables.COSTS, "score", "model", "dense layers", "versions torch"):
        assert name in terms
    assert {"hardware cpu", "hardware cores", "hardware isa", "hardware memory"} <= set(terms)
    columns = set(page.texts["th"])
    assert set(tables.COSTS) <= columns


def test_a_report_of_perplexities(tmp_path):
    some = [
        record("book", index=i, method=method, score=10 + i, metric="perplexity", cost=None)
        for i in range(3)
        for method in ("full", "lsh:10:150")
    ]
    paths = write_report(tmp_path, some, {}, {})
    assert [path.name for path in paths] == [
        "results.json",
        "perplexity_by_task.png",  # nothing is known of keys read
        "report.html",
    ]
    assert "lower is better" in paths[-1].read_text()


def test_a_report_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no records"):
        write_report(tmp_path, [], {}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_fails_leaves_the_last_one_as_it_was(tmp_path, monkeypatch):
    some = many(lengths=(4096,))
    write_report(tmp_path, some, {}, {})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_report(tmp_path, some, {}, {"scale": math.nan})
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_report(tmp_path, some, {}, {})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r"pip install 'magicpig\[eval\]'"):
        write_report(tmp_path, many(), {}, {})
    assert list(tmp_path.iterdir()) == []


# Plots


def test_a_method_has_its_colour_whatever_else_is_drawn():
    some = plots._styles(["full", "lsh:10:150", "topk:2%"], "light")
    others = plots._styles(["topk:2%", "h2o:4%", "lsh:10:150", "lsh:8:75", "mine"], "light")
    for method in ("lsh:10:150", "topk:2%"):
        assert some[method]["color"] == others[method]["color"]
    assert len({style["color"] for style in others.values()}) == 5
    assert len({style["marker"] for style in others.values()}) == 5


def test_points_at_one_place_are_moved_apart_and_others_are_left():
    places = plots._side_by_side([2.0, 50.0, 2.01, 100.0], 1.1)
    assert places[1::2] == [50.0, 100.0]
    assert places[2] / places[0] == pytest.approx(1.1)
    assert math.sqrt(places[0] * places[2]) == pytest.approx(math.sqrt(2.0 * 2.01))


def test_methods_that_read_nothing_have_a_place_on_the_axis():
    ticks, labels = plots._percents(0.9, 160, 0.4)
    assert labels == ["none", "1 %", "3 %", "10 %", "30 %", "100 %"]
    assert ticks == sorted(ticks)
    nothing = {**record()["cost"], "rows": 0}
    some = [record(method="streaming", cost=nothing), record(index=1, method="streaming")]
    only_nothing = summary(some[:1])
    for cells in (summary(some), only_nothing):
        assert all(data.startswith(PNG) for data in plots.draw(cells, "dark").values())
    with pytest.raises(ValueError, match="theme must be one of light, dark, not 'blue'"):
        plots.draw(only_nothing, "blue")


# About


def test_commands_are_told_as_they_are_typed():
    assert command(["/some/where/magicpig", "eval", "a b"]) == "magicpig eval 'a b'"
    assert command(["/x/magicpig/__main__.py", "eval"]) == "python -m magicpig eval"
    assert command(["benchmarks/decode.py"]) == "benchmarks/decode.py"


def test_about_is_ready_for_json():
    facts = json.loads(json.dumps(about(), allow_nan=False))
    assert {"magicpig", "torch", "transformers", "python"} <= facts["versions"].keys()
    assert {"cpu", "cores", "isa", "memory_bytes", "gpus"} <= facts["hardware"].keys()
    assert re.match(r"\d{4}-\d\d-\d\dT", facts["date"])
