"""Keys and values of sequences, kept in CPU memory."""

from magicpig.kv.layer import AttendStats, LayerKV, NBytes, attend

__all__ = ["AttendStats", "LayerKV", "NBytes", "attend"]
