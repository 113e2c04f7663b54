"""Attention of single queries to all keys of far contexts, each where it lies in the GPU's memory.

Contexts of a batch need not be of one length, nor side by side: the kernel has their addresses.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from magicpig.attention.kernel_sizes import TYPES, keys_at_once, wide

PROGRAMS = 512  # that a launch should have at least, to fill a GPU
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _part(
    queries, contexts, outs, lses, scale, softcap,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The query heads of one KV head over some tokens of one sequence."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    part, parts = tl.program_id(2), tl.num_programs(2)
    kv_heads = tl.num_programs(1)
    length = tl.load(contexts + 3 * row + 2)
    dims, heads = tl.arange(0, WIDE), tl.arange(0, HEADS)
    there = dims < DIM
    head = row * kv_heads * GROUP + kv_head * GROUP + heads
    q = tl.load(
        queries + head[:, None] * DIM + dims[None, :],
        mask=(heads < GROUP)[:, None] & there[None, :],
        other=0.0,
    )
    base = kv_head * length * DIM
    keys = tl.load(contexts + 3 * row).to(tl.pointer_type(KEYS))
    values = tl.load(contexts + 3 * row + 1).to(tl.pointer_type(KEYS))
    keys, values = tl.multiple_of(keys, 16) + base, tl.multiple_of(values, 16) + base
    part_tokens = tl.cdiv(tl.cdiv(length, parts), BLOCK) * BLOCK
    first = part * part_tokens
    end = tl.minimum(length, first + part_tokens)
    highest = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, WIDE], tl.float32)
    for begin in range(first, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        place = at[:, None] * DIM + dims[None, :]
        mask = (at < end)[:, None] & there[None, :]
        k = tl.load(keys + place, mask=mask, other=0.0)
        v = tl.load(values + place, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            scores = (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap))) * softcap
        scores = tl.where((at < end)[None, :], scores * LOG2_E, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weights, 1)
        sums = sums * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        highest = higher
    found = total > 0
    lse = tl.where(found, (highest + tl.log2(tl.where(found, total, 1.0))) / LOG2_E, -float("inf"))
    place = head * parts + part
    tl.store(lses + place, lse, mask=heads < GROUP)
    tl.store(
        outs + place[:, None].to(tl.int64) * DIM + dims[None, :],
        sums / tl.where(found, total, 1.0)[:, None],
        mask=(heads < GROUP)[:, None] & there[None, :],
    )


@triton.jit
def _join(
    outs, lses, out, lse, parts, DIM: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """The parts of one query head."""
    head = tl.program_id(0).to(tl.int64)
    dims, part = tl.arange(0, WIDE), tl.arange(0, PARTS)
    own = tl.load(lses + head * parts + part, mask=part < parts, other=-float("inf"))
    highest = tl.max(own, 0)
    peak = tl.where(highest > -float("inf"), highest, 0.0)
    weights = tl.exp(own - peak)
    place = (head * parts + part)[:, None] * DIM + dims[None, :]
    mask = (part < parts)[:, None] & (dims < DIM)[None, :]
    sums = tl.sum(weights[:, None] * tl.load(outs + place, mask=mask, other=0.0), 0)
    total = tl.sum(weights, 0)
    tl.store(out + head * DIM + dims, sums / tl.where(total > 0, total, 1.0), mask=dims < DIM)
    tl.store(lse + head, peak + tl.log(total))


def attend(
    queries: Tensor,
    contexts: Tensor,
    kv_heads: int,
    dtype: torch.dtype,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, dim] and log-sum-exp [batch, heads], in float32.

    contexts: int64 [batch, 3], on the device: addresses of keys and of values, both [kv_heads,
    tokens, dim] of the dtype, and the tokens.
    """
    batch, heads, dim = queries.shape
    parts = max(1, min(128, PROGRAMS // (batch * kv_heads)))
    outs = torch.empty(batch, heads, parts, dim, device=queries.device)
    lses = torch.empty(batch, heads, parts, device=queries.device)
    out = torch.empty(batch, heads, dim, device=queries.device)
    lse = torch.empty(batch, heads, device=queries.device)
    group = heads // kv_heads
    _part[batch, kv_heads, parts](
        queries.to(dtype).contiguous(),
        contexts,
        outs,
        lses,
        scale,
        softcap or 1.0,
        GROUP=group,
        HEADS=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        WIDE=wide(dim),
        BLOCK=keys_at_once(dim, dtype),
        HAS_SOFTCAP=softcap is not None,
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        KEYS=TYPES[dtype],
    )
    _join[(batch * heads,)](
        outs, lses, out, lse, parts, DIM=dim, WIDE=wide(dim), PARTS=triton.next_power_of_2(parts)
    )
    return out, lse
