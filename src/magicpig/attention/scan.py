"""scan: rows are drawn by a pass over codes of all keys, and weighted by their probability."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from magicpig.attention.on_host import HostMethod
from magicpig.config import ScanConfig
from magicpig.kv.base import LayerShape
from magicpig.kv.segments import LONGEST
from magicpig.reference import padded


@dataclass(frozen=True)
class Scan(ScanConfig, HostMethod):
    """The fields of ScanConfig, which checks them."""

    name: ClassVar[str] = "scan"
    num_shown: ClassVar[int] = 2

    @property
    def index(self) -> ScanConfig:
        return ScanConfig(**asdict(self))

    def index_bytes(self, shape: LayerShape, tokens: int) -> int:
        dim, segments = padded(shape.head_dim), -(-tokens // LONGEST)
        key = 4 * -(-dim * self.bits_per_dim // 32) + 8
        return shape.num_kv_heads * (-(-tokens // 16) * 16 * key + segments * 8 * dim)
