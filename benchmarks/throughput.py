"""Decode throughput of a model on a GPU, by system, context, memory budget and batch.

    python benchmarks/throughput.py --json throughput.json --plot throughput.png
    python benchmarks/throughput.py --quick            one context, one budget, within minutes
    python benchmarks/throughput.py --device cpu --model smollm2 --contexts 4k

Weights are random, and so are keys and values, made on the device; every sequence has its own. Of
such keys lsh reads about half as many as of real ones (docs/log.md). Steps are timed as the engine
runs them, token ids rotate, and the first steps do not count. A batch is measured once and counts
for all budgets that it fits into, as the engine computes it; measured memory is checked against
them. On a CPU weights are float32, and there is no budget but none.

"CPU busy": the share of a step in which far contexts are attended to; "threads": of what all
threads have in that step, those at work on it. "GPU busy": the share in which it has something to
do other than to wait. "between": for one sequence, from the end of attention to one far context to
the beginning of the next, in the middle of all layers. All from traces of a few steps. "of roof":
bytes of rows, codes and buckets read from the CPU's memory, per second, of streamed reads.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from arguments import (
    a_budget,
    a_method,
    argument,
    new_file,
    of_a_model,
    positive,
    some_seconds,
)
from ending import run_script
from machine import cpu_time, hardware
from rich.console import Console
from rich.progress import track
from throughput_report import Point, best_table, plot, table
from transformers import AutoModelForCausalLM, PreTrainedModel

import magicpig
from magicpig import WindowConfig, native, plotting, trace
from magicpig.attention.plan import make_plan
from magicpig.cli.inputs import length_list
from magicpig.config import draws_on_gpus
from magicpig.engine import pace
from magicpig.engine.memory import (
    LIBRARIES,
    Memory,
    heads_of,
    largest_batch,
    parse_bytes,
    there_is,
)
from magicpig.engine.runner import Runner
from magicpig.hf.cache import full_attention_layers
from magicpig.kv.base import LayerShape
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.places import give_back_pinned
from magicpig.kv.sequence import SequenceKV
from magicpig.planning.geometry import config_of

SYSTEMS = ("full", "kv-stream", "cpu-dense", "lsh:10:150", "lsh:10:170", "scan:2:1%")
ALL = [16384, 32768, 98304], ["24GiB", "40GiB", "48GiB", "none"], None
QUICK = [98304], ["24GiB"], [1, 4]
NEW_TOKENS = 64
ATTENTION = ("far context", "attention")  # spans on the CPU
WARM_UP = 5  # steps, until they are recorded
TRACED = 3  # steps
LEAST_STEPS = 5
console = Console(stderr=True, highlight=False)


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
        self.roof, _ = native.memory_roofs()

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

    def largest(self, runner: Runner, context: int, budgets: list[str]) -> dict[str, int]:
        """The largest batch for each budget."""
        found = {}
        for budget in budgets:
            limit = None if budget == "none" else budget
            try:
                there = there_is(runner.needs, self.weights, None, limit)
            except ValueError:
                there = Memory()
            found[budget] = largest_batch(runner.needs, there, context, NEW_TOKENS)
        if self.device.type == "cuda":  # limits are checked below, not enforced
            torch.cuda.set_per_process_memory_fraction(1.0)
        return found

    def points(
        self,
        system: str,
        context: int,
        budgets: list[str],
        batches: list[int] | None,
        seconds: float,
    ) -> Iterator[Point]:
        """From small to large batches, as far as they fit; None: up to the largest that fits."""
        runner = self.runner(system)
        largest = self.largest(runner, context, budgets)
        most = max(largest.values())
        kvs: list[SequenceKV] = []
        for batch in sizes(list(largest.values()), batches):
            while len(kvs) < batch:
                kvs.append(self.sequence(runner, context, len(kvs)))
            fits = [budget for budget, size in largest.items() if batch <= size]
            point = self.measured(runner, kvs[:batch], context, fits, seconds)
            self.check(point)
            yield point
        if not most:
            yield Point(system, context, 0, [])

    def check(self, point: Point) -> None:
        for budget in point.fits:
            limit = float("inf") if budget == "none" else parse_bytes("budget", budget)
            if (point.gpu_bytes or 0) + LIBRARIES > limit:
                console.print(f"[red]{point}: more than {budget}")

    def measured(
        self,
        runner: Runner,
        kvs: list[SequenceKV],
        context: int,
        fits: list[str],
        at_least: float,
    ) -> Point:
        step = steps_of(runner, kvs)
        warm_up(runner, kvs, step)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before, spent = [kv.cost for kv in kvs], thread_seconds(kvs)
        seconds: list[float] = []
        while len(seconds) < LEAST_STEPS or sum(seconds) < at_least:
            seconds.append(step())
        each = statistics.median(seconds)
        whole = len(seconds) * each  # without what recording a graph in between takes
        costs, working = [kv.cost for kv in kvs], thread_seconds(kvs) - spent
        by_codes = runner.graphs and draws_on_gpus(getattr(runner.plan.method, "index", None))
        moved = sum(now.row_bytes - then.row_bytes for now, then in zip(costs, before, strict=True))
        if not by_codes:  # which the GPU reads
            pairs = zip(costs, before, strict=True)
            moved += sum(now.search_bytes - then.search_bytes for now, then in pairs)
        cpu_busy, gpu_busy, between = busy(step)
        on_cpu = self.device.type == "cpu"
        there = [i for i in range(len(kvs[0].layers)) if on_cpu or runner.plan.of(i).on_host]
        held = [kv.layers[i].nbytes for kv in kvs for i in there]
        by_cpu = any(isinstance(layer, NativeLayer) for layer in kvs[0].attention_layers)
        from_host = by_cpu or runner.plan.method.on_host  # kv-stream's go to the GPU
        rows, tokens = sum(c.rows for c in costs), sum(c.tokens for c in costs)
        return Point(
            runner.plan.method.spec,
            context,
            len(kvs),
            fits,
            1e3 * each,
            len(kvs) / each,
            cpu_busy if by_cpu else None,
            working / whole / magicpig.num_threads() if by_cpu else None,
            gpu_busy if self.device.type == "cuda" else None,
            between if by_cpu and len(kvs) == 1 else None,
            moved / whole / 1e9 if from_host else None,
            moved / whole / self.roof if from_host else None,
            rows / max(tokens, 1),
            torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None,
            sum(each.rows + each.index for each in held),
        )


def sizes(largest: list[int], batches: list[int] | None) -> list[int]:
    """Of batches to be measured, where those of `largest` fit: these, or powers of two, and those
    that are the largest for a budget."""
    most = min(max(largest), max(batches or largest))
    asked = batches or [2**i for i in range(most.bit_length())]
    return sorted({size for size in (*asked, *largest) if 0 < size <= most})


def steps_of(runner: Runner, kvs: list[SequenceKV]) -> Callable[[], float]:
    """A step at each call, as the engine makes it; gives its seconds. Token ids rotate."""
    number = itertools.count()

    def step() -> float:
        i = next(number)
        ids = [(7 * i + 13 * j) % 1000 + 10 for j in range(len(kvs))]
        start = time.perf_counter()
        with runner.threads():
            logits = runner.decode(kvs, ids)
            logits.argmax(-1).tolist()  # waits for the device
            for kv in kvs:
                kv.settle()
        return time.perf_counter() - start

    return step


def warm_up(runner: Runner, kvs: list[SequenceKV], step: Callable[[], float]) -> None:
    """Until steps are recorded, and both ways to run a batch were tried."""
    tried = 2 * pace.STEPS if runner.graphs and runner.halves and len(kvs) > 1 else 0
    for _ in range(WARM_UP + tried):
        step()


def busy(step: Callable[[], float]) -> tuple[float, float, float | None]:
    """Shares of a step in which the CPU attends, and in which the GPU works; and microseconds
    between calls of attention."""
    cpu, gpu, between = [], [], []
    for _ in range(TRACED):
        with (
            tempfile.TemporaryDirectory() as folder,
            trace.recording(Path(folder) / "step.json") as it,
        ):
            whole = 1e6 * step()
            spans = spans_of(it.as_dict())
        attention = attending(spans)
        cpu.append(covered(attention) / whole)
        gpu.append(covered([span for span in spans if span["pid"] == trace.GPU]) / whole)
        attention.sort(key=lambda span: float(span["ts"]))
        between += [b["ts"] - a["ts"] - a["dur"] for a, b in itertools.pairwise(attention)]
    middle = statistics.median(between) if between else None
    return statistics.median(cpu), statistics.median(gpu), middle


def spans_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a trace."""
    return [event for event in found["traceEvents"] if event["ph"] == "X"]


