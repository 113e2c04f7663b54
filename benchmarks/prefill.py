"""How long a prompt takes on a GPU, until its first token and until its index is there.

    python benchmarks/prefill.py --json prefill.json
    python benchmarks/prefill.py --device cpu --model smollm2 --prompts 2k

Weights are random, made on the device. Systems take turns. "plain": the prompt's keys and values
stay on the device and nothing is indexed; the first system. "over plain": the best of the rounds
against its best. "fresh": once more, when all pinned memory was given back, as a process's first
prompt finds it; and over plain. "peak": GPU memory beyond the weights.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from dataclasses import asdict, dataclass

import torch
from arguments import a_method, argument, new_file, of_a_model, positive
from ending import run_script
from machine import hardware
from rich.console import Console
from rich.progress import track
from throughput import Bench

from magicpig import trace
from magicpig.cli.inputs import length_list
from magicpig.kv.places import give_back_pinned

SYSTEMS = ("full", "scan:2:1%", "lsh:10:150", "cpu-dense")
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Point:
    system: str
    prompt: int
    read_seconds: float  # until the last part is read
    seconds: float  # until the sequence can go on
    over_plain: float
    fresh_seconds: float  # as `seconds`, without pinned memory from before
    fresh_over_plain: float
    peak_bytes: int | None


def once(bench: Bench, system: str, tokens: int) -> tuple[float, float, int | None]:
    """Seconds until all is read and until all is done, and the peak of memory."""
    runner = bench.runner(system)
    cuda = bench.device.type == "cuda"
    vocabulary = bench.model.config.get_text_config(decoder=True).vocab_size
    prompt = torch.randint(vocabulary, (tokens,)).tolist()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    start = time.perf_counter()
    with runner.threads():
        prefill = runner.begin(prompt)
        while prefill.done < tokens:
            logits = runner.prefill(prefill)
        int(logits.argmax())  # waits for the device
        read = time.perf_counter() - start
        sequence = runner.finish(prefill)
    if cuda:
        torch.cuda.synchronize()
    done = time.perf_counter() - start
    assert sequence.num_tokens == tokens
    peak = torch.cuda.max_memory_allocated() - held if cuda else None
    return read, done, peak


def make_way(device: torch.device, fresh: bool) -> None:
    """Lets go of memory that nothing uses. fresh: also of what is kept for other prompts."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        if fresh:
            give_back_pinned()


def table(points: list[Point]) -> str:
    lines = [
        "| system | prompt | read s | done s | over plain | fresh s | over plain | tokens/s "
        "| peak GB |",
        f"|---|{'---:|' * 8}",
    ]
    for p in points:
        peak = "" if p.peak_bytes is None else f"{p.peak_bytes / 1e9:.2f}"
        lines.append(
            f"| {p.system} | {p.prompt:,} | {p.read_seconds:.2f} | {p.seconds:.2f} | "
            f"{p.over_plain:+.1%} | {p.fresh_seconds:.2f} | {p.fresh_over_plain:+.1%} | "
            f"{p.prompt / p.seconds:,.0f} | {peak} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = of_a_model(__doc__)
    parser.add_argument("--prompts", type=argument(length_list), default="32k,96k")
    parser.add_argument("--systems", type=argument(a_method), nargs="+", default=list(SYSTEMS))
    parser.add_argument("--rounds", type=argument(positive), default=2)
    parser.add_argument("--json", type=argument(new_file))
    parser.add_argument(
        "--trace",
        type=argument(new_file),
        help="of one more prompt, the last one of the last system",
    )
    args = parser.parse_args()
    print(f"{hardware(args.device)}; {args.model}\n")
    bench = Bench(args.model, args.device)
    points = []
    for tokens in args.prompts:
        once(bench, args.systems[-1], tokens)  # warms up; host memory is pinned, and kept
        found: dict[str, list[tuple[float, float, int | None]]] = {s: [] for s in args.systems}
        turns = [system for _ in range(args.rounds + 1) for system in args.systems]
        for i, system in enumerate(track(turns, f"{tokens:,} tokens", console=console)):
            make_way(bench.device, fresh=i >= args.rounds * len(args.systems))
            found[system].append(once(bench, system, tokens))
        plain = min(done for _, done, _ in found[args.systems[0]][: args.rounds])
        for system, (*rounds, fresh) in found.items():
            read, done = (statistics.median(r[i] for r in rounds) for i in (0, 1))
            best = min(r[1] for r in rounds)
            over, fresh_over = (seconds / plain - 1 for seconds in (best, fresh[1]))
            peak = rounds[-1][2]
            points.append(Point(system, tokens, read, done, over, fresh[1], fresh_over, peak))
        if args.json:
            args.json.write_text(json.dumps([asdict(p) for p in points], indent=1))
    if args.trace:
        with trace.recording(args.trace):
            once(bench, args.systems[-1], args.prompts[-1])
    print(table(points))


if __name__ == "__main__":
    run_script(main)
