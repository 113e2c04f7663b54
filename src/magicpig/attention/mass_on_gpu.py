"""The same sums as `attention_mass`, on a GPU: scores are never written out.

Of a prompt of 32k tokens they would be terabytes. One pass finds the log-sum-exp of every query,
another adds up the weights of every key.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # queries and keys of a block of scores
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _scores(q, k, scale, softcap, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """In units of log 2."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if HAS_SOFTCAP:
        scores = (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap))) * softcap  # tanh
    return scores * LOG2_E


@triton.jit
def _log_sums(
    queries, keys, out, num_queries, tokens, group, scale, softcap,
    DIM: tl.constexpr, WIDE: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one block of queries of one head."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BQ + tl.arange(0, BQ)
    dims = tl.arange(0, WIDE)
    there = (rows < num_queries)[:, None] & (dims < DIM)[None, :]
    q = tl.load(
        queries + (head * num_queries + rows)[:, None] * DIM + dims[None, :], mask=there, other=0.0
    )
    own = keys + head // group * tokens * DIM
    seen = tokens - num_queries + rows  # the last key that each query sees
    highest = tl.full([BQ], -float("inf"), tl.float32)
    total = tl.zeros([BQ], tl.float32)
    end = tl.minimum(tokens, tokens - num_queries + (tl.program_id(0) + 1) * BQ)
    for first in range(0, end, BK):
        at = first + tl.arange(0, BK)
        k = tl.load(
            own + at[:, None] * DIM + dims[None, :],
            mask=(at < tokens)[:, None] & (dims < DIM)[None, :],
            other=0.0,
        )
        scores = _scores(q, k, scale, softcap, HAS_SOFTCAP, PRECISION)
        scores = tl.where(at[None, :] <= seen[:, None], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(scores - higher[:, None]), 1)
        highest = higher
    tl.store(out + head * num_queries + rows, highest + tl.log2(total), mask=rows < num_queries)


@triton.jit
def _sums(
    queries, keys, log_sums, out, num_queries, tokens, group, scale, softcap,
    DIM: tl.constexpr, WIDE: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one block of keys of one KV head, over all queries of its group."""
    kv_head = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BK + tl.arange(0, BK)
    dims = tl.arange(0, WIDE)
    there = (at < tokens)[:, None] & (dims < DIM)[None, :]
    k = tl.load(
        keys + (kv_head * tokens + at)[:, None] * DIM + dims[None, :], mask=there, other=0.0
    )
    mass = tl.zeros([BK], tl.float32)
    begin = tl.maximum(0, tl.program_id(0) * BK - (tokens - num_queries)) // BQ * BQ
    for i in range(0, group):
        head = kv_head * group + i
        for first in range(begin, num_queries, BQ):
            rows = first + tl.arange(0, BQ)
            q = tl.load(
                queries + (head * num_queries + rows)[:, None] * DIM + dims[None, :],
                mask=(rows < num_queries)[:, None] & (dims < DIM)[None, :],
                other=0.0,
            )
            log_sum = tl.load(
                log_sums + head * num_queries + rows, mask=rows < num_queries, other=float("inf")
            )
            scores = _scores(q, k, scale, softcap, HAS_SOFTCAP, PRECISION)
            weights = tl.exp2(scores - log_sum[:, None])
            seen = at[None, :] <= (tokens - num_queries + rows)[:, None]
            mass += tl.sum(tl.where(seen, weights, 0.0), 0)
    tl.store(out + kv_head * tokens + at, mass, mask=at < tokens)


def causal_mass(queries: Tensor, keys: Tensor, scale: float, softcap: float | None) -> Tensor:
    """As `attention_mass` without a mask."""
    queries, keys = queries.contiguous(), keys.contiguous()
    batch, heads, num_queries, dim = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    log_sums = torch.empty(batch, heads, num_queries, device=keys.device)
    mass = torch.empty(batch, kv_heads, tokens, device=keys.device)
    sizes = num_queries, tokens, heads // kv_heads, scale, softcap or 1.0
    block = BLOCK if dim * keys.dtype.itemsize <= 256 else BLOCK // 2  # what shared memory holds
    shape = {
        "DIM": dim,
        "WIDE": max(16, triton.next_power_of_2(dim)),
        "BQ": block,
        "BK": block,
        "HAS_SOFTCAP": softcap is not None,
        "PRECISION": "ieee" if keys.dtype == torch.float32 else "tf32",
    }
    blocks = triton.cdiv(num_queries, block), batch * heads
    _log_sums[blocks](queries, keys, log_sums, *sizes, **shape)
    blocks = triton.cdiv(tokens, block), batch * kv_heads
    _sums[blocks](queries, keys, log_sums, mass, *sizes, **shape)
    return mass
