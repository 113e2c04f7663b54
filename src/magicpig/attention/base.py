"""Method: how attention over the far context is done. The seam that all methods stand behind."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import fields
from typing import ClassVar

from magicpig.config import Strict, WindowConfig
from magicpig.kv.base import LayerShape, SequenceLayer


class Method(Strict, ABC):
    """A frozen dataclass whose fields are the method's parameters, in the order of its spec.

    name: by which the method is asked for.
    num_shown: parameters that its spec always shows.
    exact: whether every row is read, in all layers.
    watches_prompts: whether layers want to know the attention that the prompt's tokens got.
    keeps_all: whether every token can be read again, or some are evicted.
    on_host: whether far contexts are in host memory, whatever the model computes on.
    """

    name: ClassVar[str]
    num_shown: ClassVar[int] = 0
    exact: ClassVar[bool] = False
    watches_prompts: ClassVar[bool] = False
    keeps_all: ClassVar[bool] = True
    on_host: ClassVar[bool] = False

    @property
    def kept_share(self) -> float:
        """Of the far tokens, that are kept."""
        return 1.0

    @abstractmethod
    def new_layer(self, shape: LayerShape, window: WindowConfig, layer: int) -> SequenceLayer:
        """An empty sequence in a model's layer."""

    @abstractmethod
    def index_bytes(self, shape: LayerShape, tokens: int) -> int:
        """What a layer keeps beside keys and values, about."""

    @property
    def spec(self) -> str:
        """The method in one word, like lsh:10:150; `parse` reads it."""
        words = [self.name]
        for i, field in enumerate(fields(self)):
            value = getattr(self, field.name)
            word = f"{100 * value:.12g}%" if isinstance(field.default, float) else str(value)
            if i < self.num_shown:
                words.append(word)
            elif value != field.default:
                words.append(f"{field.name}={word}")
        return ":".join(words)


def check_share(name: str, value: object) -> None:
    """Raises unless `value` is a share above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a share, like 2% or 0.02, not {value!r}")
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 100 %, not {100 * value:g} %")


def share_of(share: float, tokens: int) -> int:
    """So many of the tokens, rounded up."""
    return min(tokens, math.ceil(share * tokens - 1e-9))
