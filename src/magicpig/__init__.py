"""Sampled attention over a KV cache in CPU memory: long contexts for any Hugging Face model.

Names are fetched when they are first asked for: torch and transformers take seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magicpig import hf
    from magicpig.attention import merge
    from magicpig.config import LSHConfig, ScanConfig, WindowConfig
    from magicpig.engine.params import SamplingParams
    from magicpig.kv import AttendStats, LayerKV, NBytes, attend
    from magicpig.llm import LLM
    from magicpig.native import isa, num_threads, set_isa, set_num_threads, supported_isas

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AttendStats",
    "LSHConfig",
    "LayerKV",
    "NBytes",
    "SamplingParams",
    "ScanConfig",
    "WindowConfig",
    "attend",
    "hf",
    "isa",
    "merge",
    "num_threads",
    "set_isa",
    "set_num_threads",
    "supported_isas",
]

_MODULES = {
    "LLM": "llm",
    "SamplingParams": "engine.params",
    "LSHConfig": "config",
    "ScanConfig": "config",
    "WindowConfig": "config",
    "merge": "attention",
    **dict.fromkeys(("AttendStats", "LayerKV", "NBytes", "attend"), "kv"),
    **dict.fromkeys(
        ("isa", "num_threads", "set_isa", "set_num_threads", "supported_isas"), "native"
    ),
}


def __getattr__(name: str) -> Any:
    if name == "hf":
        return importlib.import_module("magicpig.hf")
    if name not in _MODULES:
        raise AttributeError(f"module 'magicpig' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"magicpig.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
