"""kv-stream: keys and values wait in host memory and are copied to the device at every step.

The plain way to have a cache larger than the device's memory, as FlexGen and accelerate's offloaded
caches do. Exact; where the device is the CPU itself, the copy is one within its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from magicpig.attention.whole import WholeMethod
from magicpig.kv.base import LayerShape
from magicpig.kv.far_tokens import FarTokens


@dataclass(frozen=True)
class KvStream(WholeMethod):
    """Exact attention on the device over a cache that is not there."""

    name: ClassVar[str] = "kv-stream"
    on_host: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    def store(self, shape: LayerShape, keys: Tensor, values: Tensor) -> FarTokens:
        keys, values = keys.cpu().contiguous()[None], values.cpu().contiguous()[None]
        if shape.device.type == "cuda" and keys.numel():
            keys, values = keys.pin_memory(), values.pin_memory()
        return FarTokens(keys, values)

    def there(self, tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.to(device, copy=True, non_blocking=True)
