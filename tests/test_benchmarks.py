"""What scripts of benchmarks are given is checked before anything is measured."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import magicpig

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Runs a script, given its name and its arguments."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    threads = magicpig.num_threads(), torch.get_num_threads()

    def run(name, *arguments, device=("--device", "cpu")):
        device = () if name == "tables" else device
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *device, *arguments])
        importlib.import_module(name).main()

    yield run
    magicpig.set_num_threads(threads[0])
    torch.set_num_threads(threads[1])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("throughput", "--budgets none 24GiB", "--budgets are of a GPU's memory; on a CPU"),
        ("throughput", "--budgets much", "a budget must be a number and a unit"),
        ("throughput", "--quick --contexts 1k", "--quick has its own --contexts"),
        ("throughput", "--quick --batches 2", "--quick has its own --contexts"),
        ("throughput", "--contexts 1x", "a length must be a number of tokens"),
        ("throughput", "--batches 1 0", "--batches: must be a whole number from 1, not '0'"),
        ("throughput", "--batches -1", "--batches: must be a whole number from 1, not '-1'"),
        ("throughput", "--seconds nan", "--seconds: must be a number of seconds from 0"),
        ("throughput", "--stop-after -1", "--stop-after: must be a number of seconds from 0"),
        ("throughput", "--systems full nope", "--systems: method must be one of full, lsh,"),
        ("throughput", "--model no/such", "--model: --model 'no/such' is neither here"),
        ("prefill", "--device tpu", "--device: must be cpu or cuda, not 'tpu'"),
        ("budget", "--method nope", "--method: method must be one of full, lsh,"),
        ("throughput", "--json no/a.json", "--json: the folder 'no' for results does not exist"),
        ("throughput", "--plot /proc/a.png", "--plot: '/proc/a.png' for results cannot be written"),
        ("prefill", "--rounds 0", "--rounds: must be a whole number from 1, not '0'"),
        ("prefill", "--json no/a.json", "--json: the folder 'no' for results does not exist"),
        ("budget", "--context 1k,2k", "the context must be one length, not '1k,2k'"),
        ("budget", "--new-tokens 0", "--new-tokens: must be a whole number from 1, not '0'"),
        ("budget", "--json .", "--json: '.' is a folder"),
        (
            "tables",
            "--tokens 4k,1M",
            "--tokens: a segment has 65,536 tokens at most, not 1,048,576",
        ),
        ("drop_in", "--steps 0", "--steps: must be a whole number from 1, not '0'"),
        ("drop_in", "--systems transformer", "--systems: method must be one of full, lsh,"),
        ("timeline", "--batch 0", "--batch: must be a whole number from 1, not '0'"),
        ("timeline", "--trace .", "--trace: '.' is a folder"),
        ("timeline", "--read a.json --trace b.json", "--read runs nothing that --trace could"),
    ],
)
def test_bad_arguments_are_refused_at_once(script, capsys, name, arguments, message):
    with pytest.raises(SystemExit) as ended:
        script(name, *arguments.split())
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["throughput", "prefill", "budget", "timeline", "drop_in"])
def test_without_a_gpu_it_is_said(script, capsys, name):
    with pytest.raises(SystemExit):
        script(name, device=())
    assert "torch sees no GPU here: --device cpu does without" in capsys.readouterr().err


def test_limits_that_nothing_fits_into(script, capsys, model):
    given = "--model", model, "--context", "1k", "--cpu-memory"
    with pytest.raises(SystemExit, match="not one sequence fits"):
        script("budget", *given, "1MB")
    with pytest.raises(SystemExit):
        script("budget", *given, "much")
    assert "cpu_memory must be a number and a unit" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["throughput", "timeline"])
def test_plots_that_could_not_be_made_are_told_of_first(script, monkeypatch, capsys, name):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        script(name, "--plot", "a.png")
    assert "plots need matplotlib, which is not installed" in capsys.readouterr().err


def point(system, batch, fits, tokens_per_second):
    return {
        "system": system, "context": 1024, "batch": batch, "fits": fits, "ms_per_step": 1.0,
        "tokens_per_second": tokens_per_second,
    }  # fmt: skip


def test_newer_points_take_the_places_of_older_ones(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    report = importlib.import_module("throughput_report")
    before = report.PAGES[report.DOCS / "throughput-h200.json"].read_text()
    old = [point("full", 1, ["24GiB", "48GiB"], 5.0), point("full", 2, ["24GiB", "none"], 9.0)]
    new = [point("full", 2, ["40GiB", "none"], 8.0), point("full", 4, ["24GiB", "none"], 7.0)]
    for name, points in (("old", old), ("new", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps(points))
    page = tmp_path / "page.md"
    page.write_text("Tables:\n<!-- best all -->\n<!-- end -->\n")
    files = [str(tmp_path / f"{name}.json") for name in ("old", "new")]
    monkeypatch.setattr(sys, "argv", ["throughput_report.py", *files])
    report.main()
    found = json.loads((tmp_path / "old.json").read_text())
    assert [p["fits"] for p in found] == [["24GiB", "48GiB"], ["40GiB", "none"], ["24GiB", "none"]]
    assert "|" not in page.read_text()
    monkeypatch.setattr(sys, "argv", ["throughput_report.py", files[0], "--page", str(page)])
    report.main()
    assert "| 1,024 | 40GiB | 8.0 (2) |" in page.read_text()
    assert report.PAGES[report.DOCS / "throughput-h200.json"].read_text() == before
    for text in ("{}", "[]", '[{"batch": 1}]', "no"):
        (tmp_path / "old.json").write_text(text)
        with pytest.raises(SystemExit, match=r"old\.json (is not what|has no points)"):
            report.main()


def test_plans_are_compared_with_measurements(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("plan_error")
    measured = BENCHMARKS.parent / "docs/throughput-h200.json"
    monkeypatch.setattr(sys, "argv", ["plan_error.py", str(measured)])
    script.main()
    shown = capsys.readouterr().out
    assert "scan:2:1%: mean" in shown
    assert re.search(r"\| 98,304 \| 24GiB \| scan:2:1%, \d+ \| scan:2:1% \(4\), ", shown)
    assert "of 12 best ways are named" in shown
    errors = re.findall(r"\| (?:30\.5|18\.3|53\.8) \| [\d.]+ \| ([+-]\d+)% \|", shown)
    assert len(errors) == 4
    assert max(abs(int(error)) for error in errors) < 40
    monkeypatch.setattr(sys, "argv", ["plan_error.py", str(tmp_path / "no.json")])
    with pytest.raises(SystemExit, match=r"no\.json is not what throughput\.py writes"):
        script.main()
    monkeypatch.setattr(sys, "argv", ["plan_error.py", str(measured), "--gpu", "none"])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    said = capsys.readouterr()
    assert not said.out
    assert "--gpu 'none' is not known" in said.err


def test_batches_go_up_to_the_largest_that_fits(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sizes = importlib.import_module("throughput").sizes
    assert sizes([0, 3, 21], None) == [1, 2, 3, 4, 8, 16, 21]
    assert sizes([0, 3, 21], [2, 6, 64]) == [2, 3, 6, 21]
    assert sizes([0, 3, 21], [1, 4]) == [1, 3, 4]
    assert sizes([0, 0], None) == sizes([0], [1, 4]) == []


def test_on_a_cpu_all_rows_are_in_its_memory(script, model, tmp_path, capsys):
    out = tmp_path / "points.json"
    script(
        "throughput", "--model", model, "--contexts", "1k", "--systems", "full", "cpu-dense",
        "--batches", "1", "--seconds", "0", "--json", str(out),
    )  # fmt: skip
    full, sparse = json.loads(out.read_text())
    assert full["fits"] == ["none"]
    assert full["host_bytes"] == sparse["host_bytes"] > 0
    assert "does not fit" not in capsys.readouterr().out


def span(pid, tid, name, begin, end):
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": begin, "dur": end - begin}


def test_a_trace_tells_what_works_at_the_same_time(script, tmp_path, capsys):
    """Two halves: one on the CPU while the other is on the GPU, for a part of the time."""
    events = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "CPU"}},
        span(1, 1, "decode", 0, 1000),
        span(1, 1, "half", 0, 1000),
        span(1, 1, "far context", 0, 300),
        span(1, 2, "far context", 200, 500),
        span(2, 7, "model", 400, 700),
        span(2, 8, "window", 600, 900),
    ]
    trace, picture = tmp_path / "steps.json", tmp_path / "steps.png"
    trace.write_text(json.dumps({"traceEvents": events}))
    script("timeline", "--read", str(trace), "--plot", str(picture), device=())
    assert "| 1.0 | two halves | 50% | 50% | 10% |" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    for text, message in (("{}", "is no trace"), ('{"traceEvents": []}', "has no decode steps")):
        trace.write_text(text)
        with pytest.raises(SystemExit, match=message):
            script("timeline", "--read", str(trace))


def test_the_drop_in_beside_transformers(script, model, tmp_path, capsys):
    out = tmp_path / "points.json"
    given = "--model", model, "--contexts", "1k", "--steps", "3", "--json", str(out)
    script("drop_in", *given, "--systems", "transformers", "scan:2:1%")
    said = capsys.readouterr().out
    for system in "transformers", "scan:2:1%":
        assert re.search(rf"^\| {system} \| 1,024 \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", said, re.M)
    assert [p["system"] for p in json.loads(out.read_text())] == ["transformers", "scan:2:1%"]


def test_tables_are_sorted_and_taken(script, capsys):
    script("tables", "--tokens", "100,2k", "--threads", "1")
    said = capsys.readouterr().out
    for tokens in "100", "2,048":
        for name in "sorted", "taken":
            assert re.search(rf"^\| {tokens} \| CPU, 1 \| {name} \| [\d.]+ \|", said, re.M)


def test_steps_are_traced(script, model, tmp_path, capsys):
    out = tmp_path / "steps.json"
    given = "--model", model, "--context", "1k", "--method", "cpu-dense", "--trace", str(out)
    script("timeline", *given, "--batch", "2", "--steps", "2")
    assert "| whole |" in capsys.readouterr().out
    names = [event["name"] for event in json.loads(out.read_text())["traceEvents"]]
    assert names.count("decode") == 2


@pytest.mark.parametrize(("ended", "status"), [(KeyboardInterrupt, 130), (BrokenPipeError, 141)])
def test_scripts_that_are_ended_print_no_traceback(ended, status):
    code = f"import ending\ndef main(): raise {ended.__name__}\nending.run_script(main)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def test_all_scripts_end_like_that():
    for path in BENCHMARKS.glob("*.py"):
        ending = path.read_text().partition('__name__ == "__main__"')[2]
        if ending and path.name != "lsh_by_mask.py":  # a command of the package
            assert "run_script(main)" in ending, path
