"""loki: the rows with the highest scores in few dimensions (arXiv 2406.02542).

Keys lie near a space of low dimension. Scores are computed with the leading principal components of
the keys; the best rows by those are read and scored in full.
"""

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
class Loki(ChoosingMethod):
    """dims: share of the dimensions that rows are chosen by. budget: share of the far keys that a
    query head reads.

    The components are those of each KV head's own far keys, found anew whenever these grow.
    """

    name: ClassVar[str] = "loki"
    num_shown: ClassVar[int] = 2

    dims: float = 0.25
    budget: float = 0.02

    def __post_init__(self) -> None:
        check_share("dims", self.dims)
        check_share("budget", self.budget)

    def calibrate(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The basis [heads, dim, dims] of keys [heads, tokens, dim], and the keys in it [heads,
        tokens, dims]."""
        wide = keys.float()
        centred = wide - wide.mean(1, keepdim=True)
        spread = (centred.transpose(1, 2) @ centred).nan_to_num(0, 0, 0)  # eigh refuses NaN
        _, components = torch.linalg.eigh(spread)  # ascending
        basis = components[..., -share_of(self.dims, keys.shape[2]) :]
        return basis, (wide @ basis).to(keys.dtype)

    def choose(
        self, layers: Sequence[TensorLayer], far: FarTokens, queries: Tensor, scoring: Scoring
    ) -> Choice:
        basis, short_keys = far.derived(self.spec, self.calibrate)
        batch, heads, dim = queries.shape
        grouped = queries.view(batch, far.keys.shape[1], -1, dim)
        scores = scoring((grouped @ basis).flatten(1, 2), short_keys)
        if far.hidden is not None:
            scores = scores.masked_fill(far.hidden, -torch.inf)
        counts = [share_of(self.budget, tokens) for tokens in far.lengths]
        ids, log_weights = best(scores, counts)
        return Choice(ids, log_weights, [heads * count for count in counts])

    def search_cost(self, shape: LayerShape, tokens: int) -> tuple[int, int]:
        dims = share_of(self.dims, shape.head_dim)
        read = shape.num_kv_heads * tokens * dims * shape.dtype.itemsize
        return read, shape.num_heads * dims * (tokens + shape.head_dim)

    def index_bytes(self, shape: LayerShape, tokens: int) -> int:
        dims = share_of(self.dims, shape.head_dim)
        basis = 4 * shape.num_kv_heads * shape.head_dim * dims
        return basis + shape.num_kv_heads * tokens * dims * shape.dtype.itemsize
