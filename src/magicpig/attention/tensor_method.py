"""Methods in plain torch over tensors: what they share.

Most attend to the window exactly. Of the far context they choose rows; these are gathered and
attended to, weighted if the method samples; both parts merge.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from magicpig.attention.base import Method
from magicpig.attention.merge import merge
from magicpig.attention.scoring import Scoring, attend_to_all, finite
from magicpig.config import WindowConfig
from magicpig.kv.base import LayerShape
from magicpig.kv.far_tokens import FarTokens
from magicpig.kv.seats import Seats
from magicpig.kv.tensor_layer import TensorLayer


@dataclass(frozen=True)
class Choice:
    """Rows to read.

    ids: [batch, heads, rows]. log_weights: as ids, added to their scores, -inf: not to be read;
    None: zeros. num_rows: read of each sequence over all heads; a tensor [batch] where only the
    device knows.
    """

    ids: Tensor
    log_weights: Tensor | None
    num_rows: Sequence[int] | Tensor


class TensorMethod(Method):
    """A method over a TensorLayer."""

    def new_layer(self, shape: LayerShape, window: WindowConfig, layer: int) -> TensorLayer:
        return TensorLayer(self, shape, window, layer)

    def index_bytes(self, shape: LayerShape, tokens: int) -> int:
        return 0

    def new_state(self, layer: TensorLayer) -> Any:
        """Of an empty layer."""
        return None

    def store(self, shape: LayerShape, keys: Tensor, values: Tensor) -> FarTokens:
        """Tokens [num_kv_heads, tokens, head_dim] where the method wants them."""
        return FarTokens(keys.contiguous()[None], values.contiguous()[None])

    def grown(self, layer: TensorLayer, keys: Tensor, values: Tensor) -> FarTokens:
        """The far context with these tokens behind it; what is kept of them is copied."""
        far = layer.far
        keys = torch.cat([far.keys[0], keys.to(far.keys)], 1)
        values = torch.cat([far.values[0], values.to(far.values)], 1)
        return self.store(layer.shape, keys, values)

    def watch(self, layer: TensorLayer, window_tokens: int, mass: Tensor | None) -> None:
        """Of tokens that were added to a window; see SequenceLayer.extend."""

    def collect(self, layer: TensorLayer) -> None:
        """Before a layer leaves its seats or changes there: what its steps left with them."""

    def step(
        self,
        layers: Sequence[TensorLayer],
        seats: Seats,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """A token more in each window, and attention to all: [batch, heads, dim]."""
        seats.append(keys.to(seats.keys), values.to(seats.keys))
        return self.attend(layers, seats, queries.float(), scale, softcap)

    @abstractmethod
    def attend(
        self,
        layers: Sequence[TensorLayer],
        seats: Seats,
        queries: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Output [batch, heads, dim] of queries in float32, and its cost to each layer."""


class NearAndFar(TensorMethod):
    """Attends to windows exactly and to far contexts in its own way; both parts merge."""

    def attend(
        self,
        layers: Sequence[TensorLayer],
        seats: Seats,
        queries: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        scoring = Scoring(scale, softcap)
        far = FarTokens.stack([layer.far for layer in layers])
        seats.far = far  # keeps the stack for the next step
        near = attend_to_windows(layers, seats, queries, scoring)
        if not far.num_tokens:
            return near[0]
        return merge(*near, *self.attend_far(layers, far, queries, scoring))[0]

    @abstractmethod
    def attend_far(
        self, layers: Sequence[TensorLayer], far: FarTokens, queries: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp over the far context, and what it took."""


def attend_to_windows(
    layers: Sequence[TensorLayer], seats: Seats, queries: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the windows; a step that has read nothing else so far."""
    keys, values, hidden = seats.tokens
    spend_on_step(layers)
    return attend_to_all(queries, keys, values, scoring, hidden)


def spend_on_step(layers: Sequence[TensorLayer]) -> None:
    """The cost of a step, whatever it reads."""
    for layer in layers:
        layer.spend(_asked(layer.shape, layer.far_seen))


class ChoosingMethod(NearAndFar):
    """Reads the rows that it chooses."""

    @abstractmethod
    def choose(
        self, layers: Sequence[TensorLayer], far: FarTokens, queries: Tensor, scoring: Scoring
    ) -> Choice:
        """Rows of each sequence for each query head."""

    @abstractmethod
    def search_cost(self, shape: LayerShape, tokens: int) -> tuple[int, int]:
        """Bytes and multiply-adds of a choice among so many tokens, over all heads."""

    def attend_far(
        self, layers: Sequence[TensorLayer], far: FarTokens, queries: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        choice = self.choose(layers, far, queries, scoring)
        if isinstance(choice.num_rows, Tensor):
            layers[0].seats.drawn += choice.num_rows
        for i, layer in enumerate(layers):
            layer.spend(_searched(self, layer.shape, far.lengths[i]))
            if not isinstance(choice.num_rows, Tensor):
                layer.spend_rows(choice.num_rows[i])
        return attend_to_chosen(queries, far, choice, scoring)


@lru_cache(maxsize=1024)
def _asked(shape: LayerShape, tokens: int) -> dict[str, int]:
    return {"steps": 1, "tokens": shape.num_heads * tokens}


@lru_cache(maxsize=1024)
def _searched(method: ChoosingMethod, shape: LayerShape, tokens: int) -> dict[str, int]:
    """The cost of a choice."""
    read, ops = method.search_cost(shape, tokens) if tokens else (0, 0)
    return {"search_bytes": read, "search_ops": ops}


def attend_to_chosen(
    queries: Tensor, far: FarTokens, choice: Choice, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over chosen rows, which alone are read."""
    batch, heads, dim = queries.shape
    by_kv_head = choice.ids.reshape(batch, far.keys.shape[1], -1) + far.first_rows
    at = by_kv_head.view(batch, heads, -1)
    keys, values = far.keys.view(-1, dim)[at], far.values.view(-1, dim)[at]
    scores = scoring.bend((keys.float() @ queries[..., None]).squeeze(-1))
    if choice.log_weights is not None:
        scores = scores + choice.log_weights
    lse = scores.logsumexp(-1)
    weights = (scores - finite(lse)[..., None]).exp()
    return (weights[:, :, None] @ values.float()).squeeze(2), lse


def best(scores: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """The counts[i] highest of scores [batch, heads, n]: ids [batch, heads, most], and log weights
    that leave out what is beyond a sequence's count."""
    ids = scores.topk(max(counts), dim=-1).indices
    if min(counts) == max(counts):
        return ids, None
    limits = torch.tensor(counts, device=scores.device)[:, None, None]
    beyond = torch.arange(ids.shape[-1], device=scores.device) >= limits
    return ids, torch.zeros(ids.shape, device=scores.device).masked_fill(beyond, -torch.inf)
