"""`magicpig doctor` on machines that are well and on machines that are not, mostly made up."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections import namedtuple
from importlib import metadata

import pytest
import torch
from typer.testing import CliRunner

import magicpig
from magicpig import LayerKV, _native, health, native, reference, self_check
from magicpig.cli import app
from magicpig.models import store

SECTIONS = {"versions", "cpu", "native", "memory", "gpu", "cache", "self_test", "roofs"}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """The root of a machine without fault, to put faults in. Its /proc and /sys are empty."""
    root = tmp_path / "root"
    root.mkdir()
    for name in ("MAGICPIG_ISA", "MAGICPIG_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MAGICPIG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(health, "ROOT", root)
    monkeypatch.setattr(health, "_cores", lambda: 1024)
    monkeypatch.setattr(_native, "available_memory", lambda: 64 << 30)
    monkeypatch.setattr(_native, "stream_read_roof", lambda *_: 30e9)
    monkeypatch.setattr(_native, "gather_read_roof", lambda *_: 10e9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 1 << 40))
    return root


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def diagnosis(*arguments):
    """The JSON object; the exit code must agree with it."""
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    report = json.loads(result.stdout)
    assert result.exit_code == (1 if report["problems"] else 0), result.output
    return report


def the_problem(report):
    assert len(report["problems"]) == 1, report["problems"]
    return report["problems"][0]


def test_a_machine_without_fault(machine):
    report = diagnosis()
    assert report.keys() == SECTIONS | {"problems", "hints"}
    assert report["problems"] == []
    assert report["versions"]["magicpig"] == magicpig.__version__
    assert report["self_test"] == dict.fromkeys(magicpig.supported_isas(), "ok")
    assert report["roofs"] == {"stream_bytes_per_second": 30e9, "gather_bytes_per_second": 10e9}


def test_the_table_says_the_same_in_plain_lines(machine):
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    for text in (torch.__version__, magicpig.isa(), "streamed 30.0 GB/s", "No problems"):
        assert text in result.stdout


def test_what_is_not_known_is_null_and_a_question_mark(machine, monkeypatch):
    monkeypatch.setattr(health, "_cores", lambda: None)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "")
    monkeypatch.setattr(_native, "available_memory", lambda: 2**64 - 1)
    report = diagnosis("--quick")
    assert report["cpu"] == {"model": None, "cores": None, "core_limit": None}
    assert set(report["memory"].values()) == {None}
    text = CliRunner().invoke(app, ["doctor", "--quick"]).stdout
    assert "memory        ?, ? available" in text
    assert "huge pages    ?" in text


def test_quick_measures_nothing(machine, monkeypatch):
    monkeypatch.setattr(_native, "stream_read_roof", lambda *_: pytest.fail("measured"))
    assert diagnosis("--quick")["roofs"] is None
    assert "GB/s" not in CliRunner().invoke(app, ["doctor", "--quick"]).stdout


def test_hints_do_not_count(machine):
    report = diagnosis()
    assert report["problems"] == []
    assert {"magicpig pull smollm2"} <= {hint["mend"] for hint in report["hints"]}


def test_a_forced_instruction_set_is_a_problem(machine, monkeypatch):
    if magicpig.supported_isas() == ["scalar"]:
        pytest.skip("there is no better one")
    monkeypatch.setenv("MAGICPIG_ISA", "scalar")
    problem = the_problem(diagnosis())
    assert "MAGICPIG_ISA=scalar" in problem["what"]
    assert magicpig.supported_isas()[-1] in problem["what"]
    assert problem["mend"] == "unset MAGICPIG_ISA"


def test_settings_that_the_core_refuses_are_problems():
    """In a process of its own: they are read once."""
    environment = {"MAGICPIG_ISA": "mmx", "MAGICPIG_NUM_THREADS": "many"}
    result = subprocess.run(
        [sys.executable, "-c", "from magicpig.cli import main; main()", "doctor", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    assert report["native"]["environment"] == environment
    assert report["native"]["isa"] is report["native"]["threads"] is None
    for name, value in environment.items():
        assert any(
            name in problem["what"] and value in problem["what"] and name in problem["mend"]
            for problem in report["problems"]
        )


@pytest.mark.parametrize(("isas", "problems"), [(["scalar"], 1), (["scalar", "avx2"], 0)])
def test_slow_instruction_sets(machine, monkeypatch, isas, problems):
    monkeypatch.setattr(native, "supported_isas", lambda: isas)
    facts, findings = health.native_core()
    assert facts["supported_isas"] == isas
    assert [finding.severity for finding in findings] == ["problem" if problems else "hint"]
    assert "-cpu host" in findings[0].mend


GROUPS = {
    "version 2": {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"},
    "version 2, in a container": {"sys/fs/cgroup/cpu.max": "150000 100000\n"},
    "version 1": {
        "proc/self/cgroup": "4:memory:/\n3:cpu,cpuacct:/a\n0::/\n",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "150000\n",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    },
}


@pytest.mark.parametrize("files", GROUPS.values(), ids=GROUPS)
def test_more_threads_than_the_control_group_grants_are_a_problem(machine, monkeypatch, files):
    for path, text in files.items():
        write(machine, path, text)
    monkeypatch.setattr(native, "num_threads", lambda: 2)
    report = diagnosis()
    assert report["cpu"]["core_limit"] == 1.5
    assert report["problems"] == []
    monkeypatch.setattr(native, "num_threads", lambda: 16)
    assert "MAGICPIG_NUM_THREADS=2" in the_problem(diagnosis())["mend"]


def test_no_limit_is_none(machine):
    write(machine, "proc/self/cgroup", "1:memory:/\n0::/\nnonsense\n")
    write(machine, "proc/meminfo", "MemTotal: 33554432 kB\n")
    write(machine, "sys/fs/cgroup/cpu.max", "max 100000\n")
    write(machine, "sys/fs/cgroup/memory.max", "max\n")
    write(machine, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    report = diagnosis()
    assert report["cpu"]["core_limit"] is None
    assert report["memory"]["limit_bytes"] is None
    assert report["memory"]["total_bytes"] == 32 << 30


def test_little_memory_is_a_problem(machine):
    write(machine, "sys/fs/cgroup/memory.max", "1000000000\n")
    report = diagnosis()
    assert report["memory"]["available_bytes"] == report["memory"]["limit_bytes"] == 10**9
    assert "memory limit" in the_problem(report)["mend"]


@pytest.mark.parametrize("setting", ["always", "madvise", "never"])
def test_huge_pages(machine, setting):
    text = "always madvise never\n".replace(setting, f"[{setting}]")
    write(machine, "sys/kernel/mm/transparent_hugepage/enabled", text)
    report = diagnosis()
    assert report["memory"]["huge_pages"] == setting
    assert ["echo madvise" in problem["mend"] for problem in report["problems"]] == (
        [True] if setting == "never" else []
    )


def test_packages_that_do_not_suit_are_problems(machine, monkeypatch):
    needed = ["torch>=99", "numpy>=1", "no-such-thing>=1.2", "nor-this>=3; extra == 'dev'"]
    monkeypatch.setattr(metadata, "requires", lambda _: needed)
    old, missing = diagnosis()["problems"]
    assert metadata.version("torch") in old["what"]
    assert old["mend"] == "pip install --upgrade 'torch>=99'"
    assert missing["mend"] == "pip install 'no-such-thing>=1.2'"


def test_a_gpu_that_torch_cannot_use_is_a_problem_unless_it_is_hidden(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write(machine, "dev/nvidia0", "")
    for build, mend in ((None, "CUDA build of torch"), ("12.8", "driver")):
        monkeypatch.setattr(torch.version, "cuda", build)
        assert mend in the_problem(diagnosis())["mend"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert diagnosis()["problems"] == []


def test_gpus_are_listed(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Fast One")
    assert diagnosis()["gpu"]["gpus"][0]["free_bytes"] == 60 * 10**9
    text = CliRunner().invoke(app, ["doctor"]).stdout
    assert "Fast One, 60.0 GB of 80.0 GB free" in text


@pytest.mark.parametrize("how", ["read-only", "a file is there", "no home"])
def test_a_cache_folder_that_cannot_be_written_is_a_problem(machine, monkeypatch, tmp_path, how):
    if how == "read-only":  # made up, as root may write anywhere
        monkeypatch.setattr(os, "access", lambda *_: False)
    elif how == "a file is there":
        (tmp_path / "cache").write_text("")
    else:
        monkeypatch.setattr(health, "cache_folder", lambda: (_ for _ in ()).throw(RuntimeError))
    report = diagnosis()
    assert report["cache"]["writable"] is False
    assert "MAGICPIG_CACHE" in the_problem(report)["mend"]


def test_a_full_disk_is_a_problem(machine, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 10**8))
    assert "100 MB are free" in the_problem(diagnosis())["what"]


def test_a_damaged_model_is_a_problem(machine, tmp_path):
    (tmp_path / "cache" / "smollm2").mkdir(parents=True)
    report = diagnosis()
    assert report["cache"]["models"]["smollm2"]["state"] == "damaged"
    assert the_problem(report)["mend"] == "magicpig pull smollm2"


def test_an_installed_model_needs_neither_rights_nor_room(machine, monkeypatch, tmp_path):
    write(tmp_path, "cache/smollm2/model.safetensors", "weights")
    monkeypatch.setattr(store, "_intact", lambda *_, **__: True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1, 1, 0))
    report = diagnosis()
    assert report["problems"] == []
    assert report["cache"]["models"]["smollm2"] == {"state": "intact", "bytes": 7}


def test_the_self_test_leaves_no_doubt_about_signs():
    lsh, queries, keys, _ = self_check.probe()
    for vectors in (queries, *keys):
        assert reference.project(vectors, lsh).abs().min() > 1e-3
    for of_head in keys:
        assert torch.equal(reference.centre(of_head), of_head)


@pytest.mark.parametrize("wrong", ["attend", "sample"])
def test_a_core_that_errs_is_a_problem(machine, monkeypatch, wrong):
    right, before = getattr(LayerKV, wrong), magicpig.isa()

    def err(*arguments):
        first, second = right(*arguments)
        if magicpig.isa() == "scalar":
            first = first + 0.1 if wrong == "attend" else [rows[1:] for rows in first]
        return first, second

    monkeypatch.setattr(LayerKV, wrong, err)
    report = diagnosis()
    assert "self-test on scalar" in the_problem(report)["what"]
    assert [isa for isa, result in report["self_test"].items() if result != "ok"] == ["scalar"]
    assert magicpig.isa() == before
    assert "FAILED on scalar" in CliRunner().invoke(app, ["doctor"]).stdout


def test_a_slow_memory_is_a_problem(machine, monkeypatch):
    monkeypatch.setattr(_native, "stream_read_roof", lambda *_: 3e9)
    assert "3.0 GB/s" in the_problem(diagnosis())["what"]


def test_no_memory_to_measure_with(machine, monkeypatch):
    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr(_native, "stream_read_roof", refuse)
    assert set(diagnosis()["roofs"].values()) == {None}
    assert "streamed ?/s" in CliRunner().invoke(app, ["doctor"]).stdout


def test_roofs_are_really_measured():
    facts, _ = health.roofs()
    assert all(1e8 < rate < 1e13 for rate in facts.values())


@pytest.mark.parametrize(
    ("threads", "free", "size"),
    [
        (2, 64 << 30, 1 << 30),
        (8, 64 << 30, 2 << 30),
        (64, 64 << 30, 4 << 30),
        (64, 1 << 30, 1 << 28),
        (8, 1 << 28, 1 << 27),
    ],
)
def test_roofs_are_of_more_memory_than_caches_hold(monkeypatch, threads, free, size):
    seen = []
    monkeypatch.setattr(native, "num_threads", lambda: threads)
    monkeypatch.setattr(_native, "available_memory", lambda: free)
    for name in ("stream_read_roof", "gather_read_roof"):
        monkeypatch.setattr(_native, name, lambda size, *_: seen.append(size) or 1e10)
    assert native.memory_roofs() == (1e10, 1e10)
    assert seen == [size, size]
