"""Decode steps of a whole model: tokens per second, and where a step's time goes.

First the default model, at growing contexts and batches, by each method and by transformers' own
generate with SDPA in the same run. Its prompt is random text read once; every sequence of a batch
has rows of its own, so that no cache flatters. Then the same for a model with random weights in
Llama-3.2-1B's geometry but with 4 layers, whose keys and values are random, at longer contexts.
Last, one attention layer of it, and the exponent with which its time grows with the context.

Parts of a step: linear (linear layers, MLPs, norms, embedding), window (rows read whole: window,
dense layers, short segments), draw and rows (what is drawn), other (Python, rotary embedding,
sampling a token; for `far` the merging too). Thread-seconds count per thread.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from ending import run_script
from machine import hardware
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import magicpig
from magicpig import LLM, LSHConfig, SamplingParams, ScanConfig, WindowConfig, _native
from magicpig.attention.plan import Plan, make_plan
from magicpig.engine.runner import Runner
from magicpig.engine.sampler import Sampler, sample
from magicpig.files import write_whole
from magicpig.hf.attention import attention
from magicpig.hf.tagged import DecodeLayer
from magicpig.kv.base import LayerShape
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.sequence import SequenceKV, step
from magicpig.models import load
from magicpig.nn import GatedMLP, PackedEmbedding, PackedLinear, RMSNorm

console = Console(stderr=True)


INDEXES = {"full": None, "lsh": LSHConfig(), "scan": ScanConfig()}
METHODS = tuple(INDEXES)


@dataclass
class Result:
    """One configuration: tokens per second of the whole batch, milliseconds of a step by part."""

    method: str
    context: int
    batch: int
    threads: int
    tokens_per_second: float
    step_ms: float
    linear_ms: float | None = None
    window_ms: float | None = None
    draw_ms: float | None = None
    rows_ms: float | None = None
    other_ms: float | None = None
    share_read: float | None = None


class LinearClock:
    """Seconds inside the model's native layers, by torch's own hooks."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.seconds = 0.0
        self._began = 0.0
        for module in model.modules():
            if isinstance(module, (GatedMLP, PackedEmbedding, PackedLinear, RMSNorm)):
                module.register_forward_pre_hook(self._before)
                module.register_forward_hook(self._after)

    def _before(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _after(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


def copied(sequence: SequenceKV, plan: Plan) -> SequenceKV:
    """The same tokens in memory of their own."""
    layers = []
    for i, layer in enumerate(sequence.layers):
        other = plan.new_layer(i, layer.shape, layer.config, layer.span)
        other.extend(*layer.read())
        layers.append(other)
    return SequenceKV(layers, sequence.num_tokens)


def random_model() -> PreTrainedModel:
    """Llama-3.2-1B's geometry with few layers and a small vocabulary."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        num_hidden_layers=4,
        vocab_size=49_152,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def random_prompt(tokens: int, layers: int) -> SequenceKV:
    """Keys around a mean, as real ones are, in a model like random_model."""
    sequence = []
    for _ in range(layers):
        layer = NativeLayer(LayerShape(32, 8, 64, torch.bfloat16), None, WindowConfig())
        keys = torch.randn(8, 1, 64) + torch.randn(8, tokens, 64)
        layer.extend(keys.bfloat16(), torch.randn(8, tokens, 64).bfloat16())
        sequence.append(layer)
    return SequenceKV(sequence, tokens)


def measure(
    runner: Runner, clock: LinearClock, method: str, prompt: SequenceKV, batch: int, steps: int
) -> Result:
    # Of few layers none is dense: two of a model's sixteen or more would hardly count.
    dense = None if len(prompt.layers) > 8 else []
    plan = make_plan(method, len(prompt.layers), dense_layers=dense)
    kvs = [copied(prompt, plan) for _ in range(batch)]
    tokens = torch.randint(100, 40_000, (steps + 2, batch)).tolist()
    samplers = [Sampler(SamplingParams(), []) for _ in range(batch)]
    for warm in tokens[:2]:
        runner.decode(kvs, warm)
    before = parts(kvs)
    clock.seconds = 0.0
    samples = []
    for row in tokens[2:]:
        start = time.perf_counter()
        with runner.threads():
            sample(runner.decode(kvs, row), samplers)
        samples.append(time.perf_counter() - start)
        for kv in kvs:
            kv.settle()
    total, threads = sum(samples), magicpig.num_threads()
    draw, drawn, exact = (
        (after - was) / threads for after, was in zip(parts(kvs), before, strict=True)
    )
    other = total - clock.seconds - draw - drawn - exact
    per_step = [1e3 * seconds / steps for seconds in (clock.seconds, exact, draw, drawn, other)]
    median = statistics.median(samples)
    share = statistics.mean(kv.share_read for kv in kvs)
    context = prompt.num_tokens
    return Result(method, context, batch, threads, batch / median, 1e3 * median, *per_step, share)


def parts(kvs: Sequence[SequenceKV]) -> list[float]:
    seconds = [layer.window.seconds for layer in kvs[0].attention_layers]
    return [sum(column) for column in zip(*seconds, strict=True)]


def measure_transformers(model, prompt: SequenceKV, batch: int, steps: int) -> Result:
    """model.generate with SDPA, on a DynamicCache that holds the same keys and values."""
    ids = torch.randint(100, 40_000, (batch, prompt.num_tokens + 1))

    def seconds(new_tokens: int) -> float:
        cache = DynamicCache(config=model.config)
        for i, layer in enumerate(prompt.layers):
            keys, values = (t.expand(batch, *t.shape).contiguous() for t in layer.read())
            cache.update(keys, values, i)
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
        )
        return time.perf_counter() - start

    seconds(1)
    each = (seconds(steps + 1) - seconds(1)) / steps
    context, threads = prompt.num_tokens, torch.get_num_threads()
    return Result("transformers", context, batch, threads, batch / each, 1e3 * each)


def long_layer(lengths: Sequence[int], steps: int) -> list[tuple[str, int, float, float]]:
    """(method, tokens, microseconds of an attention step, share read) in one layer."""
    heads, kv_heads, dim = 32, 8, 64
    results = []
    for method, index in INDEXES.items():
        for tokens in lengths:
            torch.manual_seed(0)
            mean = torch.randn(kv_heads, 1, dim)
            keys = (mean + torch.randn(kv_heads, tokens, dim)).bfloat16()
            values = torch.randn(kv_heads, tokens, dim).bfloat16()
            shape = LayerShape(heads, kv_heads, dim, torch.bfloat16)
            layer = NativeLayer(shape, index, WindowConfig())
            layer.extend(keys, values)
            samples = []
            for _ in range(steps):
                query = torch.randn(1, heads, dim).bfloat16()
                key, value = torch.randn(2, 1, kv_heads, dim).bfloat16().unbind()
                start = time.perf_counter()
                step([layer], query, key, value, dim**-0.5)
                samples.append(time.perf_counter() - start)
            rows, there = layer.window.reads
            results.append((method, tokens, 1e6 * statistics.median(samples), rows / there))
    return results


def attention_overhead(repeats: int = 2000) -> float:
    """Microseconds of Python around the native step, per layer: median over calls on one token."""
    heads, kv_heads, dim = 9, 3, 64
    tensors = [torch.randn(1, n, 1, dim).bfloat16() for n in (heads, kv_heads, kv_heads)]
    flat = [tensor.squeeze(2) for tensor in tensors]
    out = torch.empty_like(flat[0])
    module = torch.nn.Module()

    def through_python(layer: NativeLayer) -> None:
        query, key, value = tensors
        key, value = DecodeLayer(partial(step, [layer]), 0, None).update(key, value)
        attention(module, query, key, value, None, scaling=0.125)

    def native(layer: NativeLayer) -> None:
        far = [layer.far._native]
        _native.step([layer.window], far, *flat, 0.125, 0.0, 2**32, out)

    medians = []
    for call in (through_python, native):
        samples = []
        for _ in range(repeats):
            shape = LayerShape(heads, kv_heads, dim, torch.bfloat16)
            layer = NativeLayer(shape, None, WindowConfig())
            start = time.perf_counter()
            call(layer)
            samples.append(time.perf_counter() - start)
        medians.append(statistics.median(samples))
    return 1e6 * (medians[0] - medians[1])


def best_of_memory(llm: LLM, prompt: SequenceKV, n: int, new_tokens: int) -> float:
    """Bytes that n completions of one prompt hold in all: the far context once, n windows."""
    kvs = [prompt.fork() for _ in range(n)]
    for _ in range(new_tokens):
        llm.engine.runner.decode(kvs, torch.randint(100, 40_000, (n,)).tolist())
        for kv in kvs:
            kv.settle()
    return kvs[0].nbytes.rows + kvs[0].nbytes.index + sum(kv.nbytes.window for kv in kvs)


def exponent(lengths: Sequence[int], times: Sequence[float]) -> float:
    """b of the line log(time) = a + b log(length) with the least squares; two lengths at least."""
    x, y = [math.log(n) for n in lengths], [math.log(t) for t in times]
    mean_x, mean_y = statistics.mean(x), statistics.mean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )


def decode_table(model: str, results: Sequence[Result]) -> Table:
    table = Table(title=f"decode steps of {model}; ms by part", title_justify="left")
    for name in ("context", "batch", "threads", "method", "tokens/s", "ms/step", "linear"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for name in ("window", "draw", "rows", "other", "keys read"):
        table.add_column(name, justify="right")
    for r in results:
        shown = (r.linear_ms, r.window_ms, r.draw_ms, r.rows_ms, r.other_ms)
        table.add_row(
            str(r.context),
            str(r.batch),
            str(r.threads),
            r.method,
            f"{r.tokens_per_second:.1f}",
            f"{r.step_ms:.1f}",
            *("" if ms is None else f"{ms:.2f}" for ms in shown),
            "" if r.share_read is None else f"{100 * r.share_read:.1f} %",
        )
    return table


def measure_all(
    runner: Runner,
    clock: LinearClock,
    baseline: PreTrainedModel | None,
    prompt: SequenceKV,
    batches: Sequence[int],
    steps: int,
) -> list[Result]:
    """Every batch by every method; by transformers as far as that takes less than a minute."""
    results = []
    for batch in batches:
        for method in METHODS:
            results.append(measure(runner, clock, method, prompt, batch, steps))
        if baseline is not None and prompt.num_tokens * batch <= 50_000:
            results.append(measure_transformers(baseline, prompt, batch, max(3, steps // 4)))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    contexts = [256, 1024, 2048, 4096, 6000, 8000]
    parser.add_argument("--contexts", type=int, nargs="*", default=contexts)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    lengths = [16384, 32768, 65536]
    parser.add_argument("--long-contexts", type=int, nargs="*", default=lengths)
    parser.add_argument("--long-batches", type=int, nargs="+", default=[1, 4])
    lengths = [16384, 32768, 65536, 131072]
    parser.add_argument("--layer-contexts", type=int, nargs="*", default=lengths)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--best-of", type=int, default=8, help="completions that share a prompt")
    parser.add_argument("--no-transformers", action="store_true", help="leave the baseline out")
    parser.add_argument("--json", type=Path, help="also write the results there")
    args = parser.parse_args()
    torch.manual_seed(0)
    results: dict[str, list[Result]] = {"the default model": [], "a random model": []}
    layers, best_of = {}, ""
    rounds = len(args.contexts) + len(args.long_contexts) + bool(args.layer_contexts)
    with Progress(console=console) as bar:
        task = bar.add_task("measuring", total=len(args.threads) * rounds)
        if args.contexts:
            llm = LLM(args.model)
            clock = LinearClock(llm.engine.runner.model)
            baseline = None if args.no_transformers else load(args.model).model
            longest = torch.randint(100, 40_000, (max(args.contexts),)).tolist()
            for context in args.contexts:
                prompt = llm.read(longest[:context])
                for threads in args.threads:
                    use_threads(threads)
                    results["the default model"] += measure_all(
                        llm.engine.runner, clock, baseline, prompt, args.batches, args.steps
                    )
                    bar.advance(task)
            one, many = (best_of_memory(llm, prompt, n, 128) for n in (1, args.best_of))
            best_of = (
                f"{args.best_of} completions of one prompt of {prompt.num_tokens} tokens, 128 new "
                f"ones each: {many / 1e6:.0f} MB, one: {one / 1e6:.0f} MB, ratio {many / one:.2f}"
            )
        if args.long_contexts:
            baseline = None if args.no_transformers else random_model()
            runner = Runner(random_model(), make_plan("lsh", 4), WindowConfig())
            clock = LinearClock(runner.model)
            for context in args.long_contexts:
                prompt = random_prompt(context, 4)
                for threads in args.threads:
                    use_threads(threads)
                    results["a random model"] += measure_all(
                        runner, clock, baseline, prompt, args.long_batches, args.steps
                    )
                    bar.advance(task)
        for threads in args.threads if args.layer_contexts else ():
            use_threads(threads)
            layers[threads] = long_layer(args.layer_contexts, args.steps * 2)
            bar.advance(task)
    if args.json:
        decode = {model: [asdict(r) for r in rows] for model, rows in results.items()}
        write_whole(args.json, json.dumps({"decode": decode, "layer": layers}).encode())
    print(f"{hardware()}, {datetime.date.today()}")
    out = Console(width=130)
    for model, measured in results.items():
        if measured:
            out.print(decode_table(model, measured))
    print(best_of)
    print(f"Python around an attention step: {attention_overhead():.0f} us per layer")
    for threads, rows in layers.items():
        out.print(layer_table(threads, rows))
        for method in METHODS if len(args.layer_contexts) > 1 else ():
            times = [us for name, _, us, _ in rows if name == method]
            print(f"{method}: time grows with length ** {exponent(args.layer_contexts, times):.2f}")


def use_threads(count: int) -> None:
    magicpig.set_num_threads(count)
    torch.set_num_threads(count)


def layer_table(threads: int, rows: Sequence[tuple[str, int, float, float]]) -> Table:
    table = Table(title=f"one layer, 32/8 heads of 64, {threads} threads", title_justify="left")
    for name in ("method", "tokens", "us", "keys read"):
        table.add_column(name, justify="right")
    for method, tokens, microseconds, share in rows:
        table.add_row(method, str(tokens), f"{microseconds:.0f}", f"{100 * share:.2f} %")
    return table


if __name__ == "__main__":
    run_script(main)
