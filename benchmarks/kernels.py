"""The native core against the machine's roofs: dense and sampled attend, append, growth.

Llama-3.1-8B geometry (32/8 heads, head_dim 128, bfloat16), Gaussian keys and queries. Queries
rotate over 16 sets, so that no cache holds what the next call reads. Times are medians; ratios come
from one run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from ending import run_script
from machine import hardware
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import magicpig
from magicpig import LayerKV, LSHConfig, _native, native

HEADS, KV_HEADS, DIM = 32, 8, 128
ROW_BYTES = 2 * DIM * 2  # key and value of a token in bfloat16
QUERY_SETS = 16


@dataclass
class Roofs:
    """Bytes per second this machine reads, with `threads` threads."""

    threads: int
    stream: float
    gather: float


@dataclass
class Attend:
    """One attend. Bytes count rows only: what is read of the index is overhead."""

    isa: str
    threads: int
    batch: int
    tokens: int
    kind: str  # dense, sampled or torch SDPA
    seconds: float
    draw_seconds: float  # of one thread: thread-seconds / threads
    rows_seconds: float
    bytes_read: float
    share: float  # of keys read
    roof: float

    @property
    def rate(self) -> float:
        return self.bytes_read / self.seconds


@dataclass
class Append:
    isa: str
    threads: int
    tokens: int
    seconds: float
    rows_seconds: float
    hash_seconds: float
    tables_seconds: float
    index_bytes_per_token: float  # all KV heads
    index_share: float  # of the rows' bytes


def measure_roofs(threads: int) -> Roofs:
    magicpig.set_num_threads(threads)
    return Roofs(threads, *native.memory_roofs())


def make_kv(tokens: int, lsh: LSHConfig, seed: int) -> LayerKV:
    generator = torch.Generator().manual_seed(seed)
    kv = LayerKV(HEADS, KV_HEADS, DIM, index=lsh)
    shape = (KV_HEADS, tokens, DIM)
    keys, values = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))
    for tensor in (keys, values):
        tensor.normal_(generator=generator)
    kv.append(keys, values)
    return kv


def time_attend(kvs: list[LayerKV], exact: bool, seconds: float, roofs: Roofs) -> Attend:
    generator = torch.Generator().manual_seed(99)
    batch, tokens = len(kvs), kvs[0].num_tokens
    sets = torch.randn(QUERY_SETS, batch, HEADS, DIM, generator=generator).bfloat16()
    out, lse = torch.empty(batch, HEADS, DIM), torch.empty(batch, HEADS)
    rows = torch.empty(batch, HEADS, dtype=torch.int64)
    visited, predicted = torch.empty_like(rows), torch.empty(batch, HEADS)
    natives = [kv._native for kv in kvs]

    def once(queries: torch.Tensor) -> tuple[float, float, float, int]:
        start = time.perf_counter()
        draw, drawn, whole, _ = _native.attend(
            natives, queries, DIM**-0.5, 0.0, exact, out, lse, rows, visited, predicted
        )
        return time.perf_counter() - start, draw, drawn + whole, int(rows.sum())

    for queries in sets:  # warms up
        once(queries)
    samples: list[tuple[float, float, float, int]] = []
    begin = time.perf_counter()
    while len(samples) < QUERY_SETS or time.perf_counter() - begin < seconds:
        samples += [once(queries) for queries in sets]
    total, draw, attend, read = (statistics.median(column) for column in zip(*samples, strict=True))
    # All heads of a group are served by one reading of a row when nothing is sampled.
    row_reads = read / (HEADS // KV_HEADS) if exact else read
    return Attend(
        magicpig.isa(),
        roofs.threads,
        batch,
        tokens,
        "dense" if exact else "sampled",
        total,
        draw / roofs.threads,
        attend / roofs.threads,
        row_reads * ROW_BYTES,
        read / (batch * HEADS * tokens),
        roofs.stream if exact else roofs.gather,
    )


def time_torch(tokens: int, roofs: Roofs) -> Attend:
    """torch's own attention over the same shapes: the dense baseline most people have."""
    before = torch.get_num_threads()
    torch.set_num_threads(roofs.threads)
    keys = torch.randn(1, KV_HEADS, tokens, DIM).bfloat16()
    values = torch.randn(1, KV_HEADS, tokens, DIM).bfloat16()
    seconds = []
    for _ in range(3):
        queries = torch.randn(1, HEADS, 1, DIM).bfloat16()
        start = time.perf_counter()
        torch.nn.functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
        seconds.append(time.perf_counter() - start)
    torch.set_num_threads(before)
    size = KV_HEADS * tokens * ROW_BYTES
    median = statistics.median(seconds)
    return Attend(
        "-", roofs.threads, 1, tokens, "torch SDPA", median, 0, median, size, 1.0, roofs.stream
    )


