"""Packed linear layers against torch's F.linear, oneDNN's packed weights and the machine's roof.

Shapes of SmolLM2-135M and Llama-3.1-8B. Copies of a weight rotate over more than the caches hold,
so that every call reads it from memory. Times are lower quartiles (what else runs on the machine
only adds), with one thread of its CPU time, else of wall time; the roof is of wall time, and low if
the machine is busy. Last, a step of a whole model with SmolLM2-135M's shapes (random weights)
before and after magicpig.nn.pack.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Sequence

import torch
from ending import run_script
from machine import hardware
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

import magicpig
from magicpig import _native

SMOLLM = {"k,v": (192, 576), "q,o": (576, 576), "gate,up": (1536, 576), "down": (576, 1536)}
LLAMA = {"q,o": (4096, 4096), "gate,up": (14336, 4096), "down": (4096, 14336)}
SHAPES = {
    **{f"SmolLM2 {name}": shape for name, shape in SMOLLM.items()},
    "SmolLM2 lm_head": (49152, 576),
    **{f"Llama-8B {name}": shape for name, shape in LLAMA.items()},
}
MEMORY_BOUND_ROWS = 16


def lower_quartile(call: Callable[[int], object], copies: int, seconds: float) -> float:
    """Of the seconds that call(i) takes, i rotating over the copies."""
    clock = time.thread_time if magicpig.num_threads() == 1 else time.perf_counter
    call(0)
    samples: list[float] = []
    begin = clock()
    while len(samples) < min(copies, 8) or clock() - begin < seconds:
        start = clock()
        call(len(samples) % copies)
        samples.append(clock() - start)
    return sorted(samples)[len(samples) // 4]


def measure(weights: Sequence[Tensor], x: Tensor, seconds: float) -> dict[str, float]:
    """Seconds per call by implementation."""
    copies, rows = len(weights), len(x)
    out = torch.empty(rows, len(weights[0]), dtype=torch.bfloat16)
    packed = [_native.PackedLinear(weight) for weight in weights]
    times = {"packed": lower_quartile(lambda i: packed[i].forward(x, out), copies, seconds)}
    packed.clear()
    times["F.linear"] = lower_quartile(lambda i: functional.linear(x, weights[i]), copies, seconds)
    onednn = torch.ops.mkldnn
    if torch.backends.mkldnn.is_available():
        reordered = [onednn._reorder_linear_weight(weight, rows) for weight in weights]
        times["oneDNN"] = lower_quartile(
            lambda i: onednn._linear_pointwise(x, reordered[i], None, "none", [], ""),
            copies,
            seconds,
        )
    return times


def model_steps(rows: int, steps: int) -> tuple[float, float]:
    """Seconds of a decoding step of a transformers model, before and after pack."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from magicpig.nn import pack

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).bfloat16().eval()

    def step_seconds() -> float:
        ids = torch.randint(0, 49152, (rows, 64))
        cache = model(ids, use_cache=True).past_key_values
        token = ids[:, :1]
        return lower_quartile(lambda _: model(token, past_key_values=cache), steps, steps / 100)

    before = step_seconds()
    pack(model)
    return before, step_seconds()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512], help="rows of x")
    parser.add_argument(
        "--only", default="", help="leave out layers whose name does not contain this"
    )
    parser.add_argument("--threads", type=int, default=magicpig.num_threads(), help="threads")
    parser.add_argument("--megabytes", type=int, default=220, help="copies of a weight, together")
    parser.add_argument("--seconds", type=float, default=0.4, help="time per measurement")
    parser.add_argument("--steps", type=int, default=60, help="model steps; 0 to leave them out")
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    args = parse_arguments()
    magicpig.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    console = Console(width=None if sys.stdout.isatty() else 140)
    today = datetime.date.today().isoformat()
    console.print(f"{hardware()}; {args.threads} threads; torch {torch.__version__}; {today}")
    size = args.megabytes << 20
    # Short passes, and the best of many: some are not interrupted.
    roof = max(_native.stream_read_roof(128 << 20, 1) for _ in range(20))
    console.print(f"roof, streamed read: {roof / 1e9:.1f} GB/s")
    table = Table(title="linear layers, microseconds a call")
    for name in ("layer", "out x in", "rows", "packed", "GB/s", "of roof", "GFLOP/s"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for name in ("F.linear", "oneDNN packed", "over F.linear", "over oneDNN"):
        table.add_column(name, justify="right")
    for name, (out_features, in_features) in SHAPES.items():
        if args.only not in name:
            continue
        weight = torch.randn(out_features, in_features).bfloat16()
        copies = -(-size // (weight.numel() * 2))
        weights = [weight.clone() for _ in range(copies)]
        for rows in args.rows:
            x = torch.randn(rows, in_features).bfloat16()
            times = measure(weights, x, args.seconds)
            mine = times["packed"]
            rate = weight.numel() * 2 / mine
            others = [times.get(kind) for kind in ("F.linear", "oneDNN")]
            table.add_row(
                name,
                f"{out_features} x {in_features}",
                str(rows),
                f"{mine * 1e6:,.1f}",
                f"{rate / 1e9:.1f}" if rows <= MEMORY_BOUND_ROWS else "",
                f"{100 * rate / roof:.0f} %" if rows <= MEMORY_BOUND_ROWS else "",
                f"{2 * rows * weight.numel() / mine / 1e9:.0f}",
                *("" if other is None else f"{other * 1e6:,.1f}" for other in others),
                *("" if other is None else f"{other / mine:.2f}x" for other in others),
            )
    console.print(table)
    for rows in (1, 8) if args.steps else ():
        before, after = model_steps(rows, args.steps)
        console.print(
            f"SmolLM2-135M in transformers, a step at batch {rows} behind 64 tokens: "
            f"{before * 1e3:.1f} ms, packed {after * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    run_script(main)
