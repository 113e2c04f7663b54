"""Sizes and types that kernels in Triton share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
KEY_BYTES = 16384  # of keys, looked at together


def wide(dim: int) -> int:
    """Elements that a kernel takes for a head's: a power of two."""
    return max(16, int(triton.next_power_of_2(dim)))


def keys_at_once(dim: int, dtype: torch.dtype) -> int:
    return min(64, max(16, KEY_BYTES // (wide(dim) * dtype.itemsize)))
