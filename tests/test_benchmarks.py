"""What scripts of benchmarks are given is checked before anything is measured."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Runs a script, given its name and its arguments."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--device", "cpu", *arguments])
        importlib.import_module(name).main()

    return run


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
        ("throughput", "--json no/a.json", "--json: the folder 'no' for results does not exist"),
        ("throughput", "--plot /proc/a.png", "--plot: '/proc/a.png' for results cannot be written"),
        ("prefill", "--rounds 0", "--rounds: must be a whole number from 1, not '0'"),
        ("prefill", "--json no/a.json", "--json: the folder 'no' for results does not exist"),
        ("budget", "--context 1k,2k", "the context must be one length, not '1k,2k'"),
        ("budget", "--new-tokens 0", "--new-tokens: must be a whole number from 1, not '0'"),
        ("budget", "--json .", "--json: '.' is a folder"),
    ],
)
def test_bad_arguments_are_refused_at_once(script, capsys, name, arguments, message):
    with pytest.raises(SystemExit) as ended:
        script(name, *arguments.split())
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err


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
