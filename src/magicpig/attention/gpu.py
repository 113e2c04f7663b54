"""Whether there is Triton, which comes with torch for CUDA."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def has_triton(where: Tensor | torch.device) -> bool:
    """Whether kernels in Triton can work on a tensor, or on a device."""
    device = where.device if isinstance(where, Tensor) else where
    return device.type == "cuda" and _installed()
