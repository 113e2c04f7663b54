"""The three observations that sampling by hash tables rests on, per layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magicpig.analysis.capture import LayerInput, Starts

Numbers = dict[str, list[float]]


def pairwise(x: Tensor) -> Tensor:
    """Cosines [pairs, ...] between all pairs of vectors [inputs, ..., dim] of different inputs."""
    normal = torch.nn.functional.normalize(x.double(), dim=-1)
    first, second = torch.triu_indices(len(x), len(x), 1)
    return (normal[first] * normal[second]).sum(-1)


def of_starts(starts: Starts) -> Numbers:
    """Similarity between inputs of the first token's state and key, and of a later token's."""
    state = torch.stack([pairwise(layer[0]).mean() for layer in starts.states])
    other_state = torch.stack([pairwise(layer[1]).mean() for layer in starts.states])
    key = torch.stack([pairwise(layer[0]).mean(0) for layer in starts.keys])  # [layers, kv_heads]
    other_key = torch.stack([pairwise(layer[1]).mean(0) for layer in starts.keys])
    return {
        "sink_state_similarity": state.tolist(),
        "sink_key_similarity": key.mean(-1).tolist(),
        "sink_key_similarity_lowest_head": key.amin(-1).tolist(),
        "later_state_similarity": other_state.tolist(),
        "later_key_similarity": other_key.mean(-1).tolist(),
    }


class MeanKeys:
    """Mean keys of the far contexts and sink keys, gathered input by input."""

    def __init__(self, sinks: int) -> None:
        self.sinks = sinks
        self._means: list[list[Tensor]] = []  # [inputs][layers], each [kv_heads, dim]
        self._sinks: list[list[Tensor]] = []

    def begin_input(self) -> None:
        self._means.append([])
        self._sinks.append([])

    def add(self, given: LayerInput, end: int) -> None:
        """A layer of the input. end: of its far context."""
        self._means[-1].append(given.keys[:, self.sinks : end].double().mean(1))
        self._sinks[-1].append(given.keys[:, 0].double())

    def result(self) -> Numbers:
        means = torch.stack([torch.stack(layers) for layers in self._means])
        sinks = torch.stack([torch.stack(layers) for layers in self._sinks])
        stable = pairwise(means).mean(0)  # [layers, kv_heads]
        opposite = torch.nn.functional.cosine_similarity(means, sinks, dim=-1).mean(0)
        return {
            "mean_key_stability": stable.mean(-1).tolist(),
            "mean_key_stability_lowest_head": stable.amin(-1).tolist(),
            "mean_sink_cosine": opposite.mean(-1).tolist(),
            "mean_sink_cosine_lowest_head": opposite.amin(-1).tolist(),
            "mean_sink_cosine_highest_head": opposite.amax(-1).tolist(),
        }


def rows(layers: list[int], numbers: Numbers) -> list[dict[str, Any]]:
    """One table: a row for every layer."""
    return [
        {"layer": layer, **{name: column[i] for name, column in numbers.items()}}
        for i, layer in enumerate(layers)
    ]
