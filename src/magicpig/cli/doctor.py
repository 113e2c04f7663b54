"""`magicpig doctor`: what this machine has and gives, and what is wrong with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicpig.cli.spinner import spinner

if TYPE_CHECKING:
    from magicpig.health import Finding

Report = dict[str, Any]

LABEL_WIDTH = 14


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Measure no speeds.")] = False,
) -> None:
    """Show versions, CPU, GPU, memory, cache folder and measured speeds; name problems.

    The exit code is 1 when there is a problem.
    """
    report, findings = examined(quick)
    problems = [finding for finding in findings if finding.severity == "problem"]
    hints = [finding for finding in findings if finding.severity == "hint"]
    if as_json:
        lists = {"problems": listed(problems), "hints": listed(hints)}
        print(json.dumps({**report, **lists}, indent=2))
    else:
        show(report)
        show_findings(problems, hints)
    sys.stdout.flush()
    if problems:
        sys.exit(1)


def examined(quick: bool) -> tuple[Report, list[Finding]]:
    """Facts of each check by its name, and all findings. A spinner turns on a terminal."""
    from magicpig.health import CHECKS, MEASURED

    report: Report = {}
    findings: list[Finding] = []
    with spinner("examining") as say:
        for name, check in CHECKS.items():
            if quick and name in MEASURED:
                report[name] = None
                continue
            say(f"examining: {name.replace('_', '-')}")
            report[name], found = check()
            findings += found
    return report, findings


def listed(findings: list[Finding]) -> list[dict[str, str]]:
    return [{"what": finding.what, "mend": finding.mend} for finding in findings]


def show(report: Report) -> None:
    """A table on a terminal; elsewhere a line for each fact, however long."""
    from rich.table import Table

    from magicpig.cli.output import Output

    console = Output(markup=False, highlight=False)
    if not console.is_terminal:
        for label, text in rows(report):
            print(f"{label:<{LABEL_WIDTH}}{text}")
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in rows(report):
        table.add_row(label, text)
    console.print(table)


def show_findings(problems: list[Finding], hints: list[Finding]) -> None:
    from magicpig.cli.output import Output

    console = Output(markup=False, highlight=False, soft_wrap=True)
    for title, style, findings in (("Problems", "bold red", problems), ("Hints", "bold", hints)):
        if findings:
            console.print(f"\n{title}", style=style)
        for finding in findings:
            console.print(f"- {finding.what}\n  -> {finding.mend}")
    if not problems:
        console.print("\nNo problems.", style="green")


def rows(report: Report) -> Iterator[tuple[str, str]]:
    """The report for people: labels and texts. What is not known is a question mark."""
    versions, cpu, native = report["versions"], report["cpu"], report["native"]
    memory, cache = report["memory"], report["cache"]
    for name in ("magicpig", "python", "torch", "transformers", "numpy", "platform"):
        yield name, known(versions[name])
    limit = "" if cpu["core_limit"] is None else f", limited to {cpu['core_limit']:g}"
    yield "CPU", f"{known(cpu['model'])}; cores: {known(cpu['cores'])}{limit}"
    yield "instructions", f"{known(native['isa'])}, of {', '.join(native['supported_isas'])}"
    yield "threads", f"{known(native['threads'])} native, {native['torch_threads']} torch"
    overrides = [f"{name}={text}" for name, text in native["environment"].items() if text]
    if overrides:
        yield "environment", ", ".join(overrides)
    limit = "" if memory["limit_bytes"] is None else f", limited to {size(memory['limit_bytes'])}"
    total, available = size(memory["total_bytes"]), size(memory["available_bytes"])
    yield "memory", f"{total}{limit}, {available} available"
    yield "huge pages", known(memory["huge_pages"])
    for gpu in report["gpu"]["gpus"] or [None]:
        yield "GPU", gpu_text(gpu) if gpu else "none"
    writable = "writable" if cache["writable"] else "not writable"
    yield "cache folder", f"{known(cache['folder'])}, {writable}, {size(cache['free_bytes'])} free"
    for name, model in cache["models"].items():
        installed = "" if model["state"] == "missing" else f", {size(model['bytes'])}"
        yield "model", f"{name} {model['state']}{installed}"
    failed = [isa for isa, result in report["self_test"].items() if result != "ok"]
    passed = [isa for isa in report["self_test"] if isa not in failed]
    yield (
        "self-test",
        "; ".join(
            f"{verdict} on {', '.join(isas)}"
            for verdict, isas in (("ok", passed), ("FAILED", failed))
            if isas
        )
        or "not run",
    )
    if (roofs := report["roofs"]) is not None:
        stream, gather = (roofs[f"{name}_bytes_per_second"] for name in ("stream", "gather"))
        yield "reads", f"streamed {size(stream)}/s, random rows {size(gather)}/s"


def gpu_text(gpu: dict[str, Any]) -> str:
    return f"{gpu['name']}, {size(gpu['free_bytes'])} of {size(gpu['total_bytes'])} free"


def known(fact: object) -> str:
    return "?" if fact is None else str(fact)


def size(nbytes: float | None) -> str:
    if nbytes is None:
        return "?"
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.0f} MB"
