"""`magicpig analyze`: the study as a whole, its findings, the files it writes, the command."""

import itertools
import json
import os
import re
import sys
import threading
from dataclasses import replace

import pytest
import torch
import typer
from study import SMALL, TEXT
from typer.testing import CliRunner
from zoo import loaded, make_model, make_tokenizer

from magicpig import plotting
from magicpig.analysis import plots, report
from magicpig.analysis.comparisons import _decisive
from magicpig.analysis.findings import findings
from magicpig.analysis.settings import Settings
from magicpig.analysis.study import analyze
from magicpig.analysis.summary import error_at, rows_of, share_at
from magicpig.analysis.words import (
    AGREES,
    DIFFERS,
    DOES_NOT_HELP,
    HELPS,
    HELPS_IN_PART,
    IN_PART,
)
from magicpig.cli.analyze import analyze as command
from magicpig.cli.report import reported


@pytest.fixture(scope="module")
def results():
    return analyze(loaded("llama"), TEXT, SMALL)


# The whole


def test_everything_is_measured_everywhere(results):
    about = results["about"]
    assert (about["layers"], about["dense_layers"]) == ([0, 1, 2, 3], [0, 2])
    assert (about["num_heads"], about["num_kv_heads"], about["head_dim"]) == (4, 2, 16)
    assert about["far_keys"] == 300 - 4 - 16 - 4
    assert len(results["observations"]) == 4
    assert len(results["heads"]) == 16
    names = {row["name"] for row in results["errors"]}
    for method in ("topk:2%", "quest:8:10%", "oracle:100%", "priority:2%", "lsh:4:12"):
        assert method in names
    assert {"scan:2:2%", "scan:4:20%"} < names
    assert "lsh-raw:6:40" in names
    for row in results["errors"]:
        assert len(row["layers"]) == 4
        assert 0 <= row["median"] <= row["p90"] <= row["p99"]
        assert row["decisive"] is None or 0 <= row["decisive"] <= 1
    for head in results["heads"]:
        assert 0.2 <= head["top"] <= 1
        assert head["tail"] <= head["far"] <= 1


def test_the_finding_about_keys_that_decide():
    def row(name, share, decisive):
        setting = name.partition(":")[2]
        return {"name": name, "setting": setting, "share": share, "decisive": decisive}

    rows = [
        row("lsh:10:150", 0.04, 0.8),
        row("scan:2:1%", 0.011, 0.995),
        row("scan:2:4%", 0.04, 1.0),
        row("quest:16:4%", 0.04, 0.7),
        row("quest:16:20%", 0.2, 0.9),
    ]
    name, verdict, sentence = _decisive({"errors": rows})
    assert (name, verdict) == ("keys that decide", HELPS_IN_PART)
    assert "lsh:10:150 80 % at 4 %" in sentence
    assert "scan:2:1% 99.5 % at 1.1 %" in sentence
    assert "quest:16:4% 70 %" in sentence
    assert "20%" not in sentence
    assert _decisive({"errors": [{**each, "decisive": None} for each in rows]}) is None


def test_more_keys_less_error(results):
    for words in ("topk", "priority", "oracle", "scan:2", "scan:4"):
        rows = rows_of(results["errors"], words)
        assert len(rows) == len(SMALL.budgets)
        errors = [row["mean"] for row in sorted(rows, key=lambda row: row["budget"])]
        assert errors == sorted(errors, reverse=True)


def test_codes_keep_to_their_budget_on_average(results):
    for row in rows_of(results["errors"], "scan"):
        assert row["share"] == pytest.approx(row["budget"], rel=0.15)


def test_names_are_told_apart_by_whole_words():
    rows = [{"name": name} for name in ("lsh:10:150", "lsh-raw:10:150", "scan:1:1%", "scan:16:1%")]
    assert rows_of(rows, "lsh") == rows[:1]
    assert rows_of(rows, "scan:1") == rows[2:3]
    assert rows_of(rows, "scan") == rows[2:]
    assert rows_of(rows, "topk") == []


def test_errors_between_budgets_lie_on_a_line_in_log_scale():
    rows = [{"share": share, "mean": 0.002 * share**-0.7} for share in (0.04, 0.01, 0.02)]
    for share in (0.0096, 0.01, 0.013, 0.02, 0.035, 0.041):
        error = error_at(rows, share)
        assert error == pytest.approx(0.002 * share**-0.7)
        assert share_at(rows, error) == pytest.approx(share)
    for beyond in (0.005, 0.08):
        assert error_at(rows, beyond) is None
    assert error_at([], 0.01) is None
    assert error_at(rows[:1], 0.04) is None  # a point is no line


