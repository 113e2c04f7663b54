"""Whether there is Triton, which comes with torch for CUDA."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def has_triton(tensor: Tensor) -> bool:
    """Whether kernels in Triton can work on a tensor."""
    return tensor.is_cuda and _installed()
