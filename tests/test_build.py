"""The build's promises: one wheel runs on any CPU, and types match the native module."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run_python

ROOT = Path(__file__).parent.parent


def objects(pattern):
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    found = sorted(ROOT.glob(f"build/{tag}*/CMakeFiles/{pattern}"))
    if not found:
        pytest.skip("no build folder beside the sources (installed from a wheel)")
    return found


def tool(name, *arguments):
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    return subprocess.run([name, *arguments], capture_output=True, text=True, check=True).stdout


def test_kernel_objects_export_one_table_and_no_weak_symbol():
    for path in objects("kernels_*.dir/csrc/kernels.cpp.o"):
        symbols = re.findall(r"^\S* (\w) (\S+)$", tool("nm", str(path)), re.MULTILINE)
        exported = [name for kind, name in symbols if kind not in "Utrbd"]
        assert len(exported) == 1, exported
        assert exported[0].endswith("7kernelsE")


def test_baseline_objects_use_no_wide_registers():
    paths = [
        *objects("magicpig_core.dir/csrc/*.cpp.o"),
        *objects("_native.dir/csrc/*.cpp.o"),
        *objects("kernels_scalar.dir/csrc/kernels.cpp.o"),
    ]
    assert len(paths) > 8
    for path in paths:
        assert not re.search(r"%[yz]mm", tool("objdump", "-d", str(path))), path.name


@pytest.mark.skipif(sys.platform != "linux", reason="the check reads x86 or ARM objects on Linux")
def test_the_wide_check_can_fail():
    wide = objects("kernels_avx512.dir/csrc/kernels.cpp.o")
    assert re.search(r"%zmm", tool("objdump", "-d", str(wide[0])))


def test_it_imports_and_works_as_scalar_code():
    code = """
    import torch, magicpig
    kv = magicpig.LayerKV(4, 2, 64, magicpig.LSHConfig(4, 20))
    kv.append(torch.randn(2, 500, 64), torch.randn(2, 500, 64))
    out, lse = kv.attend(torch.randn(4, 64))
    print(magicpig.isa(), bool(torch.isfinite(out).all()))
    """
    result = run_python(code, MAGICPIG_ISA="scalar")
    assert result.stdout == "scalar True\n", result.stderr


def test_the_neon_kernels_pass_the_native_tests_in_emulation():
    for name in ("aarch64-linux-gnu-g++", "qemu-aarch64-static", "make"):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
    result = subprocess.run(["make", "-s", "neon"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("checks on 1 instruction sets passed") == 4


def test_the_stub_matches_the_native_module(tmp_path):
    path = tmp_path / "_native.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "magicpig._native", "-o", path]
    subprocess.run(command, check=True)
    committed = (ROOT / "src/magicpig/_native.pyi").read_text()
    assert committed == path.read_text(), "run 'make stub'"