def attending(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those in which the CPU attends to far contexts."""
    return [span for span in spans if span["pid"] == trace.CPU and span["name"] in ATTENTION]


def covered(spans: list[dict[str, Any]]) -> float:
    """Time in at least one of them."""
    total = end = 0.0
    for span in sorted(spans, key=lambda span: float(span["ts"])):
        total += max(0.0, span["ts"] + span["dur"] - max(span["ts"], end))
        end = max(end, span["ts"] + span["dur"])
    return total


def thread_seconds(kvs: list[SequenceKV]) -> float:
    """That the native core spent on attention so far."""
    layers = [layer for kv in kvs for layer in kv.attention_layers]
    return sum(sum(layer.window.seconds) for layer in layers if isinstance(layer, NativeLayer))


def let_go(device: torch.device) -> None:
    """Memory that nothing uses any more, pinned memory of the host too, which torch keeps."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        give_back_pinned()


def main() -> None:
    parser = of_a_model(__doc__)
    parser.add_argument("--contexts", type=argument(length_list), help="(16k,32k,96k)")
    parser.add_argument(
        "--budgets", type=argument(a_budget), nargs="+", help="(24GiB 40GiB 48GiB none; CPU: none)"
    )
    parser.add_argument("--systems", type=argument(a_method), nargs="+", default=list(SYSTEMS))
    parser.add_argument(
        "--batches",
        type=argument(positive),
        nargs="+",
        help="(powers of two, up to the largest that fits)",
    )
    parser.add_argument(
        "--seconds",
        type=argument(some_seconds),
        default=1.0,
        help="of steps of each batch, or more",
    )
    parser.add_argument(
        "--stop-after", type=argument(some_seconds), help="seconds, after which nothing is begun"
    )
    parser.add_argument(
        "--quick", action="store_true", help="96k, 24GiB (CPU: none), batches 1 and 4"
    )
    parser.add_argument("--json", type=argument(new_file))
    parser.add_argument("--plot", type=argument(new_file))
    args = parser.parse_args()
    if args.quick and (args.contexts or args.budgets or args.batches):
        parser.error("--quick has its own --contexts, --budgets and --batches: leave them out")
    if args.device == "cpu" and set(args.budgets or ()) - {"none"}:
        parser.error("--budgets are of a GPU's memory; on a CPU there is only none: leave them out")
    if args.plot:
        try:
            plotting.require()
        except RuntimeError as error:
            parser.error(str(error))
    contexts, budgets, batches = QUICK if args.quick else ALL
    budgets = args.budgets or (["none"] if args.device == "cpu" else budgets)
    contexts, batches = args.contexts or contexts, args.batches or batches
    start, times = time.perf_counter(), cpu_time()
    print(hardware(args.device), end="")
    bench = Bench(args.model, args.device)
    print(f", streamed read {bench.roof / 1e9:.1f} GB/s; {args.model}\n")
    points: list[Point] = []
    wanted = [(c, s) for c in contexts for s in args.systems]
    try:
        for context, system in track(wanted, "systems", console=console):
            for point in bench.points(system, context, budgets, batches, args.seconds):
                points.append(point)
                if args.json:
                    args.json.write_text(json.dumps([asdict(p) for p in points], indent=1))
                if args.stop_after and time.perf_counter() - start > args.stop_after:
                    break
            let_go(bench.device)
            if args.stop_after and time.perf_counter() - start > args.stop_after:
                stopped = f"stopped after {args.stop_after:.0f} s, at {system}, {context:,} tokens"
                console.print(stopped)
                break
    finally:  # what there is, if it is ended too
        if points:
            print(f"{table(points)}\n\n{best_table(points, budgets)}")
        spent, stolen = (now - then for now, then in zip(cpu_time(), times, strict=True))
        if spent:
            print(f"\nOf the CPUs' time {stolen / spent:.1%} went to other guests of the machine.")
    if args.plot:
        plot(points, args.plot)


if __name__ == "__main__":
    run_script(main)
