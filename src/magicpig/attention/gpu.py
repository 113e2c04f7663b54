"""What differs between GPUs, and between versions of torch for them."""

from __future__ import annotations

from collections.abc import Callable
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


def give_back_pinned() -> None:
    """Host memory that torch keeps pinned, and that nobody uses."""
    newer: Callable[[], None] | None = getattr(torch.accelerator, "empty_host_cache", None)
    (newer or torch._C._host_emptyCache)()
