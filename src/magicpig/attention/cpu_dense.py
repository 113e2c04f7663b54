"""cpu-dense: every row is read, by the CPU from its own memory, whatever the model computes on.

As FastDecode and ZeRO-Inference do: the cache never crosses to the device, queries and outputs do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from magicpig.attention.base import Method
from magicpig.config import WindowConfig
from magicpig.kv.base import LayerShape, SequenceLayer
from magicpig.kv.hybrid_layer import new_layer


@dataclass(frozen=True)
class CpuDense(Method):
    """Exact attention by the native core."""

    name: ClassVar[str] = "cpu-dense"
    on_host: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    def new_layer(self, shape: LayerShape, window: WindowConfig, layer: int) -> SequenceLayer:
        return new_layer(shape, None, window)

    def index_bytes(self, shape: LayerShape, tokens: int) -> int:
        return 0
