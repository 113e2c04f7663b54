"""Attention of a prompt's part over all tokens so far: the native core against torch's.

512 queries, the last of the tokens, with the heads of SmolLM2-135M and Llama-3.1-8B, bfloat16. The
roof is a packed linear layer with as many rows, in the same run. FLOPs are of the products of
queries with the keys they see. Times are the best of several; with one thread of its CPU time, else
of wall time.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable

import torch
from ending import run_script
from machine import hardware
from rich.console import Console
from rich.table import Table

import magicpig
from magicpig import _native
from magicpig.attention.in_torch import attention_in_torch

GEOMETRIES = {"SmolLM2": (9, 3, 64), "Llama-8B": (32, 8, 128)}  # heads, KV heads, head_dim
ROOF_FEATURES = 4096


def best_seconds(call: Callable[[], object], seconds: float) -> float:
    clock = time.thread_time if magicpig.num_threads() == 1 else time.perf_counter
    call()
    samples: list[float] = []
    begin = clock()
    while len(samples) < 3 or clock() - begin < seconds:
        start = clock()
        call()
        samples.append(clock() - start)
    return min(samples)


def roof(rows: int, seconds: float) -> float:
    """FLOP/s of a packed linear layer."""
    weight = torch.randn(ROOF_FEATURES, ROOF_FEATURES).bfloat16()
    x, out = torch.randn(2, rows, ROOF_FEATURES).bfloat16()
    linear = _native.PackedLinear(weight)
    return 2 * rows * ROOF_FEATURES**2 / best_seconds(lambda: linear.forward(x, out), seconds)


def measure(
    heads: int, kv_heads: int, dim: int, queries: int, tokens: int, seconds: float
) -> tuple[float, float]:
    """Seconds of a call: ours, torch's."""
    query = torch.randn(1, heads, queries, dim).bfloat16()
    keys, values = torch.randn(2, 1, kv_heads, tokens, dim).bfloat16()
    arguments = (query, keys, values, None, dim**-0.5)
    out = torch.empty(queries, heads, dim).bfloat16()
    ours = best_seconds(
        lambda: _native.attend_prompt(query[0], keys[0], values[0], dim**-0.5, 0.0, 0, out), seconds
    )
    return ours, best_seconds(lambda: attention_in_torch(*arguments), seconds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--queries", type=int, default=512, help="tokens of the prompt's part")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1024, 6000, 32768], help="all tokens so far"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads")
    parser.add_argument("--seconds", type=float, default=1.0, help="time per measurement")
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    args = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 120)
    today = datetime.date.today().isoformat()
    console.print(f"{hardware()}; torch {torch.__version__}; {today}")
    table = Table(title=f"attention of {args.queries} queries")
    for name in (
        "heads",
        "tokens",
        "threads",
        "ms",
        "GFLOP/s",
        "of roof",
        "torch ms",
        "over torch",
    ):
        table.add_column(name, justify="left" if name == "heads" else "right")
    for threads in args.threads:
        magicpig.set_num_threads(threads)
        torch.set_num_threads(threads)
        peak = roof(args.queries, args.seconds)
        console.print(f"roof, linear layer, {threads} threads: {peak / 1e9:.0f} GFLOP/s")
        for name, (heads, kv_heads, dim) in GEOMETRIES.items():
            for tokens in args.tokens:
                ours, theirs = measure(heads, kv_heads, dim, args.queries, tokens, args.seconds)
                pairs = args.queries * (tokens - (args.queries - 1) / 2)
                rate = 4 * heads * dim * pairs / ours
                table.add_row(
                    f"{name} {heads}/{kv_heads} x {dim}",
                    f"{tokens:,}",
                    str(threads),
                    f"{ours * 1e3:.1f}",
                    f"{rate / 1e9:.0f}",
                    f"{100 * rate / peak:.0f} %",
                    f"{theirs * 1e3:.1f}",
                    f"{theirs / ours:.2f}x",
                )
    console.print(table)


if __name__ == "__main__":
    run_script(main)
