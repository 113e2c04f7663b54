"""scan: rows are drawn by a pass over codes of all keys, and weighted by their probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from magicpig.attention.base import Method
from magicpig.config import ScanConfig, WindowConfig
from magicpig.kv.base import LayerShape, SequenceLayer
from magicpig.kv.hybrid_layer import new_layer
from magicpig.kv.segments import LONGEST
from magicpig.reference import padded


@dataclass(frozen=True)
class Scan(Method):
    """The fields of ScanConfig, which checks them."""

    name: ClassVar[str] = "scan"
    on_host: ClassVar[bool] = True
    num_shown: ClassVar[int] = 2

    bits_per_dim: int = ScanConfig.bits_per_dim
    budget: float = ScanConfig.budget
    min_rows: int = ScanConfig.min_rows
    seed: int = ScanConfig.seed
    exact_below: int = ScanConfig.exact_below
    target_error: float | None = ScanConfig.target_error

    def __post_init__(self) -> None:
        assert self.index  # checks the fields

    @property
    def index(self) -> ScanConfig:
        return ScanConfig(
            self.bits_per_dim,
            self.budget,
            self.min_rows,
            self.seed,
            self.exact_below,
            self.target_error,
        )

    def new_layer(self, shape: LayerShape, window: WindowConfig, layer: int) -> SequenceLayer:
        return new_layer(shape, self.index, window)

    def index_bytes(self, shape: LayerShape, tokens: int) -> int:
        dim, segments = padded(shape.head_dim), -(-tokens // LONGEST)
        key = 4 * -(-dim * self.bits_per_dim // 32) + 8
        return shape.num_kv_heads * (-(-tokens // 16) * 16 * key + segments * 8 * dim)
