"""PackedEmbedding: token embeddings read out of the packed output layer they are tied to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from magicpig.nn.linear import PackedLinear


class PackedEmbedding(nn.Module):
    """Rows of `linear`'s weight, times `scale` (rounded to bfloat16) where a model wants that."""

    def __init__(self, linear: PackedLinear, scale: float | None = None) -> None:
        super().__init__()
        self.num_embeddings = linear.out_features
        self.embedding_dim = linear.in_features
        self.scale = None if scale is None else torch.tensor(scale, dtype=torch.bfloat16)
        self._native = linear._native

    def forward(self, ids: Tensor) -> Tensor:
        """bfloat16 [..., embedding_dim] of ids [...], int64 or int32."""
        out = torch.empty((*ids.shape, self.embedding_dim), dtype=torch.bfloat16)
        self._native.lookup(ids.long().contiguous(), out)
        return out if self.scale is None else out.mul_(self.scale)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"
