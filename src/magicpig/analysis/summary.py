"""From what was measured to one dictionary of plain numbers: what analysis.json holds."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from magicpig.analysis.measure import Measures

Results = dict[str, Any]

NUM_WORST = 8
BEYOND = 1.05  # times the outermost budgets, up to where a line of errors is drawn out
LEAST = 1e-12  # stands for 0 in logarithms


def errors(measures: Measures, layers: list[int], sampled: list[int]) -> list[Results]:
    """A row for every method and budget.

    share: of the far keys, read. decisive: the same of those that have a tenth of a query's
    attention or more; None where there are none. mean, median, p90, p99: of the error over queries
    and heads of the sampled layers. layers: the mean error of every layer.
    """
    found = []
    chosen = [i for i, layer in enumerate(layers) if layer in sampled]
    for name in measures.errors:
        error = stacked(measures.errors[name], len(layers))
        rows = stacked(measures.rows[name], len(layers))
        decisive = torch.stack(measures.decisive[name])
        decisive = decisive.view(-1, len(layers), *decisive.shape[1:])
        read, there = decisive[:, chosen].sum((0, 1, 3, 4)).tolist()
        method, _, setting = name.partition(":")
        found.append(
            {
                "name": name,
                "method": method,
                "budget": float(name.rpartition(":")[2][:-1]) / 100 if name[-1] == "%" else None,
                "setting": setting,
                "share": rows[:, chosen].mean().item(),
                "decisive": read / there if there else None,
                **statistics(error[:, chosen]),
                "layers": error.mean((0, 2, 3)).tolist(),
            }
        )
    return found


def targets(measures: Measures, layers: list[int], sampled: list[int]) -> list[Results]:
    """A row for every error that was asked for, over queries and heads of the sampled layers.

    mean, median, p90, p99: of the error. predicted: its mean. share: of the far keys, read; least,
    most: 5 % of heads and queries read less, or more.
    """
    found = []
    chosen = [i for i, layer in enumerate(layers) if layer in sampled]
    for (bits, error), tensors in measures.targets.items():
        parts = torch.stack(tensors).view(-1, len(layers), *tensors[0].shape)[:, chosen]
        errors, predicted, shares = parts.transpose(0, 2).flatten(1).double()
        least, most = shares.quantile(torch.tensor([0.05, 0.95]).double()).tolist()
        found.append(
            {
                "bits_per_dim": bits,
                "target": error,
                **statistics(errors),
                "predicted": predicted.mean().item(),
                "share": shares.mean().item(),
                "least": least,
                "most": most,
            }
        )
    return found


def stacked(tensors: list[Tensor], num_layers: int) -> Tensor:
    """[inputs, layers, positions, heads]."""
    positions, heads = tensors[0].shape
    return torch.stack(tensors).view(-1, num_layers, positions, heads)


def statistics(values: Tensor) -> dict[str, float]:
    flat = values.flatten().double()
    quantiles = torch.quantile(flat, torch.tensor([0.5, 0.9, 0.99], dtype=torch.double)).tolist()
    return {
        "mean": flat.mean().item(),
        **dict(zip(("median", "p90", "p99"), quantiles, strict=True)),
    }


def heads(measures: Measures, layers: list[int]) -> list[Results]:
    """A row for every head of every layer: means over inputs and positions.

    top: mass of the top 20 % of all keys. top_of_far: of the top 20 % of the far keys, as a share
    of the far keys' mass. far: mass of the far keys. tail: of far keys outside their top 2 %.
    errors: by method.
    """
    mass = {name: stacked(parts, len(layers)) for name, parts in measures.mass.items()}
    mass["top_of_far"] = mass["top_of_far"] / mass["far"].clamp(min=1e-30)
    means = {name: values.mean((0, 2)) for name, values in mass.items()}  # [layers, heads]
    error = {
        name: stacked(parts, len(layers)).mean((0, 2)) for name, parts in measures.errors.items()
    }
    return [
        {
            "layer": layer,
            "head": head,
            **{name: values[i, head].item() for name, values in means.items()},
            "errors": {name: values[i, head].item() for name, values in error.items()},
        }
        for i, layer in enumerate(layers)
        for head in range(means["top"].shape[1])
    ]


def rows_of(rows: list[Results], words: str) -> list[Results]:
    """Rows of methods whose names begin with these words: quest, lsh:10:150, scan:2."""
    return [row for row in rows if f"{row['name']}:".startswith(f"{words}:")]


def nearest(rows: list[Results], share: float) -> Results:
    """The row with about this share of keys read."""
    return min(rows, key=lambda row: abs(row["share"] - share))


def worst_heads(rows: list[Results]) -> list[Results]:
    """Heads whose top keys cover least of their mass."""
    return sorted(rows, key=lambda row: row["top"])[:NUM_WORST]


def error_at(rows: list[Results], share: float) -> float | None:
    """The mean error of one method at a share of keys read, between its budgets in log scale.

    None outside of what was measured.
    """
    return _between([(row["share"], row["mean"]) for row in rows], share)


def share_at(rows: list[Results], error: float) -> float | None:
    """The share of keys with which one method has this mean error; None as in error_at."""
    return _between([(row["mean"], row["share"]) for row in rows], error)


def _between(points: list[tuple[float, float]], x: float) -> float | None:
    """y at x on the line through points (x, y) in log-log scale, or a little beyond its ends."""
    logs = sorted((math.log(max(a, LEAST)), math.log(max(b, LEAST))) for a, b in points)
    at = math.log(max(x, LEAST))
    beyond = math.log(BEYOND)
    if not logs or not logs[0][0] - beyond <= at <= logs[-1][0] + beyond:
        return None
    parts = [(left, right) for left, right in pairwise(logs) if left[0] < right[0]]
    if not parts:
        return None
    (x0, y0), (x1, y1) = next((part for part in parts if at <= part[1][0]), parts[-1])
    return math.exp(y0 + (at - x0) / (x1 - x0) * (y1 - y0))
