"""What a benchmark ran on, for the first line of its output."""

import os
import platform
from pathlib import Path

import magicpig


def hardware() -> str:
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":")[1].strip() if names else model
    return f"{model}, {len(os.sched_getaffinity(0))} CPUs, ISA {magicpig.isa()}"