def test_progress_goes_from_nothing_to_all():
    told = []
    settings = replace(SMALL, inputs=2, tables=((4, 12),))
    analyze(loaded("llama"), TEXT, settings, lambda what, share: told.append((what, share)))
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)
    assert {what for what, _ in told} == {"reading", "measuring"}


def test_an_interrupt_ends_it_and_leaves_no_threads():
    def interrupt(what, share):
        if what == "measuring":
            raise KeyboardInterrupt

    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        analyze(loaded("llama"), TEXT, SMALL, interrupt)
    assert torch.get_num_threads() == before
    assert not [x for x in threading.enumerate() if x.name.startswith("magicpig-analysis")]


def verdicts(results):
    return {found["name"]: found["verdict"] for found in findings(results)}


def test_findings_follow_the_figures(results):
    changed = json.loads(json.dumps(results))
    for i, (value, expected) in enumerate([(-0.85, AGREES), (0.3, DIFFERS)]):
        for row in changed["observations"]:
            row["mean_sink_cosine"] = value
        assert verdicts(changed)["mean key against sink key"] == expected, i
    for i, row in enumerate(changed["observations"]):
        row["sink_key_similarity"] = 0.995 if i < 3 else 0.5
    assert verdicts(changed)["first token's key"] == IN_PART
    for bins in (tables["bins"] for tables in changed["inclusion"]):
        for row in bins:
            row["rate"] = 2 * row["formula"]
            row["grouped_error"] = row["binomial_error"] = 0.01 * row["formula"]
    assert verdicts(changed)["inclusion rate"] == DIFFERS
    for head in changed["heads"]:
        head["top"] = 0.99 if head["layer"] else 0.7
    assert verdicts(changed)["mass of the top 20 % of keys"] == IN_PART
    for found in findings(changed):
        assert found["sentence"].endswith(".")
        assert found["verdict"] in report.CLASSES


def test_codes_are_held_against_tables_and_top_k(results):
    changed = json.loads(json.dumps(results))
    name = "codes of 2 bits per dimension"
    lsh, *_ = rows_of(changed["errors"], "lsh")
    top_k, codes = rows_of(changed["errors"], "topk"), rows_of(changed["errors"], "scan:2")
    lsh["share"] = 0.05

    def told(lsh_error, factors):
        lsh["mean"] = lsh_error
        for row, other, factor in zip(top_k, codes, factors, strict=True):
            row["mean"], row["share"] = 0.01 / row["budget"], row["budget"]
            other["mean"], other["share"] = factor * row["mean"], row["share"]
        [found] = [found for found in findings(changed) if found["name"] == name]
        return found["verdict"], found["sentence"]

    verdict, sentence = told(0.2, [0.5] * 4)  # codes have 0.1 at 5 % of keys, 0.2 at 2.5 %
    assert verdict == HELPS
    assert "0.100 instead of 0.200, 0.50 of it; the same error takes 2.5 %." in sentence
    assert "0.250 against 0.500 at 2 %" in sentence
    verdict, sentence = told(0.2, [1.5, 0.5, 0.5, 0.5])
    assert verdict == HELPS_IN_PART
    assert "Not better than exact top-k at 2 %." in sentence
    verdict, sentence = told(0.01, [2.0] * 4)
    assert verdict == DOES_NOT_HELP
    assert "Not better than lsh:4:12 and exact top-k at 2 %, 10 %, 20 %." in sentence


def test_errors_asked_for_are_predicted_and_measured(results):
    assert [(row["bits_per_dim"], row["target"]) for row in results["targets"]] == [
        (2, 0.05),
        (2, 0.1),
        (4, 0.05),
        (4, 0.1),
    ]
    for row in results["targets"]:
        assert 0 < row["predicted"] <= row["target"] * 1.01
        assert 0 < row["mean"] < 2 * row["target"]
        assert row["least"] <= row["share"] <= row["most"] <= 1
    lower, higher = results["targets"][:2]
    assert lower["share"] > higher["share"]
    changed = json.loads(json.dumps(results))
    for row, mean in zip(changed["targets"], (0.06, 0.11, 0.2, 0.3), strict=True):
        row["mean"] = mean
    name = "errors that are asked for"
    [found] = [found for found in findings(changed) if found["name"] == name]
    assert found["verdict"] == HELPS_IN_PART
    assert "2 bits, 0.05 asked for" in found["sentence"]
    assert "0.060 measured" in found["sentence"]


