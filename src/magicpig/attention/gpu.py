"""What differs between GPUs, and between versions of torch for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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


def empty_host_cache() -> None:
    """Host memory that torch keeps pinned, and that nobody uses."""
    newer: Callable[[], None] | None = getattr(torch.accelerator, "empty_host_cache", None)
    (newer or torch._C._host_emptyCache)()


def is_out_of_memory(error: BaseException) -> bool:
    """Of a device's memory, or of the host's that can be pinned; not all say so by their type."""
    words = "out of memory", "ALLOC_FAILED"
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def leave_pool(device: torch.device, pool: tuple[int, int]) -> None:
    """After a recording that could not be ended: older versions of torch would go on to take memory
    from its pool, and keep back what others free."""
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)  # raises where torch has done so
        torch._C._cuda_releasePool(device.index, pool)
