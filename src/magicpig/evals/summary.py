"""From samples to figures. `Cell` says which figures there are and how each is made; tables, plots
and results.json all take them from here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from magicpig.evals.records import Record

AVERAGE = "average"
FULL = "full"  # the method that others are compared with
METRICS = ("score", "perplexity")


@dataclass(frozen=True)
class Cell:
    """The figures of one method on one task at one length under one protocol.

    task: or AVERAGE, for all tasks of this length, protocol and method.
    tasks, samples: how many there are.
    metric: "score": the mean of the samples' scores, 0 to 100. "perplexity": the geometric mean
        of theirs, lower is better.
    score: the figure. Of an average, the mean of the tasks' figures (geometric for perplexity), so
        every task counts alike however many samples it has.
    error: standard error of score: the sample standard deviation divided by the square root of
        samples. Of an average, from the tasks' errors: the root of the sum of their squares,
        divided by the number of tasks. A single sample's own ("score_error") where there is but
        one; None where that has none.
    keys_read: share of the far keys that entered the output, 0 to 1. Like all costs it is a ratio
        of sums over samples, decoded tokens, sparse layers and query heads. None where there were
        no far keys.
    row_bytes, search_bytes, search_ops: per decoded token: bytes of the key and value rows that
        entered the output, bytes that were read to choose them, multiply-adds that it took.
    same_as_full: share of the samples whose output is full attention's, 0 to 1. None where full
        attention was not run.
    """

    task: str
    length: int
    protocol: str
    method: str
    metric: str
    tasks: int
    samples: int
    score: float
    error: float | None
    keys_read: float | None
    row_bytes: float | None
    search_bytes: float | None
    search_ops: float | None
    same_as_full: float | None

    @property
    def moved_bytes(self) -> float | None:
        """Per decoded token: rows and search together."""
        if self.row_bytes is None or self.search_bytes is None:
            return None
        return self.row_bytes + self.search_bytes


def summary(records: Iterable[Record]) -> list[Cell]:
    """Cells by length and protocol: methods in the order in which they first occur, and of each
    method its tasks in theirs and their average."""
    groups: dict[tuple[int, str, str, str], dict[str, list[Record]]] = {}
    order: dict[str, dict[str, int]] = {name: {} for name in ("protocol", "metric", "method")}
    tasks: dict[str, int] = {}
    records = list(records)
    full = {_place(r): r.get("output") for r in records if r["method"] == FULL}
    for record in records:
        metric = record.get("metric", "score")
        if metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, not {metric!r}")
        key = (record["length"], record["protocol"], metric, record["method"])
        for name, value in zip(order, key[1:], strict=True):
            order[name].setdefault(value, len(order[name]))
        tasks.setdefault(record["task"], len(tasks))
        groups.setdefault(key, {}).setdefault(record["task"], []).append(record)

    def rank(key: tuple[int, str, str, str]) -> tuple[int, ...]:
        places = (order[name][value] for name, value in zip(order, key[1:], strict=True))
        return (key[0], *places)

    cells = []
    for key in sorted(groups, key=rank):
        metric = key[2]
        found = sorted(groups[key].items(), key=lambda item: tasks[item[0]])
        figures = [_figure(its, metric) for _, its in found]
        for (task, its), figure in zip(found, figures, strict=True):
            cells.append(_cell(task, key, 1, figure, its, full))
        everything = [record for _, its in found for record in its]
        figure = _mean_figure(figures, metric)
        cells.append(_cell(AVERAGE, key, len(found), figure, everything, full))
    return cells


Place = tuple[str, int, str, int]


def _place(record: Record) -> Place:
    return record["task"], record["length"], record["protocol"], record["index"]


Figure = tuple[float, float | None]  # and its standard error


def _figure(records: Sequence[Record], metric: str) -> Figure:
    scores = [record["score"] for record in records]
    if len(scores) == 1:
        unit = 1 if metric == "perplexity" else 100
        error = records[0].get("score_error")
        return unit * scores[0], None if error is None else unit * error
    values = [math.log(score) if metric == "perplexity" else 100 * score for score in scores]
    error = statistics.stdev(values) / math.sqrt(len(values))
    return _from_log((statistics.fmean(values), error), metric)


def _mean_figure(figures: Sequence[Figure], metric: str) -> Figure:
    if metric == "perplexity":
        figures = [(math.log(mean), error and error / mean) for mean, error in figures]
    errors = [error for _, error in figures if error is not None]
    error = math.hypot(*errors) / len(errors) if len(errors) == len(figures) else None
    return _from_log((statistics.fmean(mean for mean, _ in figures), error), metric)


def _from_log(figure: Figure, metric: str) -> Figure:
    """Of means of logarithms the perplexity; an error of a logarithm is a relative one."""
    if metric != "perplexity":
        return figure
    mean = math.exp(figure[0])
    return mean, figure[1] and mean * figure[1]


def _cell(
    task: str,
    key: tuple[int, str, str, str],
    tasks: int,
    figure: Figure,
    records: Sequence[Record],
    full: Mapping[Place, str | None],
) -> Cell:
    """full: the outputs of full attention."""
    length, protocol, metric, method = key

    def total(name: str) -> float:
        return math.fsum((record.get("cost") or {}).get(name, 0) for record in records)

    def ratio(name: str, unit: str) -> float | None:
        return total(name) / total(unit) if total(unit) else None

    same = [r["output"] == full[_place(r)] for r in records if full.get(_place(r)) is not None]
    return Cell(
        task=task,
        length=length,
        protocol=protocol,
        method=method,
        metric=metric,
        tasks=tasks,
        samples=len(records),
        score=figure[0],
        error=figure[1],
        keys_read=ratio("rows", "tokens"),
        row_bytes=ratio("row_bytes", "steps"),
        search_bytes=ratio("search_bytes", "steps"),
        search_ops=ratio("search_ops", "steps"),
        same_as_full=statistics.fmean(same) if same else None,
    )
