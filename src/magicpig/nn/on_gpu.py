"""What models compute between their matrix products, in one kernel each instead of up to eight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(
    x, weight, out, dim, eps, ONE_PLUS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDE)
    there = at < dim
    own = tl.load(x + row * dim + at, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    own = own * tl.rsqrt(tl.sum(own * own, 0) / dim + eps)
    if not ONE_PLUS:
        own = own.to(out.dtype.element_ty).to(tl.float32)
    own = own * (ONE_PLUS + scale)
    tl.store(out + row * dim + at, own.to(out.dtype.element_ty), mask=there)


@triton.jit
def _gate(both, out, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Some elements of a row: activation(gate) * up, of a row of gates and ups."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    gate = tl.load(both + row * 2 * size + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * size + size + at, mask=there, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608 * (gate + 0.044715 * gate * gate * gate)
        active = gate * tl.sigmoid(2.0 * inner)
    else:
        active = gate * tl.sigmoid(gate)
    tl.store(out + row * size + at, (active * up).to(out.dtype.element_ty), mask=there)


def rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus_weight: bool) -> Tensor:
    """As nn.RMSNorm, of x [..., dim]."""
    x = x.contiguous()
    out, dim = torch.empty_like(x), x.shape[-1]
    wide = triton.next_power_of_2(dim)
    if x.numel():
        _rms_norm[(x.numel() // dim,)](
            x, weight, out, dim, eps, one_plus_weight, wide, num_warps=8 if wide > 2048 else 4
        )
    return out


def gate(both: Tensor, activation: str) -> Tensor:
    """activation(gate) * up [..., size] of both side by side, [..., 2 * size]."""
    both, size = both.contiguous(), both.shape[-1] // 2
    out = both.new_empty((*both.shape[:-1], size))
    if both.numel():
        grid = out.numel() // size, triton.cdiv(size, 1024)
        _gate[grid](both, out, size, activation == "gelu_tanh", 1024)
    return out
