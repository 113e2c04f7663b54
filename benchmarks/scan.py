"""scan beside lsh: time and error on a real model's keys, and speed against the machine's roofs.

    python benchmarks/scan.py                           Llama-3.1-8B geometry, 98,304 Gaussian keys
    python benchmarks/scan.py --model smollm2-ruler-32k --tokens 32000 --tasks niah_multikey_3

Queries rotate, so that no cache holds what the next call reads. Times are medians of one run; on
real keys they are those of a step through all sampled layers. "draw": thresholds, the pass over all
codes, and asking for the rows drawn; "of roof": bytes of codes in that time, as a share of what
this machine streams; "GMAC/s": products of codes and queries.

With --wide heads of the model are put together in pairs, and these eight to a layer, with four
queries each: the sizes of Llama-3.1-8B's layers, with keys, values and scores of a real model.

With several tasks the far context is that of their prompts, one behind the other, each read by
itself, and the queries are the last one's: longer contexts than the model was made for.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from ending import run_script
from estimators import inputs
from machine import hardware
from rich.console import Console
from rich.progress import track
from torch import Tensor

import magicpig
from magicpig import LayerKV, LSHConfig, ScanConfig, _native, merge, native
from magicpig.analysis.capture import LayerInput, Reader
from magicpig.models import load

HEADS, KV_HEADS, DIM = 32, 8, 128
SINKS, LOCAL, POSITIONS, ROUNDS = 16, 64, 8, 3
TABLES = ((10, 150), (9, 120), (8, 75), (10, 300), (10, 600))
BUDGETS = (0.002, 0.003, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.04)
console = Console(stderr=True, highlight=False)
Index = LSHConfig | ScanConfig


def name_of(index: Index) -> str:
    if isinstance(index, LSHConfig):
        return f"lsh:{index.bits_per_table}:{index.num_tables}"
    return f"scan:{index.bits_per_dim}:{100 * index.budget:g}%"


def attended(kv: LayerKV, queries: Tensor, scale: float) -> tuple[float, float, float, Tensor]:
    """Seconds, thread-seconds of drawing and of rows, and rows read by each head."""
    out, lse = torch.empty(1, *queries.shape), torch.empty(1, len(queries))
    rows, visited = torch.empty(2, 1, len(queries), dtype=torch.int64)
    start = time.perf_counter()
    draw, drawn, whole, _ = _native.attend(
        [kv._native], queries[None], scale, 0.0, False, out, lse, rows, visited, lse.clone()
    )
    return time.perf_counter() - start, draw, drawn + whole, rows[0]


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"| {' | '.join(header)} |")
    print(f"|---|{'---:|' * (len(header) - 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def against_roofs(tokens: int, threads: Sequence[int]) -> None:
    """Gaussian keys: how fast codes are made and passed over."""
    generator = torch.Generator().manual_seed(0)
    shape = KV_HEADS, tokens, DIM
    keys, values = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))
    keys.normal_(generator=generator)
    values.normal_(generator=generator)
    sets = torch.randn(24, HEADS, DIM, generator=generator).bfloat16()
    alone = ScanConfig(2, budget=1e-5, min_rows=1)  # the pass, with hardly a row asked for
    indexes: list[Index] = [LSHConfig(), *(ScanConfig(bits) for bits in (1, 2, 4)), alone]
    rows = []
    for count in threads:
        magicpig.set_num_threads(count)
        stream, _ = native.memory_roofs()
        console.print(f"{count} threads: streamed read {stream / 1e9:.1f} GB/s")
        for index in track(indexes, f"{count} threads", console=console):
            kv = LayerKV(HEADS, KV_HEADS, DIM, index)
            kv.append(keys, values)
            copy, code, sort = kv._native.build_seconds
            measured = [attended(kv, queries, DIM**-0.5) for queries in (*sets, *sets)][len(sets) :]
            seconds, draw, drawn = (
                statistics.median(column) for column in list(zip(*measured, strict=True))[:3]
            )
            read = torch.stack([each[3] for each in measured]).float().mean().item() / tokens
            speed = ["", ""]
            if isinstance(index, ScanConfig):
                drawing = draw / count
                share = kv.nbytes.index / drawing / stream
                speed = [f"{share:.0%}", f"{HEADS * tokens * DIM / drawing / 1e9:.0f}"]
            times = (seconds, draw / count, drawn / count)
            rows.append(
                [name_of(index), str(count), f"{read:.2%}"]
                + [f"{1e3 * x:.2f}" for x in times]
                + speed
                + [f"{x:.2f}" for x in (copy, code + sort)]
                + [f"{1e6 * (code + sort) / tokens:.2f}", f"{kv.nbytes.index / kv.nbytes.rows:.3f}"]
            )
            del kv
    header = "index,threads,keys read,ms,draw ms,rows ms,codes of roof,GMAC/s,copy s,index s,"
    print_table([*header.split(",")[:-1], "index us/token", "index / rows"], rows)


class Layer:
    """Attention of one layer over a far context, beside the exact one."""

    def __init__(self, given: LayerInput) -> None:
        self.given = given
        end = given.keys.shape[1] - LOCAL - len(given.queries)
        self.far = slice(SINKS, end)
        near = self._kv(None)
        for part in (slice(0, SINKS), slice(end, end + LOCAL)):
            near.append(given.keys[:, part], given.values[:, part])
        whole = self.indexed(None)
        self.near = [near.attend(q, scale=given.scale) for q in given.queries]
        self.exact = [
            merge(*n, *whole.attend(q, scale=given.scale))[0]
            for n, q in zip(self.near, given.queries, strict=True)
        ]

    def _kv(self, index: Index | None) -> LayerKV:
        keys, heads = self.given.keys, self.given.queries.shape[1]
        return LayerKV(heads, keys.shape[0], keys.shape[2], index, keys.dtype)

    def indexed(self, index: Index | None) -> LayerKV:
        kv = self._kv(index)
        kv.append(self.given.keys[:, self.far], self.given.values[:, self.far])
        return kv

    def error(self, kv: LayerKV, position: int) -> Tensor:
        """Of each head."""
        queries, exact = self.given.queries[position], self.exact[position]
        out, _ = merge(*self.near[position], *kv.attend(queries, scale=self.given.scale))
        return (out - exact).norm(dim=-1) / exact.norm(dim=-1)


def read(
    model: str, tasks: Sequence[str], tokens: int, dense: Sequence[int], every: int
) -> list[LayerInput]:
    """Every so many of the layers that are not dense."""
    loaded = load(model)
    reader = Reader(loaded)
    far: list[LayerInput] = []
    for task in tasks or [None]:
        [token_ids] = inputs(loaded, task, tokens, 1)
        with console.status(f"reading {len(token_ids):,} tokens"):
            given = reader.read(token_ids, POSITIONS, lambda done: None)
        given = [one for one in given if one.layer not in dense][::every]
        for i, before in enumerate(far):
            keys = torch.cat([before.keys, given[i].keys], 1)
            given[i] = replace(
                given[i], keys=keys, values=torch.cat([before.values, given[i].values], 1)
            )
        far = given
    return far


def widened(given: list[LayerInput]) -> list[LayerInput]:
    """Layers of KV_HEADS heads, each of two heads side by side, whose scores are added up and
    divided by the root of two, so that they vary as much as theirs do."""
    group = HEADS // KV_HEADS
    heads = []
    for one in given:
        queries = one.queries.unflatten(1, (len(one.keys), -1))  # [positions, KV heads, group, dim]
        more = torch.cat([queries, queries.roll(1, 0)], 2)[:, :, :group]
        heads += [(more[:, i], one.keys[i], one.values[i], one.scale) for i in range(len(one.keys))]
    pairs = [
        (torch.cat([a[0], b[0]], -1), torch.cat([a[1], b[1]], -1), torch.cat([a[2], b[2]], -1))
        for a, b in zip(heads[::2], heads[1::2], strict=False)
    ]
    layers = []
    for i in range(0, len(pairs) - KV_HEADS + 1, KV_HEADS):
        queries, keys, values = zip(*pairs[i : i + KV_HEADS], strict=True)
        together = torch.stack(queries, 1).flatten(1, 2)
        layers.append(
            replace(
                given[0],
                layer=i // KV_HEADS,
                queries=together,
                keys=torch.stack(keys),
                values=torch.stack(values),
                scale=heads[0][3] * 0.5**0.5,
            )
        )
    return layers


def on_real_keys(
    model: str, tasks: Sequence[str], tokens: int, dense: Sequence[int], every: int, wide: bool
) -> None:
    given = read(model, tasks, tokens, dense, every)
    layers = [Layer(one) for one in (widened(given) if wide else given)]
    del given
    indexes: list[Index] = [LSHConfig(bits, tables, exact_below=0) for bits, tables in TABLES]
    indexes += [ScanConfig(bits, budget, 1) for bits in (2, 4) for budget in BUDGETS]
    rows, fastest = [], []
    for index in track(indexes, "indexes", console=console):
        kvs = [layer.indexed(index) for layer in layers]
        errors = torch.stack(
            [
                layer.error(kv, i)
                for i in range(POSITIONS)
                for layer, kv in zip(layers, kvs, strict=True)
            ]
        )
        steps, shares = [], []
        for i in [*range(POSITIONS)] * ROUNDS:
            seconds = 0.0
            for layer, kv in zip(layers, kvs, strict=True):
                once = attended(kv, layer.given.queries[i], layer.given.scale)
                seconds += once[0]
                shares.append(once[3].float().mean() / kv.num_tokens)
            steps.append(seconds)
        size = sum(kv.nbytes.index for kv in kvs) / sum(kv.nbytes.rows for kv in kvs)
        fastest.append((name_of(index), errors.mean().item(), statistics.median(steps)))
        rows.append(
            [name_of(index), f"{torch.stack(shares).mean():.2%}"]
            + [f"{x:.4f}" for x in (errors.mean(), errors.median(), errors.quantile(0.9))]
            + [f"{1e3 * statistics.median(steps):.2f}", f"{size:.3f}"]
        )
        del kvs
    where, there = ", ".join(tasks) or "text", layers[0].given.keys.shape[1]
    heads, dim = layers[0].given.queries.shape[1:]
    kind = f"{heads}/{len(layers[0].given.keys)} heads of dim {dim}"
    print(f"{model}, {there:,} tokens ({where}), {len(layers)} layers, {kind}, ", end="")
    print(f"{POSITIONS} positions, {magicpig.num_threads()} threads\n")
    header = ["index", "keys read", "mean error", "median", "p90", "ms per step", "index / rows"]
    print_table(header, rows)
    print()
    for name, error, seconds in fastest[: len(TABLES)]:
        others = [other for other in fastest[len(TABLES) :] if other[1] <= error]
        if others:
            best = min(others, key=lambda other: other[2])
            print(f"{name}: {best[0]} errs no more and takes 1/{seconds / best[2]:.2f} of the time")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    best = magicpig.num_threads()
    parser.add_argument("--model", help="measure on its keys, instead of Gaussian ones")
    parser.add_argument("--tasks", nargs="*", default=[], help="prompts of RULER, instead of text")
    parser.add_argument("--tokens", type=int, default=98_304)
    parser.add_argument("--dense", type=int, nargs="*", default=[0, 15], help="layers left out")
    parser.add_argument("--wide", action="store_true", help="the sizes of Llama-3.1-8B's layers")
    parser.add_argument("--every", type=int, default=1, help="take each such layer")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, best}))
    args = parser.parse_args()
    print(f"{hardware()}, {magicpig.isa()}, {datetime.date.today()}\n")
    if args.model:
        on_real_keys(args.model, args.tasks, args.tokens, args.dense, args.every, args.wide)
    else:
        against_roofs(args.tokens, args.threads)


if __name__ == "__main__":
    run_script(main)
