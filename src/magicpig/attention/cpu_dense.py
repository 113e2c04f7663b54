"""cpu-dense: every row is read, by the CPU from its own memory, whatever the model computes on.

As FastDecode and ZeRO-Inference do: the cache never crosses to the device, queries and outputs do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from magicpig.attention.on_host import HostMethod
from magicpig.kv.base import LayerShape


@dataclass(frozen=True)
class CpuDense(HostMethod):
    """Exact attention by the native core."""

    name: ClassVar[str] = "cpu-dense"
    exact: ClassVar[bool] = True

    def index_bytes(self, shape: LayerShape, tokens: int) -> int:
        return 0
