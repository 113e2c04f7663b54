"""What the documentation shows is run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from magicpig import LSHConfig, reference
from tests.processes import run_python

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets():
    """(page, code, the output shown below it or None) for every Python block."""
    pattern = r"```python\n(.*?)```(?:\n```\n(.*?)```)?"
    for page in PAGES:
        for code, output in re.findall(pattern, page.read_text(), re.DOTALL):
            yield pytest.param(code, output or None, id=page.name)


@pytest.mark.parametrize(("code", "output"), list(snippets()))
def test_snippets_run_and_print_what_is_shown(code, output, request):
    if "smollm2" in code:
        request.getfixturevalue("default_model")
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    if output is not None:
        assert result.stdout == output


def test_the_readme_has_a_snippet():
    assert any("LayerKV" in param.values[0] for param in snippets())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    for name in re.findall(r"`((?:csrc|src|tests|benchmarks|examples|docs)/[\w./]+)`", text):
        assert (ROOT / name).exists() or (ROOT / "csrc" / name).exists() or "NAME" in name, name


def test_the_table_of_shares_is_what_the_formula_gives():
    """docs/parameters.md, percent of Gaussian keys drawn by (K, L): cosines are normal there."""
    text = (ROOT / "docs/parameters.md").read_text()
    tables = [int(x) for x in re.search(r"\| \| L = (.*) \|\n", text)[1].split(" | ")]
    rows = re.findall(r"^\| K = (\d+) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) == 4
    torch.manual_seed(0)
    cos = reference.cosine(torch.randn(128), torch.randn(100_000, 128))
    for bits, cells in rows:
        for num_tables, percent in zip(tables, cells.split(" | "), strict=True):
            lsh = LSHConfig(int(bits), num_tables)
            share = reference.log_inclusion_probability(cos, lsh).exp().mean().item()
            assert 100 * share == pytest.approx(float(percent), rel=0.05)


def test_architecture_names_every_source_file():
    text = (ROOT / "docs/architecture.md").read_text()
    native, python = text.split("| csrc/ |")[1].split("| src/magicpig/ |")
    for path in ROOT.glob("csrc/*.*"):
        assert f"`{path.name}`" in native or f"`{path.stem}.*`" in native, path
    package = ROOT / "src/magicpig"
    there = {str(path.relative_to(package)) for path in package.glob("**/*.py*")}
    named = re.findall(r"`([\w/]+\.pyi?)`", python.split("\n\n")[0])
    assert len(set(named)) == len(named)
    assert set(named) <= there
    assert {path for path in there if not path.endswith("__init__.py")} <= set(named)


@pytest.mark.parametrize("script", ["decode", "kernels", "linear", "prompt", "real_keys"])
def test_scripts_explain_themselves(script):
    result = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / f"{script}.py", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "usage" in result.stdout


def test_a_small_benchmark_runs(tmp_path):
    out = tmp_path / "results.json"
    arguments = "--tokens 2048 --tables 20 --bits 6 --growth 1024 --seconds 0.01 --threads 1 --json"
    command = [sys.executable, ROOT / "benchmarks/kernels.py", *arguments.split(), out]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "of roof" in result.stdout
    assert out.exists()


def test_a_small_benchmark_of_linear_layers_runs():
    arguments = "--only k,v --rows 1 20 --seconds 0.01 --megabytes 1 --threads 1 --steps 0"
    command = [sys.executable, ROOT / "benchmarks/linear.py", *arguments.split()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "192 x 576" in result.stdout


def test_a_small_benchmark_of_prompts_runs():
    arguments = "--queries 4 --tokens 9 --threads 1 --seconds 0.01"
    command = [sys.executable, ROOT / "benchmarks/prompt.py", *arguments.split()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "of roof" in result.stdout


@pytest.mark.parametrize("lengths", ["1200", "600 1200"])
def test_a_small_benchmark_of_steps_runs(tmp_path, lengths):
    out = tmp_path / "results.json"
    arguments = (
        f"--contexts --long-contexts --layer-contexts {lengths} --steps 1 --threads 1 --json"
    )
    command = [sys.executable, ROOT / "benchmarks/decode.py", *arguments.split(), out]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert ("scan: time grows" in result.stdout) == (" " in lengths)
    assert {row[0] for row in json.loads(out.read_text())["layer"]["1"]} == {"full", "lsh", "scan"}
