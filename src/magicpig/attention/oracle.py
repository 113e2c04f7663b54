"""oracle: rows drawn from the true softmax: what sampling can reach, at the price of all scores.

With replacement, as many draws as the budget says; a row drawn several times is read once. The
output is unbiased: a row's weight is the share of draws it got.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from magicpig.attention.base import check_share, share_of
from magicpig.attention.scoring import Scoring
from magicpig.attention.tensor_method import Choice, ChoosingMethod
from magicpig.attention.topk import all_scores_cost
from magicpig.config import check_int
from magicpig.kv.base import LayerShape
from magicpig.kv.far_tokens import FarTokens
from magicpig.kv.tensor_layer import TensorLayer


@dataclass(frozen=True)
class Oracle(ChoosingMethod):
    """budget: draws of each query head, as a share of the far keys; at 100 % all rows are read.

    seed: of the draws; they depend on it, the layer and the length of the sequence.
    """

    name: ClassVar[str] = "oracle"
    num_shown: ClassVar[int] = 1

    budget: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        check_share("budget", self.budget)
        check_int("seed", self.seed, 0, 2**32 - 1)

    def choose(
        self, layers: Sequence[TensorLayer], far: FarTokens, queries: Tensor, scoring: Scoring
    ) -> Choice:
        scores = scoring(queries, far.keys)
        if far.hidden is not None:
            scores = scores.masked_fill(far.hidden, -torch.inf)
        if self.budget == 1:
            ids = torch.arange(far.num_tokens, device=scores.device).expand(scores.shape)
            weights = None if far.hidden is None else torch.where(far.hidden, -torch.inf, 0.0)
            return Choice(ids, weights, [queries.shape[1] * tokens for tokens in far.lengths])
        probability = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        counts = [share_of(self.budget, tokens) for tokens in far.lengths]
        ids, times = self._draw(layers, probability, counts)
        drawn = torch.tensor(counts, device=scores.device)[:, None, None]
        log_weights = times.log() - drawn.log() - probability.gather(-1, ids).log()
        log_weights = log_weights.masked_fill(times == 0, -torch.inf)
        return Choice(ids, log_weights, (times > 0).sum((1, 2)))

    def _draw(
        self, layers: Sequence[TensorLayer], probability: Tensor, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Ids [batch, heads, draws] and how often each was drawn; 0 at all but its first place."""
        batch, heads, _ = probability.shape
        uniform = np.full((batch, heads, max(counts)), 2.0)  # above all: no draw
        for i, (layer, count) in enumerate(zip(layers, counts, strict=True)):
            place = (self.seed, layer.layer, layer.num_tokens)
            uniform[i, :, :count] = np.random.default_rng(place).random((heads, count))
        positions = torch.from_numpy(uniform).to(probability.device)
        cumulative = probability.double().cumsum(-1)
        cumulative = cumulative / cumulative[..., -1:]
        ids = torch.searchsorted(cumulative, positions, right=True)
        ids, _ = ids.sort(-1)
        first = torch.ones_like(ids, dtype=torch.bool)
        first[..., 1:] = ids[..., 1:] != ids[..., :-1]
        first &= ids < probability.shape[-1]
        times = torch.searchsorted(ids, ids, right=True) - torch.searchsorted(ids, ids)
        return ids.clamp(max=probability.shape[-1] - 1), torch.where(first, times, 0)

    def search_cost(self, shape: LayerShape, tokens: int) -> tuple[int, int]:
        return all_scores_cost(shape, tokens)
