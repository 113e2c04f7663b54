"""`magicpig analyze`: a model's attention on real text, and what sampling makes of it."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from magicpig.cli.inputs import check_folder, read_text

DEFAULT_OUT = Path("analysis")
STYLES = {
    "agrees": "green",
    "helps": "green",
    "agrees in part": "yellow",
    "helps in part": "yellow",
}


def analyze(
    model: Annotated[str, typer.Option(help="Built-in name, folder or hub name.")] = "smollm2",
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="Text to read instead of our own. Repeatable."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of each excerpt that is read.")] = 6000,
    inputs: Annotated[int, typer.Option(help="Excerpts, two at least.")] = 4,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report, plots and data. (analysis; with --json none)"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float32, ...")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads. (all)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All figures as one object.")] = False,
) -> None:
    """Show what sampling rests on in a model, how large its errors are, and where it fails.

    Reads excerpts of a text and compares every layer's attention with the paper's observations
    and with estimates from a part of the keys. Writes report.html, plots and analysis.json.
    """
    from magicpig.analysis.settings import Settings

    settings = Settings(tokens=tokens, inputs=inputs)
    texts = [read_text(path) for path in file or []]
    folder = DEFAULT_OUT if out is None and not as_json else out
    if folder is not None:
        from magicpig import plotting

        check_folder(folder)
        plotting.require()
    gc.disable()  # see generate
    from magicpig.analysis import report, study
    from magicpig.analysis.texts import default_text
    from magicpig.cli.answer import use_threads
    from magicpig.models import load

    use_threads(threads)
    text = "\n".join(texts) if texts else default_text()
    loaded = load(model, device, dtype)
    gc.freeze()
    gc.enable()
    with progress_bar() as tell:
        results = study.analyze(loaded, text, settings, tell)
    written = [] if folder is None else report.write(results, folder)
    if as_json:
        print(json.dumps(report.rounded(results), allow_nan=False))
    else:
        show(results)
        if written:
            print(f"\n{written[-1]}")


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A function that takes what is being done and the share that is, and moves a bar."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, share: None
        return
    columns = (TextColumn("{task.description:<9}"), BarColumn(), TaskProgressColumn(), Remaining())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=1.0)
        yield lambda what, share: bar.update(task, completed=share, description=what)


def show(results: dict[str, Any]) -> None:
    """Findings and the errors' table. Where there is no terminal, lines of any length."""
    from rich.table import Table

    from magicpig.analysis.report import described, error_rows
    from magicpig.cli.output import Output

    console = Output(markup=False, highlight=False, soft_wrap=not sys.stdout.isatty())
    console.print(f"{results['about']['model']}: {described(results['about'])}\n")
    for found in results["findings"]:
        style = STYLES.get(found["verdict"], "red")
        console.print(f"{found['name']}: {found['verdict']}", style=f"bold {style}")
        console.print(f"  {found['sentence']}")
    table = Table(title="\nerror of attention's output", title_justify="left")
    table.add_column("method")
    for name in ("far keys read", "decisive", "mean", "median", "p90", "p99"):
        table.add_column(name, justify="right")
    for row in error_rows(results):
        table.add_row(*row)
    console.print(table)
