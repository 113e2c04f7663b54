"""TaggedLayer: a layer of a transformers cache that the attention function finds, and asks.

DecodeLayer: one of them, for steps of single tokens.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from magicpig.config import UnsupportedModel

TAG = "_magicpig_layer"  # on the keys that `update` returns: the attention function finds us there
UNUSUAL = (
    "this model changes or shares keys and values between its cache and its attention, "
    "which magicpig cannot follow"
)


_expecting = threading.local()  # .layer: whose keys the next attention in this thread must be over


class TaggedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer that does the attention over its tokens itself.

    What `update` returns goes, untouched, into exactly one call of the attention function. A model
    that does otherwise would attend to a part of its tokens only: that is an error.
    """

    supports_early_init = False
    _given: tuple[Tensor, Tensor] | None = None

    def give(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values for the attention function, which finds the layer on the keys."""
        if torch.compiler.is_compiling():
            raise RuntimeError("magicpig does not run in compiled models; leave out torch.compile")
        expect_none()
        setattr(keys, TAG, self)
        self._given = keys, values
        _expecting.layer = self
        return keys, values

    def receive(self, keys: Tensor, values: Tensor) -> None:
        """Checks what arrives at the attention function."""
        given, self._given = self._given, None
        _expecting.layer = None
        if given is None or given[0] is not keys or given[1] is not values:
            raise UnsupportedModel(UNUSUAL)

    @abstractmethod
    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        """Output [batch, tokens, heads, dim] for queries [batch, heads, tokens, dim].

        keys, values: as `update` returned them, of a whole prompt or of one new token.
        """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.shape != value_states.shape:
            raise ValueError(
                f"keys {list(key_states.shape)} and values {list(value_states.shape)} must agree "
                "in shape; this model's attention is of a kind that magicpig cannot do"
            )


def forget_pass() -> None:
    """Before a forward pass, and after one that failed, of which it lets go: nothing is expected
    from what was before."""
    layer: TaggedLayer | None = getattr(_expecting, "layer", None)
    if layer is not None:
        layer._given = None
    _expecting.layer = None


def expect_none() -> None:
    """Raises when the attention function was not called, or not with the keys it should be."""
    if getattr(_expecting, "layer", None) is not None:
        _expecting.layer = None
        raise UnsupportedModel(UNUSUAL)


Step = Callable[[Tensor, Tensor, Tensor, float, float | None], Tensor]


class DecodeLayer(TaggedLayer):
    """One layer of the sequences of a decode step.

    step: the attention: of queries [batch, heads, dim], keys, values [batch, kv_heads, dim], scale
        and softcap, [batch, heads, dim].
    num_tokens: of the longest. span: of sliding attention, or None.
    """

    def __init__(self, step: Step, num_tokens: int, span: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step, self.num_tokens = step, num_tokens
        self.is_sliding = span is not None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self.give(key_states, value_states)

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        query, key, value = queries.squeeze(2), keys.squeeze(2), values.squeeze(2)
        return self.step(query, key, value, scale, softcap).unsqueeze(1)

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0
