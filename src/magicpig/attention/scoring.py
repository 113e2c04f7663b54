"""Exact attention of single queries in plain torch, with what it takes to merge it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scoring:
    """How products become scores."""

    scale: float
    softcap: float | None = None

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores [batch, heads, tokens] of queries [batch, heads, dim] and keys [batch, kv_heads,
        tokens, dim], in float32."""
        grouped = queries.view(len(queries), keys.shape[1], -1, queries.shape[2])
        return self.bend(grouped @ keys.float().transpose(2, 3)).flatten(1, 2)

    def bend(self, products: Tensor) -> Tensor:
        scores = products * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores


def attend_to_all(
    queries: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, dim] and log-sum-exp [batch, heads] over all that is not hidden."""
    scores = scoring(queries, keys)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - finite(lse)[..., None]).exp()
    grouped = weights.view(*keys.shape[:2], -1, keys.shape[2])
    return (grouped @ values.float()).flatten(1, 2), lse


def finite(lse: Tensor) -> Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse)
