"""What a benchmark ran on, for the first line of its output."""

import os
import platform
from pathlib import Path

import torch

import magicpig


def hardware(device: str | None = None) -> str:
    """device: cuda or cpu, on which a model is to run, with as many threads beside it."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":")[1].strip() if names else model
    told = f"{model}, {len(os.sched_getaffinity(0))} CPUs, ISA {magicpig.isa()}"
    threads = f", {magicpig.num_threads()} threads" if device else ""
    gpu = f", {torch.cuda.get_device_name()}" if device == "cuda" else ""
    return told + threads + gpu


def cpu_time() -> tuple[int, int]:
    """Of all CPUs since they were started: all of it, and what a hypervisor gave to others."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0, 0
    times = [int(field) for field in fields]
    return sum(times), times[7]
