"""lsh: rows are drawn by hash tables and weighted by their probability, as in MagicPIG."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from magicpig.attention.base import Method
from magicpig.config import LSHConfig, WindowConfig
from magicpig.kv.base import LayerShape, SequenceLayer
from magicpig.kv.hybrid_layer import new_layer
from magicpig.kv.segments import LONGEST
from magicpig.reference import padded


@dataclass(frozen=True)
class Lsh(Method):
    """The fields of LSHConfig, which checks them."""

    name: ClassVar[str] = "lsh"
    on_host: ClassVar[bool] = True
    num_shown: ClassVar[int] = 2

    bits_per_table: int = LSHConfig.bits_per_table
    num_tables: int = LSHConfig.num_tables
    min_collisions: int = LSHConfig.min_collisions
    seed: int = LSHConfig.seed
    exact_below: int | None = LSHConfig.exact_below

    def __post_init__(self) -> None:
        assert self.index  # checks the fields

    @property
    def index(self) -> LSHConfig:
        return LSHConfig(
            self.bits_per_table, self.num_tables, self.min_collisions, self.seed, self.exact_below
        )

    def new_layer(self, shape: LayerShape, window: WindowConfig, layer: int) -> SequenceLayer:
        return new_layer(shape, self.index, window)

    def index_bytes(self, shape: LayerShape, tokens: int) -> int:
        borders = 4 * self.num_tables * (1 + (1 << self.bits_per_table))
        segment = borders + 4 * padded(shape.head_dim) + 256  # a mean, and where parts begin
        segments = -(-tokens // LONGEST)
        return shape.num_kv_heads * (tokens * (2 * self.num_tables + 4) + segments * segment)
