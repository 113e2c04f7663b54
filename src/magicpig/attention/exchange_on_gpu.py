"""What goes to the CPU in a decode step, and what is made of its answer: kernels on a GPU.

They write to and read from pinned memory themselves: no copy has to be launched beside them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from magicpig.attention.kernel_sizes import wide

COLUMNS = 128  # of the projection, at once
MOST = tl.constexpr(1e36)  # a squared norm: the native core takes no larger vectors


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
    queries, directions, signs, count, columns, stride,
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
    places = dims[:, None] * stride + at[None, :]
    p = tl.load(directions + places, mask=(dims < DIM)[:, None], other=0.0)
    product = tl.dot(q.to(p.dtype), p, input_precision="ieee")
    found = (product >= 0) & (at < columns)[None, :]
    bits = found.to(tl.int32) << (at % 16)[None, :]
    words = tl.sum(tl.reshape(bits, [16, COLUMNS // 16, 16]), 2)
    group = first // 16 + tl.arange(0, COLUMNS // 16)
    place = group[None, :] * count + rows[:, None]
    mask = (rows < count)[:, None] & (group * 16 < columns)[None, :]
    tl.store(signs + place, words.to(tl.int16), mask=mask)


@triton.jit
def _answer(
    queries, near, near_lse, far, far_lse, out, place,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    HAS_FAR: tl.constexpr, ADVANCE: tl.constexpr,
):  # fmt: skip
    """Of one query, both parts of its attention merged; NaN where it was not asked."""
    head = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, WIDE)
    at, there = head * DIM + dims, dims < DIM
    query = tl.load(queries + at, mask=there, other=0.0).to(tl.float32)
    merged = tl.load(near + at, mask=there, other=0.0)
    if HAS_FAR:
        a, b = tl.load(near_lse + head), tl.load(far_lse + head)
        peak = tl.maximum(a, b)  # windows are never empty: finite
        weight_a, weight_b = tl.exp(a - peak), tl.exp(b - peak)
        other = tl.load(far + at, mask=there, other=0.0)
        merged = (merged * weight_a + other * weight_b) / (weight_a + weight_b)
    merged = tl.where(tl.sum(query * query, 0) <= MOST, merged, float("nan"))
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=there)
    if ADVANCE:
        length = tl.load(place + 2).to(tl.pointer_type(tl.int32)) + head // HEADS
        tl.store(length, tl.load(length) + 1, mask=head % HEADS == 0)


def ask(queries: Tensor, asked: Tensor) -> None:
    """Queries [batch, heads, dim] to host memory."""
    dim = queries.shape[2]
    _ask[(queries.shape[0] * queries.shape[1],)](queries, asked, DIM=dim, WIDE=wide(dim))


def padded(directions: Tensor) -> Tensor:
    """For hash_signs: columns up to a multiple of those that it looks at together."""
    return torch.nn.functional.pad(directions, (0, -directions.shape[1] % COLUMNS)).contiguous()


def hash_signs(vectors: Tensor, directions: Tensor, columns: int, signs: Tensor) -> None:
    """Signs of projections of vectors [n, dim], as the native core wants them.

    directions: [dim, columns], padded, in values that bfloat16 holds.
    signs: int16 [columns / 16, n], in the memory of the host or of the device.
    """
    dim, stride = directions.shape
    count = len(vectors)
    grid = triton.cdiv(count, 16), triton.cdiv(columns, COLUMNS)
    _signs[grid](
        vectors,
        directions,
        signs,
        count,
        columns,
        stride,
        DIM=dim,
        WIDE=wide(dim),
        COLUMNS=COLUMNS,
    )


State = tuple[Tensor, Tensor]  # output [batch, heads, dim] and log-sum-exp [batch, heads], float32


def answer(
    queries: Tensor, near: State, far: State | None, advanced: Tensor | None = None
) -> Tensor:
    """Attention over windows and far contexts, [batch, heads, dim].

    far: in the device's memory or the host's, and maybe of no keys; None: there is none.
    advanced: the place of windows, as Seats has it, whose lengths grow by the token of this step.
    """
    batch, heads, dim = queries.shape
    out = torch.empty_like(queries)
    _answer[(batch * heads,)](
        queries,
        *near,
        *(far or near),
        out,
        near[1] if advanced is None else advanced,
        HEADS=heads,
        DIM=dim,
        WIDE=wide(dim),
        HAS_FAR=far is not None,
        ADVANCE=advanced is not None,
    )
    return out
