"""HostMethod: a method of the native core, which attends to far contexts in host memory."""

from __future__ import annotations

from typing import ClassVar

from magicpig.attention.base import Method
from magicpig.config import IndexConfig, WindowConfig
from magicpig.kv.base import LayerShape, SequenceLayer
from magicpig.kv.hybrid_layer import new_layer


class HostMethod(Method):
    """index: how the native core draws rows; None: it reads all."""

    on_host: ClassVar[bool] = True

    @property
    def index(self) -> IndexConfig | None:
        return None

    def new_layer(self, shape: LayerShape, window: WindowConfig, layer: int) -> SequenceLayer:
        return new_layer(shape, self.index, window)
