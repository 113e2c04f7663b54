"""The paper's estimator by masks in plain torch, as a method of its own: `lsh-mask:10:150`.

Every key is scored, and those that no two tables propose are masked out: slow, short, anywhere,
and without a line of the native path. `lsh` must score the same on the same prompts.

    python benchmarks/lsh_by_mask.py eval ruler --methods lsh:10:150,lsh-mask:10:150 ...

takes the arguments of `magicpig`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from magicpig import LSHConfig, reference
from magicpig.attention.registry import register
from magicpig.attention.scoring import Scoring
from magicpig.attention.tensor_method import NearAndFar
from magicpig.cli import main
from magicpig.kv.far_tokens import FarTokens
from magicpig.kv.tensor_layer import TensorLayer


@register
@dataclass(frozen=True)
class LshByMask(NearAndFar):
    """K and L. One segment: the far context as the prompt left it must not grow."""

    name: ClassVar[str] = "lsh-mask"
    num_shown: ClassVar[int] = 2

    bits_per_table: int = 10
    num_tables: int = 150

    @property
    def lsh(self) -> LSHConfig:
        return LSHConfig(self.bits_per_table, self.num_tables)

    def codes(self, x: Tensor) -> Tensor:
        """int16 [..., tables] of vectors [..., dim], which are hashed in bfloat16."""
        directions = reference.projection(self.lsh, x.shape[-1]).to(x.device)
        products = x.bfloat16().float() @ directions
        bits = (products >= 0).unflatten(-1, (self.num_tables, self.bits_per_table))
        powers = 2 ** torch.arange(self.bits_per_table, device=x.device)
        return (bits * powers).sum(-1).short()

    def index(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [heads, tokens, tables], 1 / |k - m| [heads, tokens], means [heads, 1, dim]."""
        keys = keys.float()
        mean = keys.mean(1, keepdim=True)
        centred = keys - mean
        codes = torch.cat([self.codes(part) for part in centred.split(2048, dim=1)], 1)
        return codes, 1 / centred.norm(dim=-1), mean

    def attend_far(
        self, layers: Sequence[TensorLayer], far: FarTokens, queries: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        codes, inverse, mean = far.derived(self.spec, self.index)
        group = queries.shape[1] // far.keys.shape[1]
        products = Scoring(1.0)(queries, far.keys)  # [batch, heads, tokens]
        shift = Scoring(1.0)(queries, mean)
        norms = queries.norm(dim=-1, keepdim=True)
        cosine = (products - shift) * inverse.repeat_interleave(group, 1) / norms
        asked = self.codes(queries)  # [batch, heads, tables]
        grouped_codes = asked.view(len(asked), far.keys.shape[1], group, 1, -1)
        counts = torch.stack(
            [
                (codes[i, :, None] == grouped_codes[i]).sum(-1, dtype=torch.int16).flatten(0, 1)
                for i in range(len(asked))
            ]
        )
        drawn = counts >= 2
        if far.hidden is not None:
            drawn &= ~far.hidden
        agree = 1 - torch.acos(cosine.double().clamp(-1, 1)) / torch.pi
        b = agree**self.bits_per_table
        miss = (1 - b) ** (self.num_tables - 1)
        u = 1 - miss * (1 - b) - self.num_tables * b * miss
        scores = scoring.bend(products) - u.clamp(min=1e-30).log().float()
        scores = scores.masked_fill(~drawn, -torch.inf)
        lse = scores.logsumexp(-1)
        finite = torch.where(lse == -torch.inf, 0.0, lse)
        weights = (scores - finite[..., None]).exp()
        grouped = weights.view(*far.keys.shape[:2], -1, far.num_tokens)
        layers[0].seats.drawn += drawn.sum((1, 2))
        return (grouped @ far.values.float()).flatten(1, 2), lse


if __name__ == "__main__":
    main()
