"""Merging attention over disjoint sets of keys: associative, commutative, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys.

    out_a, out_b: [..., head_dim], attention over each set.
    lse_a, lse_b: [...], the logs of the softmax denominators.
    The state of an empty set is (anything finite, -inf); merging two gives (0, -inf), never NaN.
    """
    for name, out, lse in (("a", out_a, lse_a), ("b", out_b, lse_b)):
        for part, tensor in ((f"out_{name}", out), (f"lse_{name}", lse)):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                raise TypeError(f"{part} must be a floating-point torch.Tensor")
            if tensor.device != out_a.device:
                raise ValueError(f"{part} is on {tensor.device}, out_a on {out_a.device}")
        if out.dim() == 0 or out.shape[:-1] != lse.shape:
            raise ValueError(
                f"lse_{name} must have out_{name}'s shape {list(out.shape)} without its last "
                f"dimension, not {list(lse.shape)}"
            )
    if out_a.shape != out_b.shape:
        raise ValueError(
            f"out_b must have out_a's shape {list(out_a.shape)}, not {list(out_b.shape)}"
        )
    lse = torch.logaddexp(lse_a, lse_b)
    base = torch.where(lse == -torch.inf, 0.0, lse)  # exp(-inf - 0) = 0 where both are empty
    weight_a = (lse_a - base).exp().unsqueeze(-1)
    weight_b = (lse_b - base).exp().unsqueeze(-1)
    return out_a * weight_a + out_b * weight_b, lse
