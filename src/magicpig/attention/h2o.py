"""h2o: heavy hitters stay, what is left is evicted (arXiv 2306.14048).

Every token kept gathers the attention it gets, from the prompt's queries and from every step. When
tokens leave the window, those of the far context with the least are evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from magicpig.attention.base import check_share, share_of
from magicpig.attention.scoring import Scoring
from magicpig.attention.tensor_method import TensorMethod
from magicpig.kv.base import LayerShape
from magicpig.kv.far_tokens import FarTokens
from magicpig.kv.seats import Seats
from magicpig.kv.tensor_layer import TensorLayer


@dataclass
class Mass:
    """Attention that tokens have got so far, over the query heads of a group.

    far, near: [num_kv_heads, tokens], of the far context and of the window.
    """

    far: Tensor
    near: Tensor


def _fitted(sums: Tensor, tokens: int) -> Tensor:
    """Of so many tokens; what lies behind them is zero."""
    return pad(sums, (0, tokens - sums.shape[-1]))


def _tokens(far: FarTokens, near_keys: Tensor) -> int:
    return far.num_tokens + near_keys.shape[2]


@lru_cache(maxsize=1024)
def _read(shape: LayerShape, seen: int, kept: int) -> dict[str, int]:
    """The cost of a step: all that was kept, once for a group."""
    return {
        "steps": 1,
        "tokens": shape.num_heads * seen,
        "rows": shape.num_heads * kept,
        "row_bytes": shape.num_kv_heads * kept * shape.row_bytes,
    }


@dataclass(frozen=True)
class H2O(TensorMethod):
    """budget: share of the far tokens that each KV head keeps; the recent ones are the window's."""

    name: ClassVar[str] = "h2o"
    num_shown: ClassVar[int] = 1
    watches_prompts: ClassVar[bool] = True
    keeps_all: ClassVar[bool] = False

    budget: float = 0.2

    def __post_init__(self) -> None:
        check_share("budget", self.budget)

    @property
    def kept_share(self) -> float:
        return self.budget

    def new_state(self, layer: TensorLayer) -> Mass:
        none = torch.zeros(layer.shape.num_kv_heads, 0, device=layer.shape.device)
        return Mass(none, none)

    def watch(self, layer: TensorLayer, window_tokens: int, mass: Tensor | None) -> None:
        if mass is None:
            raise ValueError(
                "h2o needs the attention that a prompt's tokens got: it cannot go on from a "
                "text that was read by another method"
            )
        state: Mass = layer.state
        state.near = pad(state.near, (0, window_tokens - state.near.shape[1]))
        sinks, far = layer.config.sinks, state.far.shape[1]
        mass = mass.to(state.near)
        state.far = state.far + mass[:, sinks : sinks + far]
        state.near = state.near + torch.cat([mass[:, :sinks], mass[:, sinks + far :]], 1)

    def grown(self, layer: TensorLayer, keys: Tensor, values: Tensor) -> FarTokens:
        state: Mass = layer.state
        sinks, count = layer.config.sinks, keys.shape[1]
        mass = torch.cat([state.far, state.near[:, sinks : sinks + count]], 1)
        state.near = torch.cat([state.near[:, :sinks], state.near[:, sinks + count :]], 1)
        keys = torch.cat([layer.far.keys[0], keys], 1)
        values = torch.cat([layer.far.values[0], values], 1)
        kept = min(share_of(self.budget, layer.far_seen), mass.shape[1])
        heavy, _ = mass.topk(kept, dim=1).indices.sort(1)  # in their order
        state.far = mass.gather(1, heavy)
        rows = heavy[..., None].expand(-1, -1, keys.shape[2])
        return self.store(layer.shape, keys.gather(1, rows), values.gather(1, rows))

    def attend(
        self,
        layers: Sequence[TensorLayer],
        seats: Seats,
        queries: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        scoring = Scoring(scale, softcap)
        far = seats.far = FarTokens.stack([layer.far for layer in layers])
        keys, values, hidden = seats.tokens
        scores = [
            scores if mask is None else scores.masked_fill(mask, -torch.inf)
            for scores, mask in (
                (scoring(queries, far.keys), far.hidden),
                (scoring(queries, keys), hidden),
            )
        ]
        weights = torch.cat(scores, -1).softmax(-1).view(*keys.shape[:2], -1, _tokens(far, keys))
        got = weights.sum(2)  # [batch, kv_heads, far and near tokens]
        self._gather(seats, got[..., : far.num_tokens], got[..., far.num_tokens :])
        for layer, kept in zip(layers, far.lengths, strict=True):
            layer.spend(_read(layer.shape, layer.far_seen, kept))
        rows = torch.cat([far.values, values], 2)
        return (weights @ rows.float()).flatten(1, 2)

    @staticmethod
    def _gather(seats: Seats, far: Tensor, near: Tensor) -> None:
        """Adds to what tokens of the batch got since they sit there."""
        sums = seats.sums or (torch.zeros_like(far), torch.zeros_like(near))
        seats.sums = (
            _fitted(sums[0], far.shape[2]) + far,
            _fitted(sums[1], near.shape[2]) + near,
        )

    def collect(self, layer: TensorLayer) -> None:
        if layer.seats.sums is None:
            return
        state: Mass = layer.state
        far, near = (part[layer.seat] for part in layer.seats.sums)
        window = layer.seats.lengths[layer.seat]
        state.near = _fitted(state.near, window) + _fitted(near, window)
        state.far = state.far + _fitted(far, state.far.shape[1])
        far.zero_()
        near.zero_()
