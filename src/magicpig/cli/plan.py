"""`magicpig plan`: which way of attending suits a model, a context and a machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicpig.cli.inputs import one_length
from magicpig.cli.spinner import spinner

if TYPE_CHECKING:
    from magicpig.planning.costs import Machine

WORDS = """
batch: the smallest that has nearly the most tokens/s, "of" those that fit; GPU, CPU: memory that it
takes; systems are methods by their names"""


def quantity(flag: str, text: str | None, example: str = "24GiB") -> float | None:
    """Bytes, or bytes/s where the example is such: 24GiB, 48GB, 300GB/s."""
    from magicpig.engine.memory import parse_bytes

    if text is None:
        return None
    number = text.strip().removesuffix("/s" if example.endswith("/s") else "")
    try:
        return parse_bytes(flag, number)
    except ValueError:
        message = f"{flag} must be a number and a unit, like {example}, not {text!r}"
        raise ValueError(message) from None


def plan(
    model: Annotated[
        str, typer.Option(help="Built-in name, folder, hub name, or llama-3.1-8b and such.")
    ] = "llama-3.1-8b",
    context: Annotated[str, typer.Option(help="Tokens of each sequence.")] = "96k",
    gpu: Annotated[
        str | None,
        typer.Option(help="One of --list, none, or any name with memory and bandwidth. (L20)"),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="That may be used, like 24GiB. (all of it)")
    ] = None,
    gpu_bandwidth: Annotated[
        str | None, typer.Option(help="Of its memory, like 864GB/s. (the GPU's)")
    ] = None,
    cpu: Annotated[str | None, typer.Option(help="One of --list. (Xeon-8563C)")] = None,
    cpu_bandwidth: Annotated[
        str | None, typer.Option(help="Of streamed reads, like 300GB/s. (the CPU's)")
    ] = None,
    cpu_memory: Annotated[str | None, typer.Option(help="Like 256GiB. (enough)")] = None,
    cores: Annotated[int | None, typer.Option(help="CPU cores. (all)", min=1)] = None,
    batch: Annotated[int, typer.Option(help="Largest batch of interest.", min=1, max=4096)] = 256,
    lsh_share: Annotated[
        float, typer.Option(help="Of the keys, read by lsh:10:150; the paper says 0.02.")
    ] = 0.035,
    scan_share: Annotated[float, typer.Option(help="Of the keys, read by scan.")] = 0.01,
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help="Measure this machine first, and plan for it: its CPU, and its GPU or --gpu.",
        ),
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="Show known machines.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Tell which way of attending is fastest, with what batch and memory, before it is tried.

    magicpig plan --model llama-3.1-8b --context 96k --gpu L20 --cpu-bandwidth 300GB/s

    Figures come from a cost model (docs/performance.md): bytes and operations of a step over what
    the machine gives of both. They are estimates.
    """
    if listed:
        return show_machines(as_json)
    for flag, share in (("--lsh-share", lsh_share), ("--scan-share", scan_share)):
        if not 0 < share <= 1:
            raise ValueError(f"{flag} must be above 0 and at most 1, not {share}")
    tokens = one_length("--context", context)
    assert tokens is not None
    with spinner("measuring this machine" if here else "planning"):
        from magicpig.planning import plan as planning
        from magicpig.planning.costs import Load
        from magicpig.planning.geometry import geometry_of

        of_gpu = [
            quantity("--gpu-memory", gpu_memory),
            quantity("--gpu-bandwidth", gpu_bandwidth, "864GB/s"),
        ]
        of_cpu = [
            quantity("--cpu-bandwidth", cpu_bandwidth, "300GB/s"),
            quantity("--cpu-memory", cpu_memory, "256GiB"),
        ]
        geometry = geometry_of(model)
        machine = with_cpu_of(machine_for(gpu, of_gpu, cpu, here), cores, *of_cpu)
        load = Load(tokens, lsh_share, scan_share)
        report = planning.as_dict(geometry, machine, load, batch)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        show(report)


def machine_for(
    gpu: str | None, limits: Sequence[float | None], cpu: str | None, here: bool
) -> Machine:
    """By names, or this one; limits: memory and bandwidth of the GPU."""
    from magicpig.planning.costs import Machine
    from magicpig.planning.here import this_cpu, this_gpu
    from magicpig.planning.machines import CPUS, any_gpu, limited, named

    if here and cpu is not None:
        raise ValueError("--here measures this machine's CPU: leave --cpu out, or --here")
    without = gpu is not None and gpu.strip().lower() == "none"
    if without and any(limits):
        raise ValueError(
            "--gpu-memory limits a GPU, as --gpu-bandwidth does, and --gpu is none: leave one out"
        )
    named_gpu = "L20" if gpu is None else gpu
    known = None if without or (here and gpu is None) else any_gpu(named_gpu, *limits)
    if not here:
        return Machine(known, named("Xeon-8563C" if cpu is None else cpu, CPUS, "--cpu"))
    own = this_gpu() if gpu is None else None
    if gpu is None and own is None and any(limits):
        flag = "--gpu-memory" if limits[0] else "--gpu-bandwidth"
        raise ValueError(f"{flag} is of a GPU, and there is none here: name one by --gpu")
    if gpu is None and own is None:
        print("magicpig: there is no GPU here; --gpu plans for one all the same", file=sys.stderr)
    return Machine(limited(own, *limits) if own else known, this_cpu())


