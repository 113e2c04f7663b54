"""Running evaluations for people to watch: a bar, the scores so far, then tables and a report."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from magicpig import plotting
from magicpig.cli.answer import use_threads
from magicpig.cli.inputs import check_folder
from magicpig.cli.output import Output
from magicpig.evals import perplexity as texts
from magicpig.evals.about import about
from magicpig.evals.harness import Harness
from magicpig.evals.prompts import PROTOCOLS, count_tokens, fingerprint, template_tokens
from magicpig.evals.records import Record, Records
from magicpig.evals.report import terminal_table, write_report
from magicpig.evals.run import batches, run
from magicpig.evals.sample import Sample
from magicpig.evals.summary import summary

# Of a task, a length, an index, a counter of tokens, and the tokens of the chat template.
MakeSample = Callable[[str, int, int, Callable[[str], int], int], Sample]

console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Settings:
    """What is evaluated, as the command line says it."""

    model: str
    methods: str
    lengths: Sequence[int]
    samples: int
    protocol: str
    dense_layers: Sequence[int] | None
    seed: int

    @property
    def protocols(self) -> list[str]:
        chosen = [word.strip() for word in self.protocol.split(",")]
        if unknown := [word for word in chosen if word not in PROTOCOLS]:
            raise ValueError(f"--protocol must be easy, hard or easy,hard, not {unknown[0]!r}")
        return chosen

    @property
    def specs(self) -> list[str]:
        return [word.strip() for word in self.methods.split(",") if word.strip()]


@dataclass(frozen=True)
class Machine:
    """Where it runs and where its results go."""

    out: Path | None
    batch: int | None
    device: str
    dtype: str
    threads: int | None
    as_json: bool


def _harness(settings: Settings, machine: Machine) -> Harness:
    if machine.out:
        check_folder(machine.out)
        plotting.require()  # before hours of work, not after
    use_threads(machine.threads)
    return Harness(
        settings.model,
        settings.specs,
        dense_layers=settings.dense_layers,
        device=machine.device,
        dtype=machine.dtype,
    )


def _kept(suite: str, harness: Harness, settings: Settings) -> dict[str, Any]:
    """What records of one folder have in common."""
    return {
        "suite": suite,
        "device": harness.runner.device.type,
        "model": settings.model,
        "model_identity": harness.identity,
        "dtype": harness.dtype,
        "dense_layers": sorted(harness.dense_layers),
        "window": asdict(harness.window),
        "seed": settings.seed,
    }


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="magicpig-eval-") as folder:
        yield Path(folder)


def generation_tasks(
    title: str, make: MakeSample, tasks: Sequence[str], settings: Settings, machine: Machine
) -> None:
    """Runs tasks whose answers are generated, and tells what came of it."""
    protocols = settings.protocols
    harness = _harness(settings, machine)
    for length in settings.lengths:
        if length > harness.max_length:
            raise ValueError(
                f"--lengths {length} is more than the {harness.max_length} tokens of the "
                "model's context"
            )
    reserve = template_tokens(harness.tokenizer)
    size = machine.batch or (1 if harness.runner.device.type == "cpu" else 8)
    todo = list(batches(tasks, settings.lengths, settings.samples, size))

    def made(task: str, length: int, index: int) -> Sample:
        return make(
            task, length, index, lambda text: count_tokens(text, harness.tokenizer), reserve
        )

    for length in settings.lengths:
        for task in tasks:
            made(task, length, 0)  # whether it can be that short, before hours of work
    kept = _kept(title, harness, settings)
    with _folder(machine.out) as folder, Records(folder, kept) as records:
        watched = {
            (task, length, protocol, index, method)
            for task in tasks
            for length in settings.lengths
            for protocol in protocols
            for index in range(settings.samples)
            for method in harness.methods
        }
        with Board(len(watched), harness.methods) as board:
            for record in records:
                if _key(record) in watched:
                    board.take(record)
            for batch in todo:
                board.say(f"{batch.task} {batch.length}")
                run(harness, made, batch, protocols, records, board.take, board.detail)
        shown = [record for record in records if _key(record) in watched]
        _tell(title, shown, list(records), kept, machine)


def _key(record: Record) -> tuple[str, int, str, int, str]:
    return (
        record["task"],
        record["length"],
        record["protocol"],
        record["index"],
        record["method"],
    )


def perplexity(
    given: Sequence[texts.Text], tokens: int | None, settings: Settings, machine: Machine
) -> None:
    """Perplexities of texts, and tells what came of it."""
    harness = _harness(settings, machine)
    kept = _kept("Perplexity", harness, settings)
    for text in given:  # before a folder is its
        texts.token_ids(harness, text, tokens)
    with _folder(machine.out) as folder, Records(folder, kept) as records:
        bar = _bar()
        task = bar.add_task("tokens", total=None)
        with bar:
            found = texts.run(
                harness,
                given,
                tokens,
                lambda done, total: bar.update(task, completed=done, total=total),
                partial(_resumed, records),
            )
        _tell("Perplexity", found, list(records), kept, machine)


def _resumed(
    records: Records,
    harness: Harness,
    name: str,
    ids: list[int],
    index: int,
    on_progress: Callable[[int], None],
) -> list[Record]:
    """A text's records, from the folder where they are all there."""
    place = (name, len(ids), texts.PROTOCOL, index)
    there = [records.get(*place, method) for method in harness.methods]
    known = [record for record in there if record is not None]
    if any(record["prompt_sha256"] != fingerprint(ids) for record in known):
        raise ValueError(
            f"{str(records.folder)!r} has results of another text named {name!r}: take another "
            "folder"
        )
    if len(known) == len(there):
        return known
    found = texts.measure(harness, name, ids, index, on_progress)
    for record in found:
        if not records.done(*_key(record)):
            records.append(record)
    return found


