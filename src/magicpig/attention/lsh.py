"""lsh: rows are drawn by hash tables and weighted by their probability, as in MagicPIG."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from magicpig.attention.on_host import HostMethod
from magicpig.config import LSHConfig
from magicpig.kv.base import LayerShape
from magicpig.kv.segments import LONGEST
from magicpig.reference import padded


@dataclass(frozen=True)
class Lsh(LSHConfig, HostMethod):
    """The fields of LSHConfig, which checks them."""

    name: ClassVar[str] = "lsh"
    num_shown: ClassVar[int] = 2

    @property
    def index(self) -> LSHConfig:
        return LSHConfig(**asdict(self))

    def index_bytes(self, shape: LayerShape, tokens: int) -> int:
        borders = 4 * self.num_tables * (1 + (1 << self.bits_per_table))
        segment = borders + 4 * padded(shape.head_dim) + 256  # a mean, and where parts begin
        segments = -(-tokens // LONGEST)
        return shape.num_kv_heads * (tokens * (2 * self.num_tables + 4) + segments * segment)
