"""SequenceKV: keys and values of one sequence in every layer of a model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from magicpig.kv.base import SequenceBytes, SequenceLayer
from magicpig.kv.cost import Cost


def step(
    layers: Sequence[SequenceLayer],
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """One token of each sequence: its key and value are added, its query attends to all of it.

    queries: [batch, num_heads, head_dim]; keys, values: [batch, num_kv_heads, head_dim].
    Returns the output, shaped and typed as queries; NaN where a sequence's numbers are not finite.
    Layers of one kind step together, whatever the order.
    """
    kinds = [layer.kind for layer in layers]
    if all(kind == kinds[0] for kind in kinds):
        return type(layers[0]).step(layers, queries, keys, values, scale, softcap)
    out = torch.empty_like(queries)
    for kind in dict.fromkeys(kinds):
        alike = [i for i, each in enumerate(kinds) if each == kind]
        group = [layers[i] for i in alike]
        out[alike] = type(group[0]).step(
            group, queries[alike], keys[alike], values[alike], scale, softcap
        )
    return out


class SequenceKV:
    """One sequence in all layers of a model.

    layers: in the model's order. Those that are not attention are the model's own, and any type.
    num_tokens: whose keys and values are here.
    long_rope: whether their rotary embeddings are those of long sequences, where there are others.
    """

    def __init__(self, layers: Sequence[Any], num_tokens: int = 0, long_rope: bool = False) -> None:
        self.layers = list(layers)
        self.num_tokens = num_tokens
        self.long_rope = long_rope

    @cached_property
    def kinds(self) -> tuple[object, ...]:
        """Of the layers; None for those that are not attention."""
        return tuple(getattr(layer, "kind", None) for layer in self.layers)

    @property
    def attention_layers(self) -> list[SequenceLayer]:
        return [layer for layer in self.layers if isinstance(layer, SequenceLayer)]

    def settle(self) -> None:
        """Moves what outgrew the windows; see SequenceLayer.settle."""
        for layer in self.attention_layers:
            layer.settle()

    def end(self) -> None:
        """No step comes after this; see SequenceLayer.end."""
        for layer in self.attention_layers:
            layer.end()

    def fork(self) -> SequenceKV:
        """A sequence that shares all far contexts and has windows of its own."""
        layers = [
            layer.fork() if isinstance(layer, SequenceLayer) else copy.deepcopy(layer)
            for layer in self.layers
        ]
        return SequenceKV(layers, self.num_tokens, self.long_rope)

    @property
    def nbytes(self) -> SequenceBytes:
        sizes = [layer.nbytes for layer in self.attention_layers]
        return SequenceBytes(
            sum(size.rows for size in sizes),
            sum(size.index for size in sizes),
            sum(size.window for size in sizes),
        )

    @property
    def share_read(self) -> float:
        """The share of all rows, windows and dense layers included, that decode steps have read."""
        reads = [layer.reads for layer in self.attention_layers]
        tokens = sum(there for _, there in reads)
        return sum(rows for rows, _ in reads) / tokens if tokens else 1.0

    @property
    def cost(self) -> Cost:
        """Of the far context in the layers that the method is for."""
        layers = [layer for layer in self.attention_layers if not (layer.dense or layer.span)]
        return reduce(add, (layer.cost for layer in layers), Cost())