def _tell(
    title: str,
    shown: list[Record],
    records: list[Record],
    kept: dict[str, Any],
    machine: Machine,
) -> None:
    cells = summary(shown)
    facts = about()
    if machine.out:
        page = write_report(machine.out, records, facts, kept, title)[-1]
        console.print(f"report in {page}", style="dim")
    if machine.as_json:
        figures = [{**asdict(cell), "moved_bytes": cell.moved_bytes} for cell in cells]
        print(json.dumps({"about": facts, "settings": kept, "cells": figures}))
    else:
        Output().print(terminal_table(cells))


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class Board:
    """A bar with the scores so far on a terminal; elsewhere a line now and then."""

    LINES_APART = 30.0  # seconds

    def __init__(self, total: int, methods: Sequence[str]) -> None:
        self.scores: dict[str, list[float]] = {method: [] for method in methods}
        self.bar = _bar()
        self.task = self.bar.add_task("", total=total)
        self.live = Live(self.bar, console=console, transient=True, refresh_per_second=4)
        self.words = self.more = ""
        self.told = time.monotonic()

    def __enter__(self) -> Board:
        if console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def take(self, record: Record) -> None:
        self.scores[record["method"]].append(record["score"])
        self.bar.advance(self.task)
        self._show()

    def say(self, words: str) -> None:
        self.words, self.more = words, ""
        self._show()

    def detail(self, words: str) -> None:
        self.more = words
        self._show()

    def _show(self) -> None:
        if console.is_terminal:
            self.bar.update(self.task, description=f"{self.words} · {self.more}")
            self.live.update(Group(self.bar, self._table()))
        elif time.monotonic() > self.told + self.LINES_APART:
            self.told = time.monotonic()
            task = self.bar.tasks[0]
            so_far = ", ".join(f"{m} {_mean(s)}" for m, s in self.scores.items())
            console.print(f"{task.completed:.0f}/{task.total:.0f} {self.words}: {so_far}")

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for name in ("method", "answers", "score so far"):
            table.add_column(name, justify="left" if name == "method" else "right")
        for method, scores in self.scores.items():
            table.add_row(method, str(len(scores)), _mean(scores))
        return table


def _mean(scores: Sequence[float]) -> str:
    return f"{100 * sum(scores) / len(scores):.1f}" if scores else "-"