def test_every_method_has_its_place_in_the_table(results):
    names = [cells[0] for cells in report.error_rows(results)]
    assert sorted(names) == sorted(row["name"] for row in results["errors"])
    kinds = [plots.words_of(name) for name in names]
    assert len(list(itertools.groupby(kinds))) == len(set(kinds))


def test_the_report_needs_no_other_file(results, tmp_path):
    written = report.write(results, tmp_path / "new" / "out")
    assert {path.name for path in written} == set(os.listdir(tmp_path / "new" / "out"))
    page = (tmp_path / "new" / "out" / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]{0,40})', page)
    assert len(sources) == 6
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in page
    for found in results["findings"]:
        assert report.html.escape(found["sentence"]) in page
    data = json.loads((tmp_path / "new" / "out" / "analysis.json").read_text())
    assert data.keys() == results.keys()
    for name in (path.name for path in written if path.suffix == ".png"):
        assert (tmp_path / "new" / "out" / name).read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def quick_plots(monkeypatch):
    """Drawing takes seconds, and one test does it."""
    monkeypatch.setattr(plots, "draw", lambda results: dict.fromkeys(report.CAPTIONS, b"\x89PNG"))


@pytest.mark.usefixtures("quick_plots")
def test_an_interrupted_report_leaves_no_parts(results, tmp_path, monkeypatch):
    (tmp_path / "analysis.json").write_text("old")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(report.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        report.write(results, tmp_path)
    assert os.listdir(tmp_path) == ["analysis.json"]
    assert (tmp_path / "analysis.json").read_text() == "old"


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r"magicpig\[eval\]"):
        plotting.require()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", 100),
        ("tokens", 10**6),
        ("inputs", 1),
        ("budgets", (0.0,)),
        ("tables", ((0, 5),)),
        ("code_bits", (3,)),
        ("targets", (0.1, 2.0)),
    ],
)
def test_bad_settings_are_named(field, value):
    named = {"tables": "bits_per_table", "code_bits": "bits_per_dim"}
    with pytest.raises(ValueError, match=named.get(field, field)):
        Settings(**{field: value})


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    (path / "text.txt").write_text(TEXT)
    return path


def run(*arguments):
    app = typer.Typer()
    app.command()(reported(command))
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


@pytest.mark.usefixtures("quick_plots")
def test_the_command_writes_and_shows(folder, tmp_path):
    result = run(
        *("--model", folder, "-f", folder / "text.txt", "--tokens", 300, "--inputs", 2),
        *("--out", tmp_path / "out"),
    )
    assert result.exit_code == 0, result.stderr
    assert "lsh:10:150" in result.stdout
    assert "mean key against sink key: " in result.stdout
    assert str(tmp_path / "out" / "report.html") in result.stdout.replace("\n", "")
    assert (tmp_path / "out" / "report.html").is_file()


def test_json_is_one_object_and_no_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(
        *("--model", folder, "-f", folder / "text.txt", "--tokens", 200, "--inputs", 2, "--json")
    )
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["about"]["tokens"] == 200
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "9999"], "the text has only"),
        (["--tokens", "10"], "tokens must be from"),
        (["--inputs", "1"], "inputs must be from"),
        (["--model", "./no-such-model"], "no-such-model"),
        (["-f", "no-such-file"], "there is no file 'no-such-file'"),
        (["--out", "{file}"], "is a file"),
        (["--dtype", "int3"], "dtype must be"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(folder, tmp_path, arguments, message):
    file = folder / "text.txt"
    arguments = [argument.replace("{file}", str(file)) for argument in arguments]
    base = ["--model", folder, "-f", file, "--tokens", 300, "--out", tmp_path / "out"]
    result = run(*base, *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_text_longer_than_the_model_reads_is_refused():
    model = loaded("llama")
    model.model.config.max_position_embeddings = 256
    with pytest.raises(ValueError, match="reads at most 256 tokens"):
        analyze(model, TEXT, SMALL)
