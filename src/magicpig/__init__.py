"""Sampled attention over a KV cache in CPU memory."""

from magicpig.attention import merge
from magicpig.config import LSHConfig, WindowConfig
from magicpig.kv import AttendStats, LayerKV, NBytes, attend
from magicpig.native import isa, num_threads, set_isa, set_num_threads, supported_isas

__version__ = "0.1.0"

__all__ = [
    "AttendStats",
    "LSHConfig",
    "LayerKV",
    "NBytes",
    "WindowConfig",
    "attend",
    "isa",
    "merge",
    "num_threads",
    "set_isa",
    "set_num_threads",
    "supported_isas",
]
