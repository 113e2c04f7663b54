"""A decode step over windows, in one launch: append a token to each, attend to them all.

In plain torch it takes some thirty launches, each of which costs as much as this attention.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from magicpig.attention.kernel_sizes import TYPES, keys_at_once, wide

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _step(
    queries, new_keys, new_values, place, out, lse, scale, softcap, span,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One KV head of one sequence: its window gets a token, its query heads look at all of it."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    kv_heads = tl.num_programs(1)
    keys = tl.multiple_of(tl.load(place).to(tl.pointer_type(KEYS)), 16)
    values = tl.multiple_of(tl.load(place + 1).to(tl.pointer_type(KEYS)), 16)
    length = tl.load(tl.load(place + 2).to(tl.pointer_type(tl.int32)) + row)
    capacity = tl.multiple_of(tl.load(place + 3), 16)
    dims = tl.arange(0, WIDE)
    own = (row * kv_heads + kv_head) * DIM + dims
    there = dims < DIM
    key, value = (
        tl.load(new_keys + own, mask=there, other=0.0),
        tl.load(new_values + own, mask=there, other=0.0),
    )
    base = (row * kv_heads + kv_head) * capacity * DIM
    tl.store(keys + base + length * DIM + dims, key, mask=there)
    tl.store(values + base + length * DIM + dims, value, mask=there)
    heads = tl.arange(0, HEADS)
    asked = (row * kv_heads * GROUP + kv_head * GROUP + heads)[:, None] * DIM + dims[None, :]
    q = tl.load(queries + asked, mask=(heads < GROUP)[:, None] & there[None, :], other=0.0)
    # The new token is looked at first: what was stored just now is not read back.
    score = tl.sum(q.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
    if HAS_SOFTCAP:
        score = (1.0 - 2.0 / (1.0 + tl.exp(2.0 * score / softcap))) * softcap
    highest = score * LOG2_E
    total = tl.full([HEADS], 1.0, tl.float32)
    sums = tl.zeros([HEADS, WIDE], tl.float32) + value.to(tl.float32)[None, :]
    first = tl.maximum(0, length + 1 - span)
    for begin in range(first // BLOCK * BLOCK, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        seen = (at < length) & (at >= first)
        rows = base + at[:, None] * DIM + dims[None, :]
        mask = seen[:, None] & there[None, :]
        k = tl.load(keys + rows, mask=mask, other=0.0)
        v = tl.load(values + rows, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            scores = (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap))) * softcap
        scores = tl.where(seen[None, :], scores * LOG2_E, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weights, 1)
        if PRECISION == "ieee":
            added = tl.dot(weights, v.to(tl.float32), input_precision=PRECISION)
        else:
            added = tl.dot(weights.to(v.dtype), v)
        sums = sums * fade[:, None] + added
        highest = higher
    result = row * kv_heads * GROUP + kv_head * GROUP + heads
    tl.store(lse + result, (highest + tl.log2(total)) / LOG2_E, mask=heads < GROUP)
    tl.store(out + asked, sums / total[:, None], mask=(heads < GROUP)[:, None] & there[None, :])


def step(
    queries: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    place: Tensor,
    scale: float,
    softcap: float | None,
    span: int | None,
    near: tuple[Tensor, Tensor],
) -> None:
    """Fills near: output [batch, heads, dim] and log-sum-exp [batch, heads], float32.

    queries: [batch, heads, dim]. new_keys, new_values: [batch, kv_heads, dim], in the windows'
    dtype, written behind the tokens that there are. place: of the windows, as Seats has it.
    span: of the newest tokens, how many are seen.
    """
    batch, heads, dim = queries.shape
    kv_heads, keys_dtype = new_keys.shape[1], new_keys.dtype
    group = heads // kv_heads
    exact = torch.float32 in (queries.dtype, keys_dtype)
    dtype = torch.float32 if exact else keys_dtype
    _step[batch, kv_heads](
        queries.to(dtype).contiguous(),
        new_keys.contiguous(),
        new_values.contiguous(),
        place,
        *near,
        scale,
        softcap or 1.0,
        span or 2**30,
        GROUP=group,
        HEADS=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        WIDE=wide(dim),
        BLOCK=keys_at_once(dim, dtype),
        HAS_SOFTCAP=softcap is not None,
        PRECISION="ieee" if exact else "tf32",
        KEYS=TYPES[keys_dtype],
    )