def with_cpu_of(
    machine: Machine, cores: int | None, bandwidth: float | None, memory: float | None
) -> Machine:
    """The same machine, but for what is given of its CPU."""
    from dataclasses import replace

    cpu = machine.cpu.with_cores(cores) if cores else machine.cpu
    if bandwidth:
        cpu = replace(cpu, stream=bandwidth, gather=cpu.gather / cpu.stream * bandwidth)
    return replace(machine, cpu=replace(cpu, memory=memory) if memory else cpu)


def show(report: dict[str, Any]) -> None:
    from rich.table import Table

    from magicpig.cli.output import Output

    model, gpu, cpu, load = (report[name] for name in ("model", "gpu", "cpu", "load"))
    memory = "" if cpu["memory"] is None else f", {size(cpu['memory'])}"
    print(
        f"{model['name']}: {model['parameters'] / 1e9:.1f}B parameters, {layers_of(model)}, "
        f"{model['heads']}/{model['kv_heads']} heads of {model['head_dim']}; "
        f"{load['context']:,} tokens of context"
    )
    if report["context_too_long"]:
        print(
            f"The model was made for {model['longest']:,} tokens: it will not make sense of more."
        )
    for note in model["notes"]:
        print(f"Note: {note}.")
    if gpu:
        print(f"{gpu['name']}: {size(gpu['memory'])}, {gpu['bandwidth'] / 1e9:,.0f} GB/s; ", end="")
    print(
        f"{cpu['name']}: {cpu['cores']} cores, {cpu['stream'] / 1e9:,.0f} GB/s streamed, "
        f"{cpu['gather'] / 1e9:,.0f} GB/s in rows{memory}\n"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("", "system"):
        table.add_column(name)
    for name in ("batch", "of", "ms/step", "tokens/s", "at batch 1", "GPU", "CPU"):
        table.add_column(name, justify="right")
    table.add_column("bound by")
    for row in report["systems"]:
        mark = "*" if row["system"] == report["best"] else ""
        memories = [size(row[f"{name}_memory_bytes"]) for name in ("gpu", "cpu")]
        if not row["batch"]:
            lacks = f"does not fit: {row['lacks']} memory"
            table.add_row(mark, row["system"], "-", "0", "", "", "", *memories, lacks)
            continue
        more = "+" if row["largest_batch"] == report["largest_looked_at"] else ""
        table.add_row(
            mark,
            row["system"],
            str(row["batch"]),
            f"{row['largest_batch']}{more}",
            f"{row['ms_per_step']:.1f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_second_alone']:.1f}",
            *memories,
            row["bound"],
        )
    Output(highlight=False, width=120).print(table)
    print(f"{WORDS}, gpu-only is --method full." if gpu else f"{WORDS}.")
    best, shorter = report["best"], report["longest_that_fits"]
    if best:
        print(f"* {best} gives the most tokens/s. Estimates: docs/performance.md says how far off.")
    elif shorter:
        print(f"Nothing fits. {shorter['context']:,} tokens would, with {shorter['system']}.")
    else:
        print("Nothing fits, not even 1,024 tokens: it takes more memory, or a smaller model.")


def layers_of(model: dict[str, Any]) -> str:
    sliding = len(model["spans"])
    return f"{model['layers']} layers" + (f" and {sliding} sliding ones" if sliding else "")


def show_machines(as_json: bool) -> None:
    from dataclasses import asdict

    from magicpig.planning.machines import CPUS, GPUS

    if as_json:
        return print(json.dumps({"gpus": [*map(asdict, GPUS)], "cpus": [*map(asdict, CPUS)]}))
    for gpu in GPUS:
        print(
            f"{gpu.name:<16}{size(gpu.memory):>9}  {gpu.bandwidth / 1e9:>5,.0f} GB/s  "
            f"{gpu.flops / 1e12:>4,.0f} TFLOP/s  link {gpu.link / 1e9:.0f} GB/s"
        )
    print()
    for cpu in CPUS:
        print(f"{cpu.name:<16}{cpu.cores:>3} cores  {cpu.stream / 1e9:>5,.0f} GB/s streamed")


def size(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.1f} GiB"
