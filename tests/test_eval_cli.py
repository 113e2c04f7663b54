"""`magicpig eval` as people type it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from magicpig import WindowConfig
from magicpig.cli import app, evaluating
from magicpig.evals.harness import Harness
from magicpig.evals.records import Records

SMALL = WindowConfig(sinks=2, local=6, block=4)


@pytest.fixture
def tiny_window(monkeypatch):
    """So that short prompts have a far context."""

    def small(*arguments, **options):
        return Harness(*arguments, **options, window=SMALL)

    monkeypatch.setattr(evaluating, "Harness", small)


def evaluate(*arguments):
    result = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


RULER = ["ruler", "--tasks", "niah_single_1", "--lengths", "700"]


def lines(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_eval_ruler_prints_a_table(model, tiny_window):
    result = evaluate(*RULER, "--model", model, "--methods", "full,topk:5%", "--samples", 2)
    assert result.exit_code == 0, result.output
    for part in ("700 tokens, easy", "niah_single_1", "topk:5%", "keys read", "same"):
        assert part in result.stdout


def test_eval_reasoning_under_both_protocols(model, tiny_window):
    arguments = ["reasoning", "--tasks", "ops2", "--lengths", "1200", "--protocol", "easy,hard"]
    arguments += ["--model", model, "--methods", "full,cpu-dense", "--samples", 1, "--json"]
    result = evaluate(*arguments)
    assert result.exit_code == 0, result.output
    cells = [cell for cell in json.loads(result.stdout)["cells"] if cell["task"] == "ops2"]
    assert [(cell["protocol"], cell["method"]) for cell in cells] == [
        (protocol, method) for protocol in ("easy", "hard") for method in ("full", "cpu-dense")
    ]
    assert {cell["same_as_full"] for cell in cells} == {1.0}


def test_eval_ruler_leaves_files_and_goes_on_where_it_stopped(model, tmp_path, tiny_window):
    out = tmp_path / "results"
    arguments = [*RULER, "--model", model, "--out", out, "--json"]
    first = evaluate(*arguments, "--methods", "full,topk:5%", "--samples", 1)
    assert first.exit_code == 0, first.output
    assert {"samples.jsonl", "settings.json", "results.json", "report.html"} <= {
        path.name for path in out.iterdir()
    }
    begun = lines(out)
    assert [(r["method"], r["index"]) for r in begun] == [("full", 0), ("topk:5%", 0)]
    more = evaluate(*arguments, "--methods", "topk:5%,full,quest", "--samples", 2)
    assert more.exit_code == 0, more.output
    assert lines(out)[:2] == begun
    found = {(r["method"], r["index"]) for r in lines(out)}
    assert found == {(m, i) for m in ("full", "topk:5%", "quest:16:4%") for i in range(2)}
    told = json.loads(more.stdout)
    cells = {(cell["task"], cell["method"]): cell for cell in told["cells"]}
    assert cells["niah_single_1", "quest:16:4%"]["samples"] == 2
    assert cells["niah_single_1", "full"]["keys_read"] == 1
    assert cells["niah_single_1", "topk:5%"]["keys_read"] == pytest.approx(0.05, abs=0.005)
    assert told["settings"]["dense_layers"] == [0, 2]
    assert "quest:16:4%" in (out / "report.html").read_text()
    other = evaluate(*arguments, "--methods", "full,topk:5%", "--seed", 3)
    assert_one_line(other, "seed = 0, and seed is 3 now")
    assert len(lines(out)) == 6


def test_an_interrupt_loses_the_batch_at_hand_and_nothing_else(
    model, tmp_path, tiny_window, interrupted
):
    arguments = [*RULER, "--model", model, "--methods", "full,h2o,oracle", "--samples", 2, "--json"]
    whole = evaluate(*arguments, "--out", tmp_path / "whole")
    assert whole.exit_code == 0, whole.output
    steps = max(record["cost"]["steps"] for record in lines(tmp_path / "whole"))
    out = tmp_path / "results"
    for name, call in (("prefill", 2), ("decode", steps + 20)):
        interrupted(name, call)
        result = evaluate(*arguments, "--out", out)
        assert result.exit_code == 130
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        assert sorted(path.name for path in out.iterdir()) == ["samples.jsonl", "settings.json"]
    assert [record["index"] for record in lines(out)] == [0] * 3
    assert evaluate(*arguments, "--out", out).exit_code == 0
    assert lines(out) == lines(tmp_path / "whole")


def test_without_out_nothing_is_left(model, tmp_path, monkeypatch, interrupted):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    interrupted("decode", 3)
    assert evaluate(*RULER, "--model", model, "--methods", "full").exit_code == 130
    assert not list(tmp_path.iterdir())


def test_eval_perplexity(model, tmp_path, tiny_window):
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 5)
    arguments = ["perplexity", "--model", model, "--file", tmp_path / "a.txt", "--tokens", "150"]
    arguments += ["--methods", "full,streaming,kv-stream", "--json"]
    result = evaluate(*arguments, "--out", tmp_path / "results")
    assert result.exit_code == 0, result.output
    cells = {cell["method"]: cell for cell in json.loads(result.stdout)["cells"]}
    assert cells["kv-stream"]["score"] == pytest.approx(cells["full"]["score"], rel=1e-4)
    assert cells["streaming"]["score"] != pytest.approx(cells["full"]["score"], rel=1e-2)
    assert cells["streaming"]["keys_read"] == 0
    kept = lines(tmp_path / "results")
    assert len(kept) == 3
    assert evaluate(*arguments, "--out", tmp_path / "results").exit_code == 0
    assert lines(tmp_path / "results") == kept


def assert_one_line(result, message):
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("magicpig: error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ruler", "--methods", "full,magic"], "method must be one of full, lsh"),
        (["ruler", "--methods", "full,full"], "methods must differ from each other: full, full"),
        (["ruler", "--methods", " , "], "methods is empty: name one at least"),
        (["ruler", "--methods", "topk:200%"], "budget must be above 0 and at most 100 %"),
        (["ruler", "--tasks", "niah"], "--tasks must be all or some of niah_single_1"),
        (["ruler", "--tasks", ","], "--tasks is empty"),
        (["ruler", "--lengths", "4x"], "like 4k or 6000, not '4x'"),
        (["ruler", "--lengths", "0"], "a length must be a number of tokens"),
        (["ruler", "--lengths", "5k"], "--lengths 5120 is more than the 4096 tokens"),
        (["ruler", "--lengths", "20"], "niah_single_1"),
        (["ruler", "--protocol", "medium"], "--protocol must be easy, hard or easy,hard"),
        (["ruler", "--dense-layers", "0,9"], "dense_layers must be from 0 to 3, not 9"),
        (["ruler", "--dense-layers", "x"], "--dense-layers must be numbers"),
        (["ruler", "--tasks", "qa_1"], "qa_1"),
        (["reasoning", "--tasks", "ops3"], "--tasks must be all or some of ops2, ops4, ops5"),
        (["reasoning", "--lengths", "64"], "ops2 cannot be made 64 tokens long"),
        (["perplexity", "--file", "/nowhere/book.txt"], "there is no file '/nowhere/book.txt'"),
        (["perplexity", "--file", __file__, "--tokens", "5k"], "tokens must be from 16 to 4096"),
        (["perplexity", "--file", __file__, "--file", __file__], "--file names a text twice"),
        (["ruler", "--out", __file__], Path(__file__).name),
    ],
)
def test_errors_are_told_in_a_line(model, arguments, message):
    result = evaluate(*arguments, "--model", model)
    assert_one_line(result, message)


def test_a_text_is_itself_wherever_it_stands(model, tmp_path, tiny_window):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("The quick brown fox jumps over the lazy dog. " * 5)
    second.write_text("Pack my box with five dozen liquor jugs. " * 6)
    arguments = ["perplexity", "--model", model, "--tokens", "150", "--out", tmp_path / "results"]
    alone = evaluate(*arguments, "--file", first, "--methods", "full")
    assert alone.exit_code == 0, alone.output
    both = evaluate(*arguments, "--file", second, "--file", first, "--methods", "full")
    assert both.exit_code == 0, both.output
    assert [(line["task"], line["index"]) for line in lines(tmp_path / "results")] == [
        ("a.txt", 0),
        ("b.txt", 0),
    ]
    first.write_text("Something else altogether, and quite as long as it was. " * 5)
    result = evaluate(*arguments, "--file", first, "--methods", "full,streaming")
    assert_one_line(result, "has results of another text named 'a.txt'")


def test_texts_of_one_name_are_told_apart(model, tmp_path, tiny_window):
    arguments = ["perplexity", "--model", model, "--tokens", "150", "--methods", "full"]
    for folder, word in (("x", "fox"), ("y", "dog")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(f"The quick brown {word} jumps. " * 9)
        arguments += ["--file", tmp_path / folder / "a.txt"]
    result = evaluate(*arguments, "--out", tmp_path / "results")
    assert result.exit_code == 0, result.output
    assert [line["task"] for line in lines(tmp_path / "results")] == ["x/a.txt", "y/a.txt"]


def test_what_cannot_be_done_is_told_first(model, tmp_path, tiny_window):
    """Before a task that can be done takes its time."""
    arguments = ["ruler", "--tasks", "niah_single_1,cwe", "--lengths", "300", "--samples", 1]
    arguments += ["--model", model, "--methods", "full"]
    assert_one_line(evaluate(*arguments, "--out", tmp_path / "o"), "cannot be made 300 tokens long")
    assert not (tmp_path / "o").exists()
    file = tmp_path / "file"
    file.write_text("")
    arguments = ["perplexity", "--file", file, "--model", model, "--methods", "full"]
    assert_one_line(evaluate(*arguments, "--out", tmp_path / "o"), "and 16 are needed")
    assert not (tmp_path / "o").exists()
    assert_one_line(evaluate(*RULER, "--model", model, "--out", file), "is a file; name a folder")


def test_two_evaluations_do_not_share_a_folder(model, tmp_path):
    with Records(tmp_path, {}):
        result = evaluate(*RULER, "--model", model, "--methods", "full", "--out", tmp_path)
    assert_one_line(result, "another evaluation is writing to")
