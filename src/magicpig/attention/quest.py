"""quest: pages of tokens whose bounds promise the highest scores (arXiv 2406.10774).

A page keeps the least and the greatest value that its keys have in each dimension. For a query
these bound every score in the page; the pages with the highest bounds are read whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from magicpig.attention.base import check_share, share_of
from magicpig.attention.scoring import Scoring
from magicpig.attention.tensor_method import Choice, ChoosingMethod, best
from magicpig.config import check_int
from magicpig.kv.base import LayerShape
from magicpig.kv.far_tokens import FarTokens
from magicpig.kv.tensor_layer import TensorLayer


@dataclass(frozen=True)
class Quest(ChoosingMethod):
    """page: tokens that are read together. budget: share of the pages that a query head reads."""

    name: ClassVar[str] = "quest"
    num_shown: ClassVar[int] = 2

    page: int = 16
    budget: float = 0.04

    def __post_init__(self) -> None:
        check_int("page", self.page, 1, 65536)
        check_share("budget", self.budget)

    def num_pages(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def bounds(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Least and greatest values [heads, pages, dim] of keys [heads, tokens, dim]."""
        heads, tokens, dim = keys.shape
        short = self.num_pages(tokens) * self.page - tokens
        pages = (heads, -1, self.page, dim)
        least = pad(keys, (0, 0, 0, short), value=torch.inf).view(pages).amin(2)
        greatest = pad(keys, (0, 0, 0, short), value=-torch.inf).view(pages).amax(2)
        return least, greatest

    def choose(
        self, layers: Sequence[TensorLayer], far: FarTokens, queries: Tensor, scoring: Scoring
    ) -> Choice:
        least, greatest = far.derived(self.spec, self.bounds)
        grouped = queries.view(len(queries), far.keys.shape[1], -1, queries.shape[2])
        bounds = (
            grouped.clamp(min=0) @ greatest.float().transpose(2, 3)
            + grouped.clamp(max=0) @ least.float().transpose(2, 3)
        ).flatten(1, 2)  # [batch, heads, pages]
        num_pages = [self.num_pages(tokens) for tokens in far.lengths]
        if min(num_pages) < max(num_pages):
            limits = torch.tensor(num_pages, device=queries.device)[:, None, None]
            beyond = torch.arange(bounds.shape[-1], device=queries.device) >= limits
            bounds = bounds.masked_fill(beyond, -torch.inf)
        pages, page_weights = best(bounds, [share_of(self.budget, count) for count in num_pages])
        offsets = torch.arange(self.page, device=queries.device)
        ids = (pages[..., None] * self.page + offsets).flatten(2)
        lengths = torch.tensor(far.lengths, device=queries.device)[:, None, None]
        unread = ids >= lengths
        if page_weights is not None:
            unread |= page_weights.isinf().repeat_interleave(self.page, -1)
        log_weights = torch.zeros(ids.shape, device=queries.device).masked_fill(unread, -torch.inf)
        return Choice(ids.clamp(max=far.num_tokens - 1), log_weights, (~unread).sum((1, 2)))

    def search_cost(self, shape: LayerShape, tokens: int) -> tuple[int, int]:
        elements = 2 * self.num_pages(tokens) * shape.head_dim
        return shape.num_kv_heads * elements * shape.dtype.itemsize, shape.num_heads * elements

    def index_bytes(self, shape: LayerShape, tokens: int) -> int:
        return self.search_cost(shape, tokens)[0]
