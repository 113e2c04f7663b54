"""full: every row is read, where the model computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from magicpig.attention.whole import WholeMethod
from magicpig.config import WindowConfig
from magicpig.kv.base import LayerShape, SequenceLayer
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.tensor_layer import TensorLayer


@dataclass(frozen=True)
class Full(WholeMethod):
    """Exact attention over keys and values in the memory of the model's device."""

    name: ClassVar[str] = "full"
    exact: ClassVar[bool] = True

    def new_layer(  # type: ignore[override]
        self, shape: LayerShape, window: WindowConfig, layer: int
    ) -> SequenceLayer:
        if shape.device.type == "cpu":
            return NativeLayer(shape, None, window)
        return TensorLayer(self, shape, window, layer)

    def there(self, tensor: Tensor, device: torch.device) -> Tensor:
        return tensor
