"""From what was measured to one dictionary of plain numbers: what analysis.json holds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from magicpig.analysis.measure import Measures

Results = dict[str, Any]

NUM_WORST = 8


def errors(measures: Measures, layers: list[int], sampled: list[int]) -> list[Results]:
    """A row for every method and budget.

    share: of the far keys, read. mean, median, p90, p99: of the error over queries and heads of the
    sampled layers. layers: the mean error of every layer.
    """
    found = []
    chosen = [i for i, layer in enumerate(layers) if layer in sampled]
    for name in measures.errors:
        error = stacked(measures.errors[name], len(layers))
        rows = stacked(measures.rows[name], len(layers))
        method, _, setting = name.partition(":")
        found.append(
            {
                "name": name,
                "method": method,
                "budget": float(name.rpartition(":")[2][:-1]) / 100 if name[-1] == "%" else None,
                "setting": setting,
                "share": rows[:, chosen].mean().item(),
                **statistics(error[:, chosen]),
                "layers": error.mean((0, 2, 3)).tolist(),
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


def worst_heads(rows: list[Results]) -> list[Results]:
    """Heads whose top keys cover least of their mass."""
    return sorted(rows, key=lambda row: row["top"])[:NUM_WORST]


def error_at(rows: list[Results], method: str, share: float) -> float | None:
    """A method's mean error at a share of keys read, between its budgets in log scale.

    None outside of what was measured.
    """
    points = sorted((row["share"], row["mean"]) for row in rows if row["method"] == method)
    for (low, low_error), (high, high_error) in pairwise(points):
        if low <= share <= high and low < high:
            shares = torch.tensor([low, high, share], dtype=torch.double).log()
            both = torch.tensor([low_error, high_error], dtype=torch.double).clamp(min=1e-12).log()
            part = (shares[2] - shares[0]) / (shares[1] - shares[0])
            return float((both[0] + part * (both[1] - both[0])).exp())
    return None
