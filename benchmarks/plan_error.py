"""How far `magicpig plan` is off what throughput.py measured.

    python benchmarks/plan_error.py docs/throughput-h200.json --gpu H200 --cpu Xeon-16-cores

`lsh` is planned with the share of keys that it read.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import asdict
from pathlib import Path

from throughput_report import read

from magicpig.planning.costs import Load, Machine, System, systems
from magicpig.planning.geometry import ModelGeometry, geometry_of
from magicpig.planning.machines import CPUS, GPUS, named

NAMES = {"full": "gpu-only"}


def planned(model: ModelGeometry, machine: Machine, point: dict[str, object]) -> float:
    """Milliseconds of the step."""
    name, load = str(point["system"]), Load(int(str(point["context"])))
    if name.startswith("lsh"):
        load = dataclasses.replace(load, lsh_share=float(str(point["keys_read"])))
    if name.startswith("scan"):
        budget = name.split(":")[2].removesuffix("%")
        load = dataclasses.replace(load, scan_share=float(budget) / 100)
    known: dict[str, System] = {system.name: system for system in systems(model, machine, load)}
    name = NAMES.get(name, name)
    return 1e3 * known[name].step(int(str(point["batch"]))).seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path, nargs="+", help="JSON that throughput.py wrote")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--cpu", default="Xeon-16-cores")
    args = parser.parse_args()
    points = [asdict(point) for path in args.measured for point in read(path)]
    try:
        machine = Machine(named(args.gpu, GPUS, "--gpu"), named(args.cpu, CPUS, "--cpu"))
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


if __name__ == "__main__":
    main()
