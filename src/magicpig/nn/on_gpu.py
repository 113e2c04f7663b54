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


@triton.jit
def _rotary(
    q, k, cos, sin, q_out, k_out, tokens, heads, q_batch, q_head, q_token, k_batch, k_head, k_token,
    DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One head of one token, of queries or of keys; rounded where torch rounds."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, token = row // tokens, row % tokens
    of_q = head < heads
    at = tl.where(
        of_q,
        batch * q_batch + head * q_head + token * q_token,
        batch * k_batch + (head - heads) * k_head + token * k_token,
    )
    kv_heads = tl.num_programs(1) - heads
    own = tl.where(of_q, row * heads + head, row * kv_heads + head - heads)
    dims = tl.arange(0, WIDE)
    there = dims < DIM // 2
    source, out = tl.where(of_q, q, k) + at, tl.where(of_q, q_out, k_out) + own * DIM
    a = tl.load(source + dims, mask=there, other=0.0)
    b = tl.load(source + DIM // 2 + dims, mask=there, other=0.0)
    turn = row * DIM + dims
    one = _product(a, tl.load(cos + turn, mask=there, other=0.0))
    two = _product(-b, tl.load(sin + turn, mask=there, other=0.0))
    tl.store(out + dims, (one + two).to(a.dtype), mask=there)
    one = _product(b, tl.load(cos + turn + DIM // 2, mask=there, other=0.0))
    two = _product(a, tl.load(sin + turn + DIM // 2, mask=there, other=0.0))
    tl.store(out + DIM // 2 + dims, (one + two).to(a.dtype), mask=there)


@triton.jit
def _product(x, y):
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype).to(tl.float32)


def can_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether `rotary` knows such tensors."""
    batch, _, tokens, dim = q.shape
    return (
        q.is_cuda
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and k.shape[::2] == q.shape[::2]
        and k.shape[3] == dim
        and cos.shape == sin.shape == (batch, tokens, dim)
        and q.stride(3) == k.stride(3) == 1
        and cos.is_contiguous()
        and sin.is_contiguous()
        and q.numel() > 0
    )


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [batch, heads, tokens, dim] and keys, turned by cos and sin [batch, tokens, dim].

    They lie token by token.
    """
    batch, heads, tokens, dim = q.shape
    out, out_k = (x.new_empty(batch, tokens, x.shape[1], dim).transpose(1, 2) for x in (q, k))
    wide = triton.next_power_of_2(dim // 2)
    _rotary[batch * tokens, heads + k.shape[1]](
        q, k, cos, sin, out, out_k, tokens, heads, *q.stride()[:3], *k.stride()[:3],
        DIM=dim, WIDE=wide, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out, out_k


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
