"""What `magicpig.hf.enable` makes of a transformers model: its prompt, its tokens, and its memory.

    python benchmarks/drop_in.py --contexts 16k,32k --json drop_in.json
    python benchmarks/drop_in.py --device cpu --model smollm2 --contexts 2k

The model's own forward passes, as model.generate makes them: a prompt of random tokens at once, and
then one token at a time; "transformers" is without the drop-in. Weights are random, made on the
device. "first": the step in which the prompt becomes a far context. "peak": GPU memory beyond the
weights, of the prompt and of the steps. The engine (throughput.py, prefill.py) reads prompts in
parts and records its steps; here kernels are launched one by one, by transformers' code.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
from arguments import a_method, argument, new_file, of_a_model, positive
from ending import run_script
from machine import hardware
from rich.console import Console
from rich.progress import track
from throughput import Bench
from transformers import DynamicCache

from magicpig import hf
from magicpig.cli.inputs import length_list

OWN = "transformers"
SYSTEMS = (OWN, "full", "scan:2:1%", "lsh:10:150")
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Point:
    system: str
    context: int
    prompt_seconds: float
    first_seconds: float
    ms_per_token: float
    prompt_peak_bytes: int | None
    steps_peak_bytes: int | None


class Clock:
    """Seconds and peaks of memory, between its calls."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            self.held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        self.began = time.perf_counter()

    def lap(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        began, self.began = self.began, time.perf_counter()
        return self.began - began

    def peak(self) -> int | None:
        """Since it was last asked for."""
        if not self.cuda:
            return None
        peak = torch.cuda.max_memory_allocated() - self.held
        torch.cuda.reset_peak_memory_stats()
        return peak


@torch.inference_mode()
def measured(bench: Bench, system: str, context: int, steps: int) -> Point:
    model = bench.model
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    prompt = torch.randint(vocabulary, (1, context), device=bench.device)
    clock = Clock(bench.device)
    with nullcontext() if system == OWN else hf.enable(model, system):
        cache = DynamicCache(config=model.config)
        out = model(prompt, past_key_values=cache, logits_to_keep=1)
        read, read_peak = clock.lap(), clock.peak()
        took = []
        for _ in range(1 + steps):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(token, past_key_values=cache, logits_to_keep=1)
            took.append(clock.lap())
        return Point(
            system,
            context,
            read,
            took[0],
            1e3 * statistics.median(took[1:]),
            read_peak,
            clock.peak(),
        )


def table(points: list[Point]) -> str:
    lines = [
        "| system | context | prompt s | first s | ms/token | tokens/s | prompt peak GB "
        "| steps peak GB |",
        f"|---|{'---:|' * 7}",
    ]
    for p in points:
        peaks = (
            "" if peak is None else f"{peak / 1e9:.2f}"
            for peak in (p.prompt_peak_bytes, p.steps_peak_bytes)
        )
        lines.append(
            f"| {p.system} | {p.context:,} | {p.prompt_seconds:.2f} | {p.first_seconds:.2f} | "
            f"{p.ms_per_token:.1f} | {1e3 / p.ms_per_token:.1f} | {' | '.join(peaks)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = of_a_model(__doc__)
    parser.add_argument("--contexts", type=argument(length_list), default="16k,32k")
    parser.add_argument("--systems", type=argument(a_system), nargs="+", default=list(SYSTEMS))
    parser.add_argument("--steps", type=argument(positive), default=30)
    parser.add_argument("--json", type=argument(new_file))
    args = parser.parse_args()
    print(f"{hardware(args.device)}; {args.model}\n")
    bench = Bench(args.model, args.device)
    points = []
    for context in args.contexts:
        for system in (args.systems[0], args.systems[-1]):  # warms up; host memory is pinned
            measured(bench, system, context, 2)
        for system in track(args.systems, f"{context:,} tokens", console=console):
            points.append(measured(bench, system, context, args.steps))
            if args.json:
                args.json.write_text(json.dumps([asdict(p) for p in points], indent=1))
    print(table(points))


def a_system(text: str) -> str:
    return text if text == OWN else a_method(text)


if __name__ == "__main__":
    run_script(main)
