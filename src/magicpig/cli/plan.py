"""`magicpig plan`: which way of attending suits a model, a context and a machine."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicpig.cli.inputs import one_length

if TYPE_CHECKING:
    from magicpig.planning.costs import Machine


def quantity(flag: str, text: str | None, example: str = "24GiB") -> float | None:
    """Bytes, or bytes/s where the example is such: 24GiB, 48GB, 300GB/s."""
    from magicpig.engine.memory import parse_bytes

    if text is None:
        return None
    number = text.strip().removesuffix("/s" if example.endswith("/s") else "")
    try:
        if not number[-1:].isalpha():
            raise ValueError
        return parse_bytes(flag, number)
    except ValueError:
        message = f"{flag} must be a number and a unit, like {example}, not {text!r}"
        raise ValueError(message) from None


def plan(
    model: Annotated[
        str, typer.Option(help="Built-in name, folder, hub name, or llama-3.1-8b and such.")
    ] = "llama-3.1-8b",
    context: Annotated[str, typer.Option(help="Tokens of each sequence.")] = "96k",
    gpu: Annotated[str, typer.Option(help="One of --list, or none.")] = "L20",
    gpu_memory: Annotated[
        str | None, typer.Option(help="That may be used, like 24GiB. (all of it)")
    ] = None,
    cpu: Annotated[str, typer.Option(help="One of --list.")] = "Xeon-8563C",
    cpu_bandwidth: Annotated[
        str | None, typer.Option(help="Of streamed reads, like 300GB/s. (the CPU's)")
    ] = None,
    cpu_memory: Annotated[str | None, typer.Option(help="Like 256GiB. (enough)")] = None,
    cores: Annotated[int | None, typer.Option(help="CPU cores. (all)", min=1)] = None,
    batch: Annotated[int, typer.Option(help="Largest batch of interest.", min=1, max=4096)] = 256,
    lsh_share: Annotated[
        float, typer.Option(help="Of the keys, read by lsh; the paper says 0.02.")
    ] = 0.035,
    scan_share: Annotated[float, typer.Option(help="Of the keys, read by scan.")] = 0.01,
    here: Annotated[
        bool, typer.Option("--here", help="Measure this machine first, and plan for it.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="Show known machines.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Tell which way of attending is fastest, with what batch and memory, before it is tried.

    magicpig plan --model llama-3.1-8b --context 96k --gpu L20 --cpu-bandwidth 300GB/s

    Figures come from a cost model (docs/performance.md): bytes and operations of a step over what
    the machine gives of both. They are estimates.
    """
    from dataclasses import replace

    from magicpig.planning import plan as planning
    from magicpig.planning.costs import Load, Machine
    from magicpig.planning.geometry import geometry_of
    from magicpig.planning.machines import CPUS, GPUS, named

    if listed:
        return show_machines()
    for flag, share in (("--lsh-share", lsh_share), ("--scan-share", scan_share)):
        if not 0 < share <= 1:
            raise ValueError(f"{flag} must be above 0 and at most 1, not {share}")
    tokens = one_length("--context", context)
    limits = [
        quantity("--gpu-memory", gpu_memory),
        quantity("--cpu-bandwidth", cpu_bandwidth, "300GB/s"),
        quantity("--cpu-memory", cpu_memory, "256GiB"),
    ]
    chosen_gpu = None if gpu.lower() == "none" else named(gpu, GPUS, "--gpu")
    if gpu_memory and not chosen_gpu:
        raise ValueError("--gpu-memory limits a GPU, and --gpu is none: leave one of them out")
    machine = Machine(chosen_gpu, named(cpu, CPUS, "--cpu"))
    geometry = geometry_of(model)
    if here:
        machine = measured(machine)
    chosen_gpu, chosen_cpu = machine.gpu, machine.cpu
    if limits[0] and chosen_gpu:
        if limits[0] > chosen_gpu.memory:
            raise ValueError(
                f"--gpu-memory {gpu_memory} is more than the {chosen_gpu.name} has, "
                f"{size(chosen_gpu.memory)}: take less, or another --gpu"
            )
        chosen_gpu = replace(chosen_gpu, memory=limits[0])
    if limits[1]:
        share = chosen_cpu.gather / chosen_cpu.stream
        chosen_cpu = replace(chosen_cpu, stream=limits[1], gather=share * limits[1])
    if limits[2]:
        chosen_cpu = replace(chosen_cpu, memory=limits[2])
    if cores:
        chosen_cpu = replace(chosen_cpu, cores=cores)
    machine = Machine(chosen_gpu, chosen_cpu)
    assert tokens is not None
    load = Load(tokens, lsh_share, scan_share)
    report = planning.as_dict(geometry, machine, load, batch)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        show(report)


def measured(machine: Machine) -> Machine:
    """This machine; its GPU, if it has one."""
    from rich.console import Console

    from magicpig.planning.costs import Machine
    from magicpig.planning.here import this_cpu, this_gpu

    console = Console(stderr=True)
    with console.status("measuring this machine") if console.is_terminal else nullcontext():
        return Machine(machine.gpu and (this_gpu() or machine.gpu), this_cpu())


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    model, gpu, cpu, load = (report[name] for name in ("model", "gpu", "cpu", "load"))
    memory = "" if cpu["memory"] is None else f", {size(cpu['memory'])}"
    print(
        f"{model['name']}: {model['parameters'] / 1e9:.1f}B parameters, {model['layers']} layers, "
        f"{model['heads']}/{model['kv_heads']} heads of {model['head_dim']}; "
        f"{load['context']:,} tokens of context"
    )
    if load["context"] > (model["longest"] or load["context"]):
        print(
            f"The model was made for {model['longest']:,} tokens: it will not make sense of more."
        )
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
            table.add_row(mark, row["system"], "-", "0", "", "", "", *memories, "does not fit")
            continue
        table.add_row(
            mark,
            row["system"],
            str(row["batch"]),
            str(row["largest_batch"]),
            f"{row['ms_per_step']:.1f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_second_alone']:.1f}",
            *memories,
            row["bound"],
        )
    Console(highlight=False, width=120).print(table)
    best = report["best"]
    print(
        f"\n* {best} gives the most tokens/s. Estimates: docs/performance.md says how far off."
        if best
        else "\nNothing fits: take a shorter --context, or more memory."
    )


def show_machines() -> None:
    from magicpig.planning.machines import CPUS, GPUS

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
