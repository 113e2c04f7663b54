"""How far `magicpig plan` is off what throughput.py measured.

    python benchmarks/plan_error.py docs/throughput-h200.json --gpu H200 --cpu Xeon-16-cores

`lsh` is planned with the share of keys that it read. Then, for each context and budget: the way
that a plan would take, beside the best one that was measured. Last, the cost model beside what is
published of MagicPIG's own program, planned with what its kernels take.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from dataclasses import asdict
from pathlib import Path

from ending import run_script
from throughput_report import BUDGETS, Point, best, read

from magicpig.engine.memory import parse_bytes
from magicpig.planning.costs import Load, Lsh, Machine, System, more_than_default, systems
from magicpig.planning.geometry import ModelGeometry, geometry_of
from magicpig.planning.machines import CPUS, GPUS, named
from magicpig.planning.plan import best_of, choices

NAMES = {"full": "gpu-only"}
# Llama-3.1-8B, 96k, L20 and two Xeon 8563C: arXiv 2410.16179, 2 % of the keys. Its program is
# started on 64 cores (its README); on a core of a Zen 4 its kernels take so long (docs/log.md). How
# many sequences its best figure is of is not said.
CONTEXT, SHARE, CORES = 98304, 0.02, 64
THEIRS = {"entry_seconds": 12.2e-9, "row_seconds": 390e-9}
BATCHES = 8, 16


def planned(model: ModelGeometry, machine: Machine, point: dict[str, object]) -> float:
    """Milliseconds of the step."""
    name, load = str(point["system"]), Load(int(str(point["context"])))
    if name.startswith("lsh"):
        read, tables = float(str(point["keys_read"])), map(int, name.split(":")[1:])
        load = dataclasses.replace(load, lsh_share=read / more_than_default(*tables))
    if name.startswith("scan"):
        budget = name.split(":")[2].removesuffix("%")
        load = dataclasses.replace(load, scan_share=float(budget) / 100)
    known: dict[str, System] = {system.name: system for system in systems(model, machine, load)}
    name = NAMES.get(name, name)
    return 1e3 * known[name].step(int(str(point["batch"]))).seconds


def best_ways(model: ModelGeometry, machine: Machine, points: list[Point]) -> str:
    """For each context and budget: the best way that was measured, and the one of a plan."""
    gpu, measured = machine.gpu, {NAMES.get(p.system, p.system): p.system for p in points}
    assert gpu
    lines, right = [], 0
    for context, budget in itertools.product(dict.fromkeys(p.context for p in points), BUDGETS):
        memory = gpu.memory if budget == "none" else parse_bytes("a budget", budget)
        there = dataclasses.replace(machine, gpu=dataclasses.replace(gpu, memory=memory))
        read = [p.keys_read for p in points if (p.system, p.context) == ("lsh:10:150", context)]
        load = Load(context, lsh_share=next(filter(None, read), Load.lsh_share))
        plans = {c.system: c for c in choices(model, there, load) if c.system in measured}
        found = {name: best(points, context, budget, measured[name]) for name in plans}
        rates = {name: p.tokens_per_second or 0.0 for name, p in found.items() if p}
        planned = best_of(list(plans.values()))
        if not rates or planned is None:
            continue
        name = max(rates, key=lambda name: rates[name])
        right += planned.system == name
        lead = planned.tokens_per_second / plans[name].tokens_per_second - 1
        lines.append(
            f"| {context:,} | {budget} | {name}, {rates[name]:.0f} | {planned.system} "
            f"({planned.batch}), {planned.tokens_per_second:.0f} | {lead:+.0%} |"
        )
    head = ["| context | GPU memory | best measured | best of plan | over the former |"]
    rule = ["|---:|---|---|---|---:|"]
    return "\n".join([*head, *rule, *lines, "", f"{right} of {len(lines)} best ways are named"])


class Theirs(Lsh):
    """MagicPIG's program: GPU and CPU by turns."""

    def _seconds(self, batch: int) -> tuple[float, str]:
        return self.by_turns(batch)


def published() -> str:
    """Tokens per second, published and planned."""
    cpu = named("Xeon-8563C", CPUS, "--cpu")
    both = dataclasses.replace(
        cpu, cores=CORES, stream=2 * cpu.stream, gather=2 * cpu.gather, **THEIRS
    )
    machine, model = Machine(named("L20", GPUS, "--gpu"), both), geometry_of("llama-3.1-8b")
    load = Load(CONTEXT, lsh_share=SHARE)
    dense, theirs = System(model, machine, load), Theirs(model, machine, load, (10, 150))
    most = dense.largest_batch()

    def rate(system: System, batch: int) -> float:
        return batch / system.step(batch).seconds

    lines = [
        (f"GPU-only, {most} sequences, as many as fit", 30.5, rate(dense, most)),
        ("MagicPIG (10, 150), one sequence", 18.3, rate(theirs, 1)),
        *((f"its best; planned with {n}", 53.8, rate(theirs, n)) for n in BATCHES),
    ]
    head = ["| tokens/s | published | plan | error |", "|---|---:|---:|---:|"]
    rows = [f"| {n} | {known} | {plan:.1f} | {plan / known - 1:+.0%} |" for n, known, plan in lines]
    return "\n".join([*head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path, nargs="+", help="JSON that throughput.py wrote")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--cpu", default="Xeon-16-cores")
    parser.add_argument("--cpu-memory", default="115GB")
    args = parser.parse_args()
    measured_points = [point for path in args.measured for point in read(path)]
    points = [asdict(point) for point in measured_points]
    try:
        machine = Machine(named(args.gpu, GPUS, "--gpu"), named(args.cpu, CPUS, "--cpu"))
        memory = parse_bytes("--cpu-memory", args.cpu_memory)
        machine = dataclasses.replace(machine, cpu=dataclasses.replace(machine.cpu, memory=memory))
        model = geometry_of(args.model)
    except ValueError as error:
        parser.error(str(error))
    print("| system | context | batch | measured ms | plan ms | error |")
    print("|---|---:|---:|---:|---:|---:|")
    errors: dict[str, list[float]] = {}
    for point in points:
        if not point["ms_per_step"]:
            continue
        plan, measured = planned(model, machine, point), point["ms_per_step"]
        error = plan / measured - 1
        errors.setdefault(point["system"], []).append(error)
        print(
            f"| {point['system']} | {point['context']:,} | {point['batch']} | "
            f"{measured:.1f} | {plan:.1f} | {error:+.0%} |"
        )
    print()
    for system, own in errors.items():
        size = sum(map(abs, own)) / len(own)
        print(f"{system}: mean {sum(own) / len(own):+.0%}, mean size {size:.0%}, {len(own)} points")
    print()
    print(best_ways(model, machine, measured_points))
    print()
    print(published())


if __name__ == "__main__":
    run_script(main)