def time_append(tokens: int, lsh: LSHConfig, threads: int) -> Append:
    magicpig.set_num_threads(threads)
    keys, values = (torch.randn(KV_HEADS, tokens, DIM).bfloat16() for _ in range(2))
    kv = LayerKV(HEADS, KV_HEADS, DIM, index=lsh)
    start = time.perf_counter()
    kv.append(keys, values)
    seconds = time.perf_counter() - start
    rows, hashing, sorting = kv._native.build_seconds
    return Append(
        magicpig.isa(),
        threads,
        tokens,
        seconds,
        rows,
        hashing,
        sorting,
        kv.nbytes.index / tokens,
        kv.nbytes.index / kv.nbytes.rows,
    )


def attend_table(title: str, results: list[Attend]) -> Table:
    table = Table(title=title)
    for name in ("ISA", "threads", "batch", "tokens", "attend", "ms", "draw ms", "rows ms"):
        table.add_column(name, justify="left" if name in ("ISA", "attend") else "right")
    for name in ("GB/s", "of roof", "keys", "over dense", "over SDPA"):
        table.add_column(name, justify="right")

    def baseline(kind: str, r: Attend) -> str:
        """How much quicker r is than `kind` with the same threads and shape."""
        same = [
            b.seconds
            for b in results
            if (b.kind, b.threads, b.batch, b.tokens) == (kind, r.threads, r.batch, r.tokens)
            and b.isa in (r.isa, "-")
        ]
        return f"{same[0] / r.seconds:.1f}x" if same else ""

    for r in results:
        sampled = r.kind == "sampled"
        table.add_row(
            r.isa,
            str(r.threads),
            str(r.batch),
            f"{r.tokens:,}",
            r.kind,
            f"{r.seconds * 1e3:.2f}",
            f"{r.draw_seconds * 1e3:.2f}" if sampled else "",
            f"{r.rows_seconds * 1e3:.2f}",
            f"{r.rate / 1e9:.1f}",
            f"{100 * r.rate / r.roof:.0f} %",
            f"{100 * r.share:.2f} %",
            baseline("dense", r) if sampled else "",
            baseline("torch SDPA", r),
        )
    return table


