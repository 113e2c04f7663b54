"""Sampled attention over a KV cache in CPU memory: long contexts for any Hugging Face model.

`LLM`, `SamplingParams` and `hf` need transformers, which takes seconds to import: they are fetched
when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from magicpig.attention import merge
from magicpig.config import LSHConfig, WindowConfig
from magicpig.kv import AttendStats, LayerKV, NBytes, attend
from magicpig.native import isa, num_threads, set_isa, set_num_threads, supported_isas

if TYPE_CHECKING:
    from magicpig import hf
    from magicpig.engine.params import SamplingParams
    from magicpig.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AttendStats",
    "LSHConfig",
    "LayerKV",
    "NBytes",
    "SamplingParams",
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


def __getattr__(name: str) -> Any:
    if name == "LLM":
        return importlib.import_module("magicpig.llm").LLM
    if name == "SamplingParams":
        return importlib.import_module("magicpig.engine.params").SamplingParams
    if name == "hf":
        return importlib.import_module("magicpig.hf")
    raise AttributeError(f"module 'magicpig' has no attribute {name!r}")
