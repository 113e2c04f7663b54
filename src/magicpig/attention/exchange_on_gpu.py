"""What goes to the CPU in a decode step, and what is made of its answer: kernels on a GPU.

They write to and read from pinned memory themselves: no copy has to be launched beside them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from magicpig.kv.device_index import MAX_NORM

COLUMNS = 128  # of the projection, at once
MOST = tl.constexpr(MAX_NORM * MAX_NORM)


@triton.jit
def _ask(queries, asked, DIM: tl.constexpr, WIDE: tl.constexpr):
    """One query; zeros for one with numbers that are not finite, or too large."""
    head = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, WIDE)
    at, there = head * DIM + dims, dims < DIM
    query = tl.load(queries + at, mask=there, other=0.0)
    wide = query.to(tl.float32)
    fine = tl.sum(wide * wide, 0) <= MOST
    tl.store(asked + at, tl.where(fine, query, 0.0).to(asked.dtype.element_ty), mask=there)


@triton.jit
def _signs(
    queries, directions, signs, count, columns,
    DIM: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of sixteen queries and some columns: which projections are at least 0, sixteen to a word."""
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    first = tl.program_id(1) * COLUMNS
    at, dims = first + tl.arange(0, COLUMNS), tl.arange(0, WIDE)
    q = tl.load(
        queries + rows[:, None] * DIM + dims[None, :],
        mask=(rows < count)[:, None] & (dims < DIM)[None, :],
        other=0.0,
    ).to(tl.bfloat16)  # as keys are hashed
    p = tl.load(
        directions + dims[:, None] * columns + at[None, :],
        mask=(dims < DIM)[:, None] & (at < columns)[None, :],
        other=0.0,
    )
    product = tl.dot(q.to(p.dtype), p, input_precision="ieee")
    found = (product >= 0) & (at < columns)[None, :]
    bits = found.to(tl.int32) << (at % 16)[None, :]
    words = tl.sum(tl.reshape(bits, [16, COLUMNS // 16, 16]), 2)
    group = first // 16 + tl.arange(0, COLUMNS // 16)
    place = group[None, :] * count + rows[:, None]
    mask = (rows < count)[:, None] & (group * 16 < columns)[None, :]
    tl.store(signs + place, words.to(tl.int16), mask=mask)


@triton.jit
def _answer(queries, near, near_lse, far, far_lse, out, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Of one query, both parts of its attention merged; NaN where it was not asked."""
    head = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, WIDE)
    at, there = head * DIM + dims, dims < DIM
    query = tl.load(queries + at, mask=there, other=0.0).to(tl.float32)
    a, b = tl.load(near_lse + head), tl.load(far_lse + head)
    peak = tl.maximum(a, b)  # windows are never empty: finite
    weight_a, weight_b = tl.exp(a - peak), tl.exp(b - peak)
    x = tl.load(near + at, mask=there, other=0.0)
    y = tl.load(far + at, mask=there, other=0.0)
    merged = (x * weight_a + y * weight_b) / (weight_a + weight_b)
    merged = tl.where(tl.sum(query * query, 0) <= MOST, merged, float("nan"))
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=there)


def _wide(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def ask(queries: Tensor, asked: Tensor) -> None:
    """Queries [batch, heads, dim] to host memory."""
    dim = queries.shape[2]
    _ask[(queries.shape[0] * queries.shape[1],)](queries, asked, DIM=dim, WIDE=_wide(dim))


def hash_signs(queries: Tensor, directions: Tensor, signs: Tensor) -> None:
    """Signs of projections of queries [batch, heads, dim], as the native core wants them.

    directions: [dim, columns], in values that bfloat16 holds.
    signs: int16 [columns / 16, batch * heads], in host memory.
    """
    dim, columns = directions.shape
    count = queries.shape[0] * queries.shape[1]
    grid = triton.cdiv(count, 16), triton.cdiv(columns, COLUMNS)
    _signs[grid](
        queries, directions, signs, count, columns, DIM=dim, WIDE=_wide(dim), COLUMNS=COLUMNS
    )


State = tuple[Tensor, Tensor]  # output [batch, heads, dim] and log-sum-exp [batch, heads], float32


def answer(queries: Tensor, near: State, far: State) -> Tensor:
    """Attention over windows and far contexts, [batch, heads, dim]; the far part in host memory,
    and maybe of no keys."""
    dim = queries.shape[2]
    out = torch.empty_like(queries)
    grid = (queries.shape[0] * queries.shape[1],)
    _answer[grid](queries, *near, *far, out, DIM=dim, WIDE=_wide(dim))
    return out