def append_table(results: list[Append]) -> Table:
    table = Table(title="append")
    for name in ("ISA", "threads", "tokens", "s", "rows s", "hash s", "tables s", "us/token"):
        table.add_column(name, justify="left" if name == "ISA" else "right")
    table.add_column("index B/token", justify="right")
    table.add_column("index / rows", justify="right")
    for r in results:
        table.add_row(
            r.isa,
            str(r.threads),
            f"{r.tokens:,}",
            *(f"{x:.2f}" for x in (r.seconds, r.rows_seconds, r.hash_seconds, r.tables_seconds)),
            f"{r.seconds / r.tokens * 1e6:.1f}",
            f"{r.index_bytes_per_token:,.0f}",
            f"{r.index_share:.3f}",
        )
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    best = magicpig.num_threads()
    parser.add_argument("--tokens", type=int, default=98_304, help="context of the main table")
    parser.add_argument("--bits", type=int, default=10, help="bits per table")
    parser.add_argument("--tables", type=int, default=150, help="hash tables")
    parser.add_argument(
        "--exact-below",
        type=int,
        help="segments shorter than this have no index (default: 2**bits)",
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", default=sorted({1, best}), help="thread counts"
    )
    parser.add_argument(
        "--isas", nargs="+", default=magicpig.supported_isas(), help="instruction sets"
    )
    parser.add_argument(
        "--growth",
        type=int,
        nargs="*",
        default=[8_192, 16_384, 32_768, 65_536, 131_072, 262_144],
        help="contexts of the growth table, each at batch 1 and 8; none to leave it out",
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="time per measurement")
    parser.add_argument("--no-torch", action="store_true", help="leave torch SDPA out")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    lsh = LSHConfig(args.bits, args.tables, exact_below=args.exact_below)
    best_isa = magicpig.supported_isas()[-1]
    main_results: list[Attend] = []
    growth: list[Attend] = []
    appends: list[Append] = []
    skipped: list[str] = []
    console = Console(width=None if sys.stdout.isatty() else 140)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    steps = len(args.threads) * (2 + 3 * len(args.isas)) + 2 * len(args.growth)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("roofs", total=steps)

        def step(name: str) -> None:
            progress.update(task, description=name, advance=1)

        roofs = {}
        for threads in args.threads:
            step(f"roofs, {threads} threads")
            roofs[threads] = measure_roofs(threads)
        kv = make_kv(args.tokens, lsh, 0)
        for threads in args.threads:
            step(f"torch SDPA, {threads} threads")
            if not args.no_torch:
                main_results.append(time_torch(args.tokens, roofs[threads]))
            for isa in args.isas:
                magicpig.set_isa(isa)
                magicpig.set_num_threads(threads)
                for exact in (True, False):
                    step(f"{isa}, {threads} threads, {'dense' if exact else 'sampled'}")
                    main_results.append(time_attend([kv], exact, args.seconds, roofs[threads]))
                step(f"{isa}, {threads} threads, append")
                # The plain instruction sets take minutes for the whole context; a part of it tells.
                tokens = args.tokens if isa.startswith("avx512") else args.tokens // 16
                appends.append(time_append(tokens, lsh, threads))
        del kv
        magicpig.set_isa(best_isa)
        threads = args.threads[-1]
        magicpig.set_num_threads(threads)
        for tokens in args.growth:
            for batch in (1, 8):
                step(f"{batch} x {tokens:,} tokens")
                try:
                    kvs = [make_kv(tokens, lsh, seed) for seed in range(batch)]
                except MemoryError:
                    skipped.append(f"{batch} x {tokens:,} tokens: not enough memory")
                    continue
                for exact in (True, False):
                    growth.append(time_attend(kvs, exact, args.seconds / 2, roofs[threads]))
                kvs.clear()

    when = datetime.date.today().isoformat()
    console.print(f"{hardware()}; {when}; torch {torch.__version__}; index {lsh}")
    for r in roofs.values():
        console.print(
            f"roofs, {r.threads} threads: streamed read {r.stream / 1e9:.1f} GB/s, "
            f"gather of {ROW_BYTES}-byte rows {r.gather / 1e9:.1f} GB/s"
        )
    title = "attend; draw and rows: where a thread's time goes (rows are fetched while drawing)"
    console.print(attend_table(title, main_results))
    console.print(append_table(appends))
    if growth:
        console.print(attend_table("growth", growth))
    for line in skipped:
        console.print(f"skipped: {line}")
    if args.json:
        results = {
            "hardware": hardware(),
            "date": when,
            "index": asdict(lsh),
            "roofs": [asdict(r) for r in roofs.values()],
            "attend": [asdict(r) for r in main_results],
            "append": [asdict(r) for r in appends],
            "growth": [asdict(r) for r in growth],
            "skipped": skipped,
        }
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main)
