"""Decode throughput of a model on a GPU, by system, context, memory budget and batch.

    python benchmarks/throughput.py --json throughput.json --plot throughput.png
    python benchmarks/throughput.py --quick            one context, one budget, within minutes
    python benchmarks/throughput.py --device cpu --model smollm2 --contexts 4k --budgets none

Weights are random, and so are keys and values, made on the device; every sequence has its own. Of
such keys lsh reads about half as many as of real ones (docs/log.md). Steps are timed as the engine
runs them, token ids rotate, and the first steps do not count. "CPU busy": thread-seconds of
attention over far contexts, of all that the threads had. "of roof": bytes of rows, codes and
buckets per second, of streamed reads. On a CPU weights are float32.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import hardware
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, PreTrainedModel

import magicpig
from magicpig import WindowConfig, _native
from magicpig.attention.plan import make_plan
from magicpig.cli.inputs import length_list
from magicpig.engine.memory import Memory, heads_of, largest_batch, parse_bytes, there_is
from magicpig.engine.runner import Runner
from magicpig.hf.cache import full_attention_layers
from magicpig.kv.base import LayerShape
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.sequence import SequenceKV
from magicpig.planning.geometry import config_of

SYSTEMS = ("full", "kv-stream", "cpu-dense", "lsh:10:150", "lsh:10:170", "scan:2:1%")
NEW_TOKENS = 64
WARM_UP = 3
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Point:
    """What was measured; None where it does not apply or did not fit."""

    system: str
    context: int
    budget: str
    batch: int
    largest_batch: int
    ms_per_step: float | None = None
    tokens_per_second: float | None = None
    cpu_busy: float | None = None
    host_gb_per_second: float | None = None
    of_roof: float | None = None
    keys_read: float | None = None
    gpu_bytes: int | None = None
    host_bytes: int | None = None


class Bench:
    """A model that is made once; it serves all systems."""

    def __init__(self, name: str, device: str) -> None:
        self.device = torch.device(device)
        config = config_of(name)
        config.max_position_embeddings = max(config.max_position_embeddings, 1 << 20)
        with self.device, console.status("making weights"):
            torch.manual_seed(0)
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
            try:
                model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
            finally:
                torch.set_default_dtype(before)
        self.model = model
        self.weights = sum(p.nbytes for p in model.parameters())
        self.attention = model.config._attn_implementation
        self.roof = _native.stream_read_roof(1 << 30, 5)

    def runner(self, system: str) -> Runner:
        config = self.model.config
        self.model.set_attn_implementation(self.attention)  # another runner may have had it
        layers = full_attention_layers(config)
        text = config.get_text_config(decoder=True)
        plan = make_plan(system, text.num_hidden_layers, full_layers=layers)
        return Runner(self.model, plan, WindowConfig())

    def sequence(self, runner: Runner, tokens: int, seed: int) -> SequenceKV:
        """Of random keys, around a mean as real ones are, and values."""
        text = self.model.config.get_text_config(decoder=True)
        kv_heads, dim = heads_of(text)
        shape = LayerShape(text.num_attention_heads, kv_heads, dim, runner.dtype, runner.device)
        generator = torch.Generator(self.device).manual_seed(seed)
        layers = []
        for i in range(text.num_hidden_layers):
            layer = runner.plan.new_layer(i, shape, runner.window)
            keys, values = torch.randn(
                2, kv_heads, tokens, dim, generator=generator, device=self.device
            ).to(runner.dtype)
            layer.extend(keys + keys[:, :1], values)
            layers.append(layer)
        return SequenceKV(layers, tokens)

    def points(
        self, system: str, context: int, budget: str, batches: list[int], steps: int
    ) -> Iterator[Point]:
        """From small to large batches, as far as they fit."""
        runner = self.runner(system)
        limit = None if budget == "none" else budget
        try:
            there = there_is(runner.needs, self.weights, None, limit)
        except ValueError:
            there = Memory()
        largest = largest_batch(runner.needs, there, context, NEW_TOKENS)
        sizes = sorted({n for n in batches if n < largest} | {min(largest, max(batches))})
        if not largest:
            yield Point(system, context, budget, 0, 0)
            return
        kvs: list[SequenceKV] = []
        for batch in sizes:
            while len(kvs) < batch:
                kvs.append(self.sequence(runner, context, len(kvs)))
            yield self.measured(runner, kvs[:batch], context, budget, largest, steps)

    def measured(
        self,
        runner: Runner,
        kvs: list[SequenceKV],
        context: int,
        budget: str,
        largest: int,
        steps: int,
    ) -> Point:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = [kv.cost for kv in kvs]
        seconds, busy = [], []
        for step in range(WARM_UP + steps):
            ids = [(7 * step + 13 * i) % 1000 + 10 for i in range(len(kvs))]
            spent = thread_seconds(kvs)
            start = time.perf_counter()
            with runner.threads():
                logits = runner.decode(kvs, ids)
                logits.argmax(-1).tolist()  # waits for the device
                for kv in kvs:
                    kv.settle()
            seconds.append(time.perf_counter() - start)
            busy.append(thread_seconds(kvs) - spent)
        costs = [kv.cost for kv in kvs]
        each = statistics.median(seconds[WARM_UP:])
        moved = sum(
            (now.row_bytes + now.search_bytes - then.row_bytes - then.search_bytes)
            for now, then in zip(costs, before, strict=True)
        ) / (WARM_UP + steps)
        on_host = runner.plan.method.on_host
        rows, tokens = sum(c.rows for c in costs), sum(c.tokens for c in costs)
        return Point(
            runner.plan.method.spec,
            context,
            budget,
            len(kvs),
            largest,
            1e3 * each,
            len(kvs) / each,
            statistics.median(busy[WARM_UP:]) / each / magicpig.num_threads() if on_host else None,
            moved / each / 1e9 if on_host else None,
            moved / each / self.roof if on_host else None,
            rows / max(tokens, 1),
            torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None,
            sum(kv.nbytes.rows + kv.nbytes.index for kv in kvs) if on_host else 0,
        )


def thread_seconds(kvs: list[SequenceKV]) -> float:
    """That the native core spent on attention so far."""
    layers = [layer for kv in kvs for layer in kv.attention_layers]
    return sum(sum(layer.window.seconds) for layer in layers if isinstance(layer, NativeLayer))


def table(points: list[Point]) -> str:
    header = "system,context,budget,batch,of,ms/step,tokens/s,CPU busy,GB/s,of roof,keys,GPU GB"
    lines = [f"| {' | '.join(header.split(','))} |", f"|---|{'---:|' * 11}"]

    def cell(value: float | None, form: str, scale: float = 1) -> str:
        return "" if value is None else format(scale * value, form)

    for p in points:
        cells = [
            p.system,
            f"{p.context:,}",
            p.budget,
            str(p.batch) if p.batch else "does not fit",
            str(p.largest_batch),
            cell(p.ms_per_step, ".1f"),
            cell(p.tokens_per_second, ".1f"),
            cell(p.cpu_busy, ".0%"),
            cell(p.host_gb_per_second, ".1f"),
            cell(p.of_roof, ".0%"),
            cell(p.keys_read, ".2%"),
            cell(p.gpu_bytes, ".1f", 1e-9),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(points: list[Point], path: Path) -> None:
    """Throughput over the batch: a panel for each context and budget."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(p.context, p.budget) for p in points if p.batch})
    figure, axes = pyplot.subplots(
        1, max(1, len(panels)), figsize=(4.5 * max(1, len(panels)), 4), squeeze=False
    )
    for axis, (context, budget) in zip(axes[0], panels, strict=False):
        for system in SYSTEMS:
            own = [
                p for p in points if (p.system, p.context, p.budget) == (system, context, budget)
            ]
            shown = [(p.batch, p.tokens_per_second) for p in own if p.tokens_per_second]
            if shown:
                axis.plot(*zip(*shown, strict=True), marker="o", label=system)
        axis.set(title=f"{context:,} tokens, {budget}", xlabel="batch", ylabel="tokens/s")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b", help="its geometry")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--contexts", default="16k,32k,96k")
    parser.add_argument("--budgets", nargs="+", default=["24GiB", "40GiB", "48GiB", "none"])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="96k, 24GiB, batches 1 and 4")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.contexts, args.budgets, args.batches, args.steps = "96k", ["24GiB"], [1, 4], 6
    for budget in args.budgets:
        if budget != "none":
            parse_bytes("--budgets", budget)
    print(f"{hardware()}, {magicpig.num_threads()} threads", end="")
    if args.device == "cuda":
        print(f", {torch.cuda.get_device_name()}", end="")
    bench = Bench(args.model, args.device)
    print(f", streamed read {bench.roof / 1e9:.1f} GB/s; {args.model}\n")
    points: list[Point] = []
    wanted = [
        (context, budget, system)
        for context in length_list(args.contexts)
        for budget in args.budgets
        for system in args.systems
    ]
    for context, budget, system in track(wanted, "systems", console=console):
        for point in bench.points(system, context, budget, args.batches, args.steps):
            points.append(point)
            if args.json:
                args.json.write_text(json.dumps([asdict(p) for p in points], indent=1))
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    print(table(points))
    if args.plot:
        plot(points, args.plot)


if __name__ == "__main__":
    main()
