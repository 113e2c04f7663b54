"""How fast keys and values become rows of a segment, by how they lie in memory.

    python benchmarks/rows.py --threads 1 2

"by head": all tokens of a head side by side; "by token": all heads of a token, as models give them
and as prompts are kept that a GPU reads. The roof is one copy of as many bytes to memory that the
system hands out meanwhile, as it does here, by torch with as many threads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from arguments import argument, positive
from ending import run_script
from machine import hardware

import magicpig
from magicpig import LayerKV, _native

HEADS, KV_HEADS, DIM = 32, 8, 128
ROUNDS = 9


def best_of(work: Callable[[], None]) -> float:
    """Seconds of the fastest round: others may have been disturbed."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=argument(positive), default=65536)
    parser.add_argument("--threads", type=argument(positive), nargs="+", default=[1, 2])
    args = parser.parse_args()
    by_head = torch.randn(2, KV_HEADS, args.tokens, DIM).bfloat16()
    by_token = by_head.transpose(1, 2).contiguous().transpose(1, 2)
    source = by_head.view(torch.uint8).flatten()
    print(f"{hardware()}; {args.tokens:,} tokens, {KV_HEADS} KV heads of {DIM}, bfloat16\n")
    print("| threads | tensors | ms | GB/s | of roof |\n|---:|---|---:|---:|---:|")
    for threads in args.threads:
        magicpig.set_num_threads(threads)
        torch.set_num_threads(threads)

        def copy() -> None:
            torch.from_numpy(_native.empty_bytes(len(source))).copy_(source)

        roof = best_of(copy)
        for name, (keys, values) in (("by head", by_head), ("by token", by_token)):

            def append(keys: torch.Tensor = keys, values: torch.Tensor = values) -> None:
                LayerKV(HEADS, KV_HEADS, DIM, None).append(keys, values)

            seconds = best_of(append)
            rate = len(source) / seconds / 1e9
            share = roof / seconds
            print(f"| {threads} | {name} | {1e3 * seconds:.1f} | {rate:.2f} | {share:.0%} |")


if __name__ == "__main__":
    run_script(main)
