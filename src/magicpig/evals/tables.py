"""Cells as tables: what a row and a column is, once, for terminals, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from magicpig.evals.summary import AVERAGE, Cell

if TYPE_CHECKING:
    from rich.console import RenderableType

UNKNOWN = "?"
SIDE_BY_SIDE = 5  # methods, on a terminal
COSTS = {
    "keys read": "Share of the far keys that entered the output.",
    "MB/token": "Megabytes (10^6 bytes) moved per decoded token to attend to the far context: key "
    "and value rows that entered the output, and what was read to choose them.",
    "search MB": "The part of MB/token that was read to choose rows.",
    "search Mops": "Millions of multiply-adds per decoded token to choose rows.",
    "same": "Share of the samples whose output is full attention's, text for text.",
    "samples": "Samples per task.",
}
METRICS = {
    "score": "A task's score is the mean over its samples, from 0 to 100; after ± its standard "
    "error: the sample standard deviation divided by the square root of the number of samples, "
    "so 0 where all samples scored alike. The average is the mean of the tasks' scores, with the "
    "error that follows from theirs.",
    "perplexity": "A task's perplexity is the geometric mean over its samples, lower is better; "
    "after ± its standard error. The average is the geometric mean of the tasks' perplexities, "
    "with the error that follows from theirs.",
}
NOTE = (
    "Costs are ratios of sums over samples, decoded tokens, sparse layers and query heads. The far "
    "context is all that lies outside the window of tokens that every method reads; window and "
    "dense layers are not counted."
)


@dataclass(frozen=True)
class Table:
    """One length and protocol. rows: methods; of each its name, then a text per column. Columns of
    which nothing is known are left out."""

    length: int
    protocol: str
    metric: str
    columns: list[str]
    rows: list[list[str]]

    @property
    def title(self) -> str:
        metric = "" if self.metric == "score" else f", {self.metric}"
        return f"{self.length:,} tokens, {self.protocol}{metric}"


def tables(cells: Sequence[Cell]) -> list[Table]:
    """A table per length and protocol, in the cells' order."""
    groups: dict[tuple[int, str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.length, cell.protocol, cell.metric), []).append(cell)
    return [_table(*key, its) for key, its in groups.items()]


def markdown_table(cells: Sequence[Cell]) -> str:
    """Tables in Markdown, each under its title in bold."""
    texts = []
    for table in tables(cells):
        lines = [
            ["method", *table.columns],
            ["---", *("---:" for _ in table.columns)],
            *table.rows,
        ]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        texts.append(f"**{table.title}**\n\n{body}\n")
    return "\n".join(texts)


def terminal_table(cells: Sequence[Cell]) -> RenderableType:
    """Tables for rich's console: a few methods side by side, since tasks are many."""
    from rich.console import Group
    from rich.table import Table as RichTable

    shown: list[RenderableType] = []
    for table in tables(cells):
        for first in range(0, len(table.rows), SIDE_BY_SIDE):
            methods = table.rows[first : first + SIDE_BY_SIDE]
            rich = RichTable(
                title=table.title, title_justify="left", padding=(0, 1, 0, 0), box=None
            )
            rich.add_column("", no_wrap=True)
            for row in methods:
                rich.add_column(row[0], justify="right", no_wrap=True)
            for i, column in enumerate(table.columns, 1):
                texts = [row[i].replace(" ± ", "±") for row in methods]
                rich.add_row(column, *texts, style="bold" if column == AVERAGE else None)
            shown += ["", rich] if shown else [rich]
    return Group(*shown)


def _table(length: int, protocol: str, metric: str, cells: Sequence[Cell]) -> Table:
    by_method: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        by_method.setdefault(cell.method, {})[cell.task] = cell
    tasks = list(dict.fromkeys(cell.task for cell in cells if cell.task != AVERAGE))
    scores = [*tasks, AVERAGE] if len(tasks) > 1 else tasks
    rows = []
    for method, its in by_method.items():
        texts = [_score(its.get(task), len(tasks)) for task in scores]
        counts = [its[task].samples for task in tasks if task in its]
        samples = "-".join(str(count) for count in sorted({min(counts), max(counts)}))
        rows.append([method, *texts, *_costs(its[AVERAGE]), samples])
    columns = ["method", *scores, *COSTS]
    known = [i for i in range(len(columns)) if any(row[i] != UNKNOWN for row in rows)]
    names, *rows = ([line[i] for i in known] for line in (columns, *rows))
    return Table(length, protocol, metric, names[1:], rows)


def _score(cell: Cell | None, num_tasks: int) -> str:
    if cell is None:
        return UNKNOWN
    digits = 1 if cell.metric == "score" else 3
    text = f"{cell.score:.{digits}f}"
    if cell.error is not None:
        text += f" ± {cell.error:.{digits}f}"
    if cell.task == AVERAGE and cell.tasks < num_tasks:
        text += f" ({cell.tasks} of {num_tasks} tasks)"
    return text


def _costs(cell: Cell) -> list[str]:
    return [
        _short(cell.keys_read, 1e-2, " %"),
        _short(cell.moved_bytes, 1e6),
        _short(cell.search_bytes, 1e6),
        _short(cell.search_ops, 1e6),
        _short(cell.same_as_full, 1e-2, " %"),
    ]


def _short(value: float | None, unit: float, name: str = "") -> str:
    if value is None:
        return UNKNOWN
    value /= unit
    return (f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}") + name
