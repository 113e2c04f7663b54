"""full: every row is read, where the model computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from magicpig.attention.scoring import Scoring, attend_to_all
from magicpig.attention.tensor_method import NearAndFar
from magicpig.config import WindowConfig
from magicpig.kv.base import LayerShape, SequenceLayer
from magicpig.kv.far_tokens import FarTokens
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.tensor_layer import TensorLayer


@dataclass(frozen=True)
class Full(NearAndFar):
    """Exact attention over keys and values in the memory of the model's device."""

    name: ClassVar[str] = "full"
    exact: ClassVar[bool] = True

    def new_layer(  # type: ignore[override]
        self, shape: LayerShape, window: WindowConfig, layer: int
    ) -> SequenceLayer:
        if shape.device.type == "cpu":
            return NativeLayer(shape, None, window)
        return TensorLayer(self, shape, window, layer)

    def attend_far(
        self, layers: Sequence[TensorLayer], far: FarTokens, queries: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        spend_on_all(layers, far)
        return attend_to_all(queries, far.keys, far.values, scoring, far.hidden)


def spend_on_all(layers: Sequence[TensorLayer], far: FarTokens) -> None:
    """The cost of reading every row, once for a group."""
    for layer, tokens in zip(layers, far.lengths, strict=True):
        shape = layer.shape
        rows, row_bytes = shape.num_heads * tokens, shape.num_kv_heads * tokens * shape.row_bytes
        layer.spend({"rows": rows, "row_bytes": row_bytes})
