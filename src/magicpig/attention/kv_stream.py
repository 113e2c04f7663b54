"""kv-stream: keys and values wait in host memory and are copied to the device at every step.

The plain way to have a cache larger than the device's memory, as FlexGen and accelerate's offloaded
caches do. Exact; where the device is the CPU itself, the copy is one within its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from magicpig.attention.full import spend_on_all
from magicpig.attention.scoring import Scoring, attend_to_all
from magicpig.attention.tensor_method import NearAndFar
from magicpig.kv.base import LayerShape
from magicpig.kv.far_tokens import FarTokens
from magicpig.kv.tensor_layer import TensorLayer


@dataclass(frozen=True)
class KvStream(NearAndFar):
    """Exact attention on the device over a cache that is not there."""

    name: ClassVar[str] = "kv-stream"
    on_host: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    def store(self, shape: LayerShape, keys: Tensor, values: Tensor) -> FarTokens:
        keys, values = keys.cpu().contiguous()[None], values.cpu().contiguous()[None]
        if shape.device.type == "cuda" and keys.numel():
            keys, values = keys.pin_memory(), values.pin_memory()
        return FarTokens(keys, values)

    def attend_far(
        self, layers: Sequence[TensorLayer], far: FarTokens, queries: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        spend_on_all(layers, far)
        keys, values = (
            tensor.to(queries.device, copy=True, non_blocking=True)
            for tensor in (far.keys, far.values)
        )
        hidden = None if far.hidden is None else far.hidden.to(queries.device)
        return attend_to_all(queries, keys, values, scoring, hidden)
