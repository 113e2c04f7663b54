"""topk: the rows with the highest scores, found by computing all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from magicpig.attention.base import check_share, share_of
from magicpig.attention.scoring import Scoring
from magicpig.attention.tensor_method import Choice, ChoosingMethod, best
from magicpig.kv.base import LayerShape
from magicpig.kv.far_tokens import FarTokens
from magicpig.kv.tensor_layer import TensorLayer


@dataclass(frozen=True)
class TopK(ChoosingMethod):
    """budget: share of the far keys that each query head reads."""

    name: ClassVar[str] = "topk"
    num_shown: ClassVar[int] = 1

    budget: float = 0.02

    def __post_init__(self) -> None:
        check_share("budget", self.budget)

    def choose(
        self, layers: Sequence[TensorLayer], far: FarTokens, queries: Tensor, scoring: Scoring
    ) -> Choice:
        scores = scoring(queries, far.keys)
        if far.hidden is not None:
            scores = scores.masked_fill(far.hidden, -torch.inf)
        counts = [share_of(self.budget, tokens) for tokens in far.lengths]
        ids, log_weights = best(scores, counts)
        return Choice(ids, log_weights, [queries.shape[1] * count for count in counts])

    def search_cost(self, shape: LayerShape, tokens: int) -> tuple[int, int]:
        return all_scores_cost(shape, tokens)


def all_scores_cost(shape: LayerShape, tokens: int) -> tuple[int, int]:
    """Of every score: all keys are read, once for a group."""
    elements = tokens * shape.head_dim
    return shape.num_kv_heads * elements * shape.dtype.itemsize, shape.num_heads * elements
