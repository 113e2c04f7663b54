"""How fast the keys of a segment become hash tables.

    python benchmarks/tables.py --tokens 16k,32k,64k --threads 1 2

"sorted": the native core sorts signs of projections into tables. "taken": it checks and copies
tables that were sorted elsewhere. With a CUDA GPU, what comes before that: keys are "hashed there",
signs "sorted there", and tables "brought" to pinned memory. GB/s are those of the rows' numbers in
the tables; the roof is a copy of them, by torch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from arguments import argument, positive
from ending import run_script
from machine import hardware
from rich.console import Console
from rich.progress import track
from torch import Tensor

import magicpig
from magicpig import LayerKV, LSHConfig, _native, reference
from magicpig.cli.inputs import length_list
from magicpig.kv.device_index import hash_keys, words_of
from magicpig.kv.segments import LONGEST

HEADS, KV_HEADS, DIM = 32, 8, 128
ROUNDS, SETS = 9, 3  # sets of tables take turns, so that none is in a cache
CUDA = torch.cuda.is_available()


def segment_lengths(text: str) -> list[int]:
    lengths = length_list(text)
    if max(lengths) > LONGEST:
        raise ValueError(f"a segment has {LONGEST:,} tokens at most, not {max(lengths):,}")
    return lengths


def seconds_of(work: Callable[[int, Any], object], prepare: Callable[[], Any] = tuple) -> float:
    """The median of some rounds; the first one, which may compile, is left out."""
    found = []
    for i in range(ROUNDS + 1):
        given = prepare()
        if CUDA:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work(i % SETS, given)
        if CUDA:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def on_host(lsh: LSHConfig, signs: list[Tensor], tables: list[list[Tensor]]) -> dict[str, float]:
    """Seconds of each way, and of the roof. Rows of the segment and its memory are there before."""
    tokens = signs[0].shape[2]
    rows = torch.randn(2, KV_HEADS, tokens, DIM).bfloat16()
    hashed = torch.zeros(KV_HEADS, DIM), torch.ones(KV_HEADS, tokens)
    spare = torch.zeros_like(tables[0][1])

    def segment() -> Any:
        growing = _native.GrowingSegment(LayerKV(HEADS, KV_HEADS, DIM, lsh)._native, tokens)
        growing.add(*rows)
        return growing

    def unsigned(tensor: Tensor) -> np.ndarray:
        return tensor.numpy().view(np.uint16 if tensor.dtype == torch.int16 else np.uint32)

    def finish(found: list[list[Tensor]]) -> float:
        native = [(*hashed, *map(unsigned, each)) for each in found]
        return seconds_of(lambda i, growing: growing.finish(native[i]), segment)

    return {
        "roof": seconds_of(lambda i, _: spare.copy_(tables[i][1])),
        "sorted": finish([[each] for each in signs]),
        "taken": finish(tables),
    }


def on_gpu(lsh: LSHConfig, signs: list[Tensor]) -> dict[str, float]:
    from magicpig.kv.tables_on_gpu import sort

    there = [each.cuda() for each in signs]
    keys = [torch.randn(KV_HEADS, s.shape[2], DIM, device="cuda").bfloat16() for s in signs]
    tables = [sort(each, lsh.num_tables, lsh.bits_per_table) for each in there]
    here = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tables[0]]
    spare = torch.empty_like(tables[0][1])

    def bring(i: int, _: object) -> None:
        for source, target in zip(tables[i], here, strict=True):
            target.copy_(source, non_blocking=True)

    return {
        "roof": seconds_of(lambda i, _: spare.copy_(tables[i][1])),
        "hashed there": seconds_of(lambda i, _: hash_keys(keys[i], lsh)),
        "sorted there": seconds_of(lambda i, _: sort(there[i], lsh.num_tables, lsh.bits_per_table)),
        "brought": seconds_of(bring),
    }


def measured(lsh: LSHConfig, tokens: int, all_threads: list[int]) -> list[str]:
    """Lines of the table."""
    shape, signs, tables = (KV_HEADS, words_of(lsh), tokens), [], []
    for _ in range(SETS):
        signs.append(torch.randint(-(2**15), 2**15, shape).short())
        ordered = reference.sorted_into_tables(signs[-1], lsh.num_tables, lsh.bits_per_table)
        tables.append([ordered[0].int(), ordered[1].short()])
    found = {}
    for threads in all_threads:
        magicpig.set_num_threads(threads)
        torch.set_num_threads(threads)
        found[f"CPU, {threads}"] = on_host(lsh, signs, tables)
    if CUDA:
        found["GPU"] = on_gpu(lsh, signs)
    size, lines = 2 * KV_HEADS * lsh.num_tables * tokens, []
    for where, seconds in found.items():
        roof = seconds.pop("roof")
        for name, each in seconds.items():
            figures = f"{1e3 * each:.2f} | {size / each / 1e9:.1f} | {roof / each:.0%}"
            lines.append(f"| {tokens:,} | {where} | {name} | {figures} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=argument(segment_lengths), default="32k,64k")
    parser.add_argument("--threads", type=argument(positive), nargs="+", default=[1, 2])
    args = parser.parse_args()
    lsh = LSHConfig(bits_per_table=10, num_tables=150, exact_below=0)
    gpu = f", {torch.cuda.get_device_name()}" if CUDA else ""
    print(f"{hardware()}{gpu}; {KV_HEADS} KV heads, 10 bits, 150 tables\n")
    lines = ["| tokens | where, threads | | ms | GB/s | of roof |", "|---:|---|---|---:|---:|---:|"]
    for tokens in track(args.tokens, "tables", console=Console(stderr=True)):
        lines += measured(lsh, tokens, args.threads)
    print("\n".join(lines))


if __name__ == "__main__":
    run_script(main)
