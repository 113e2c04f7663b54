"""Kernels in Triton compile for GPUs that are not here, and fit into their shared memory."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")
HERE = Path(__file__).parent
SOURCES = HERE.parent / "src"
SHARED = {89: 99 << 10, 90: 227 << 10}  # bytes that a block may have, by compute capability


def launched():
    """Kernels that the package launches."""
    for path in (SOURCES / "magicpig").glob("**/*on_gpu.py"):
        module = ".".join(path.relative_to(SOURCES).with_suffix("").parts)
        for name in re.findall(r"^ +(_\w+)\[", path.read_text(), re.MULTILINE):
            yield f"{module}.{name}"


def test_kernels_compile_for_other_gpus(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    running = {
        capability: subprocess.Popen(
            [sys.executable, HERE / "compile_kernels.py", str(capability)],
            env=environment | {"TRITON_CACHE_DIR": str(tmp_path / str(capability))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for capability in SHARED
    }
    try:
        for capability, process in running.items():
            out, errors = process.communicate(timeout=400)
            assert process.returncode == 0, errors
            kernels = [json.loads(line) for line in out.splitlines()]
            assert {kernel["name"] for kernel in kernels} == set(launched())
            for kernel in kernels:
                assert kernel["shared"] <= SHARED[capability], kernel
    finally:
        for process in running.values():
            process.kill()
