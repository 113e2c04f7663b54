"""What goes to the CPU in a decode step, and what is made of its answer: kernels on a GPU.

They write to and read from pinned memory themselves: no copy has to be launched beside them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from magicpig.attention.kernel_sizes import wide

COLUMNS = 128  # of the projection, at once, at most
ROWS = 16  # queries
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
def write_signs(
    vectors, rows, first, directions, signs, count, columns, stride,
    DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of some of `count` vectors, and columns from the first on: which projections are at least 0,
    sixteen to a word. Vectors are in bfloat16, as the native core hashes."""
    at, dims = first + tl.arange(0, COLUMNS), tl.arange(0, WIDE)
    places = dims[:, None] * stride + at[None, :]
    p = tl.load(directions + places, mask=(dims < DIM)[:, None], other=0.0)
    product = tl.dot(vectors.to(p.dtype), p, input_precision="ieee")
    found = (product >= 0) & (at < columns)[None, :]
    bits = found.to(tl.int32) << (at % 16)[None, :]
    words = tl.sum(tl.reshape(bits, [ROWS, COLUMNS // 16, 16]), 2)
    group = first // 16 + tl.arange(0, COLUMNS // 16)
    place = group[None, :] * count + rows[:, None]
    mask = (rows < count)[:, None] & (group * 16 < columns)[None, :]
    tl.store(signs + place, words.to(tl.int16), mask=mask)


@triton.jit
def _signs(
    queries, directions, signs, count, columns, stride,
    DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    q = tl.load(
        queries + rows[:, None] * DIM + dims[None, :],
        mask=(rows < count)[:, None] & (dims < DIM)[None, :],
        other=0.0,
    ).to(tl.bfloat16)
    first = tl.program_id(1) * COLUMNS
    write_signs(q, rows, first, directions, signs, count, columns, stride, DIM, WIDE, ROWS, COLUMNS)


@triton.jit
def _stamp(stamp):
    tl.store(stamp, globaltimer())


@triton.jit
def _fenced(number):
    return tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.b64 $0, $1;", "=l,l", [number], tl.int64, False, 1
    )


@triton.jit
def _send(ticket, arrived, stamp, HAS_STAMP: tl.constexpr, ON_GPU: tl.constexpr):
    """The next ticket, which shows the host that all before it in the stream has arrived."""
    number = tl.load(ticket) + 1
    tl.store(ticket, number)
    if HAS_STAMP:
        tl.store(stamp, globaltimer())
    if ON_GPU:  # what earlier kernels wrote to the host's memory is there before the ticket
        number = _fenced(number)
    tl.store(arrived, number)


@triton.jit
def _await(ticket, answered, stamps, HAS_STAMPS: tl.constexpr, ON_GPU: tl.constexpr):
    """Until the host has answered what was sent with the ticket."""
    if HAS_STAMPS:
        tl.store(stamps, globaltimer())
    number = tl.load(ticket)
    seen = tl.load(answered, volatile=True)
    while seen < number:
        seen = tl.load(answered, volatile=True)
    if ON_GPU:
        _fenced(seen)
    if HAS_STAMPS:
        tl.store(stamps + 1, globaltimer())


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


def hash_signs(queries: Tensor, directions: Tensor, columns: int, signs: Tensor) -> None:
    """Signs of projections of queries [n, dim], as the native core wants them.

    directions: [dim, columns], padded, in values that bfloat16 holds.
    signs: int16 [columns / 16, n], in the memory of the host or of the device.
    """
    dim, stride = directions.shape
    count = len(queries)
    at_once = max(16, min(COLUMNS, 16384 // wide(dim)))  # GPUs before Ampere have room for no more
    grid = triton.cdiv(count, ROWS), triton.cdiv(columns, at_once)
    _signs[grid](
        queries,
        directions,
        signs,
        count,
        columns,
        stride,
        DIM=dim,
        WIDE=wide(dim),
        ROWS=ROWS,
        COLUMNS=at_once,
    )


def write_stamp(stamp: Tensor) -> None:
    """The GPU's time, in nanoseconds, when it comes to this."""
    _stamp[(1,)](stamp, num_warps=1)


def send(ticket: Tensor, arrived: Tensor, stamp: Tensor | None) -> None:
    """Counts the ticket up, and writes it to `arrived` in host memory. All int64 [1]."""
    _send[(1,)](
        ticket,
        arrived,
        ticket if stamp is None else stamp,
        HAS_STAMP=stamp is not None,
        ON_GPU=ticket.is_cuda,
        num_warps=1,
    )


def await_answer(ticket: Tensor, answered: Tensor, stamps: Tensor | None) -> None:
    """The stream goes on when `answered`, in host memory, has come to the ticket. All int64 [1].

    stamps: int64 [2], for when the GPU began to wait and when it ended.
    """
    _await[(1,)](
        ticket,
        answered,
        ticket if stamps is None else stamps,
        HAS_STAMPS=stamps is not None,
        ON_GPU=ticket.is_cuda,
        num_warps=1,
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
