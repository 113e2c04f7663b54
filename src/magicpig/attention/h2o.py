"""h2o: heavy hitters stay, what is left is evicted (arXiv 2306.14048).

Every token kept gathers the attention it gets, from the prompt's queries and from every step. When
tokens leave the window, those of the far context with the least are evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from magicpig.attention.base import check_share, share_of
from magicpig.attention.tensor_method import Scoring, TensorMethod
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
        return torch.stack(
            [
                self._attend_one(layer, *seats.window(i), queries[i], scoring)
                for i, layer in enumerate(layers)
            ]
        )

    def _attend_one(
        self, layer: TensorLayer, keys: Tensor, values: Tensor, query: Tensor, scoring: Scoring
    ) -> Tensor:
        state: Mass = layer.state
        far, heads = layer.far.num_tokens, layer.shape.num_heads
        keys = torch.cat([layer.far.keys[0], keys], 1)[None]
        values = torch.cat([layer.far.values[0], values], 1)
        weights = scoring(query[None], keys)[0].softmax(-1)  # [heads, tokens]
        grouped = weights.view(layer.shape.num_kv_heads, -1, weights.shape[1])
        got = grouped.sum(1)
        state.far = state.far + got[:, :far]
        state.near = pad(state.near, (0, 1)) + got[:, far:]
        layer.spend(
            steps=1,
            tokens=heads * layer.far_seen,
            rows=heads * far,
            row_bytes=-(heads - layer.shape.num_kv_heads) * far * layer.shape.row_bytes,
        )
        return (grouped @ values.float()).flatten(0, 1)

    def attend_far(
        self, layers: Sequence[TensorLayer], far: FarTokens, queries: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        raise AssertionError("far and near are one here")
