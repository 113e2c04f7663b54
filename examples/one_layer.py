"""One layer of Llama-3.1-8B at 100,000 tokens: exact attention against sampled attention.

The context is synthetic: tokens belong to topics, keys and values lean towards their topic, and
every query looks for one topic. Keys share a large common mean, as real keys do.
"""

import time

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import magicpig
from magicpig import LayerKV, LSHConfig

TOKENS, HEADS, KV_HEADS, DIM, TOPICS = 100_000, 32, 8, 128, 256
CONFIGS = [LSHConfig(11, 300), LSHConfig(10, 150), LSHConfig(9, 120), LSHConfig(8, 75)]


def make_context() -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [KV_HEADS, TOKENS, DIM] in bfloat16."""
    keys = torch.empty(KV_HEADS, TOKENS, DIM, dtype=torch.bfloat16)
    values = torch.empty_like(keys)
    for head in range(KV_HEADS):
        topic = torch.randint(TOPICS, (TOKENS,))
        mean, key_topics, value_topics = topic_vectors(head)
        keys[head] = mean + 0.6 * key_topics[topic] + 0.8 * torch.randn(TOKENS, DIM)
        values[head] = value_topics[topic] + 0.5 * torch.randn(TOKENS, DIM)
    return keys, values


def topic_vectors(head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(head)
    shape = (TOPICS, DIM)
    mean = 2 * torch.randn(DIM, generator=generator)
    return mean, torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def make_queries() -> torch.Tensor:
    """[HEADS, DIM]; each points at a topic of its KV head, more or less sharply."""
    queries = []
    for head in range(HEADS):
        _, key_topics, _ = topic_vectors(head // (HEADS // KV_HEADS))
        sharpness = 0.3 + 1.2 * torch.rand(())
        topic = key_topics[torch.randint(TOPICS, ())]
        queries.append(sharpness * topic + 0.5 * torch.randn(DIM))
    return torch.stack(queries).bfloat16()


def measure(
    kv: LayerKV, query_sets: list[torch.Tensor], exact: bool
) -> tuple[float, torch.Tensor, float]:
    """Milliseconds per attend over rotating queries, the outputs, and the share of keys read."""
    outs, shares = [], []
    for queries in query_sets:  # also warms up
        outs.append(kv.attend(queries, exact=exact)[0])
        shares.append(kv.last_stats.share.mean())
    start = time.perf_counter()
    for queries in query_sets:
        kv.attend(queries, exact=exact)
    ms = (time.perf_counter() - start) / len(query_sets) * 1e3
    return ms, torch.stack(outs), torch.stack(shares).mean().item()


def main() -> None:
    console = Console()
    torch.manual_seed(0)
    table = Table(
        title=f"{TOKENS:,} tokens, {HEADS}/{KV_HEADS} heads, head_dim {DIM}, bfloat16 rows"
    )
    for column in ("attention", "keys read", "error", "time", "speed-up", "rows", "index"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("making a synthetic context")
        keys, values = make_context()
        query_sets = [make_queries() for _ in range(16)]
        exact_out = None
        for lsh in CONFIGS:
            name = f"sampled {lsh.bits_per_table}x{lsh.num_tables}"
            progress.update(task, description=f"indexing for {name}")
            kv = LayerKV(HEADS, KV_HEADS, DIM, index=lsh)
            kv.append(keys, values)
            rows, index = (f"{size / 2**20:.0f} MiB" for size in (kv.nbytes.rows, kv.nbytes.index))
            progress.update(task, description=f"attending: {name}")
            if exact_out is None:
                exact_ms, exact_out, _ = measure(kv, query_sets, exact=True)
                table.add_row("exact", "100 %", "0", f"{exact_ms:.1f} ms", "1.0x", rows, "-")
            ms, out, share = measure(kv, query_sets, exact=False)
            error = ((out - exact_out).norm(dim=-1) / exact_out.norm(dim=-1)).mean()
            table.add_row(
                name,
                f"{100 * share:.1f} %",
                f"{error:.3f}",
                f"{ms:.1f} ms",
                f"{exact_ms / ms:.1f}x",
                rows,
                index,
            )
    console.print(table)
    console.print(
        "sampled KxL: L hash tables of K bits. error: |sampled - exact| / |exact|,\n"
        f"mean over {HEADS} heads and {len(query_sets)} queries. The context is synthetic.\n"
        f"{magicpig.isa()}, {magicpig.num_threads()} threads."
    )


if __name__ == "__main__":
    main()
