"""This machine as a plan sees it: its roofs, and what the native core makes of its cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from magicpig import _native, native
from magicpig.config import IndexConfig, LSHConfig, ScanConfig
from magicpig.engine.memory import SHARE
from magicpig.kv.layer import LayerKV
from magicpig.planning.machines import GIB, Cpu, Gpu

HEADS, KV_HEADS, DIM, TOKENS = 8, 2, 128, 65536
REPEATS = 12


def this_cpu() -> Cpu:
    """Takes some seconds."""
    stream, gather = native.memory_roofs()
    memory = int(_native.available_memory() * SHARE)  # as the engine takes it
    cpu = Cpu("here", native.num_threads(), stream, gather, memory)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, KV_HEADS, TOKENS, DIM, generator=generator).bfloat16()
    queries = torch.randn(REPEATS, HEADS, DIM, generator=generator).bfloat16()
    draw, drawn, rows, visited = _spent(LSHConfig(), keys, values, queries)
    cpu = replace(cpu, entry_seconds=draw / visited, row_seconds=drawn / rows)
    draw, *_ = _spent(ScanConfig(), keys, values, queries)
    return replace(cpu, macs=HEADS * TOKENS * DIM / draw)


def _spent(
    index: IndexConfig, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor
) -> tuple[float, float, float, float]:
    """Seconds of a core for drawing and for rows, rows and visited entries; medians of steps."""
    kv = LayerKV(HEADS, KV_HEADS, DIM, index)
    kv.append(keys, values)
    out, lse = torch.empty(1, HEADS, DIM), torch.empty(1, HEADS)
    rows, visited = torch.zeros(2, 1, HEADS, dtype=torch.int64)
    steps = []
    for query in queries:
        draw, drawn, *_ = _native.attend(
            [kv._native], query[None], DIM**-0.5, 0.0, False, out, lse, rows, visited, lse.clone()
        )
        steps.append((draw, drawn, float(rows.sum()), float(visited.sum())))
    draw, drawn, read, walked = torch.tensor(steps).median(0).values.tolist()
    return draw, drawn, read, walked


def this_gpu() -> Gpu | None:
    """None where there is none."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    size = 2 * GIB if properties.total_memory > 8 * GIB else GIB // 4
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    half = size // 2  # read, and written
    bandwidth = 2 * half / _seconds(lambda: there[:half].copy_(there[half:]))
    here = torch.empty(GIB // 4, dtype=torch.uint8, pin_memory=True)
    link = len(here) / _seconds(lambda: there[: len(here)].copy_(here, non_blocking=True))
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    flops = 2 * 8192**3 / _seconds(lambda: matrix @ matrix)
    return Gpu(properties.name, properties.total_memory, bandwidth, flops, link)


def _seconds(work: Callable[[], object]) -> float:
    """Of a piece of work on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(3):
        work()
    begin.record()
    for _ in range(10):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e4
