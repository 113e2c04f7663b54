"""Keys sorted into hash tables on a GPU, as the native core has them.

A warp makes a table: it counts the keys of each bucket, adds the counts up, and puts the keys to
their places, in their order, 32 at a time. Tables are many, so all warps have enough to do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 256  # keys that are counted, or buckets, at most
LANES = tl.constexpr(32)

# Of each lane, how many before it and behind it have the same number.
ALIKE = tl.constexpr("""{
    .reg .b32 mine, other;
    match.any.sync.b32 mine, $2, 0xffffffff;
    mov.u32 other, %lanemask_lt;
    and.b32 other, other, mine;
    popc.b32 $0, other;
    mov.u32 other, %lanemask_gt;
    and.b32 other, other, mine;
    popc.b32 $1, other;
}""")


@triton.jit
def _codes(signs, at, tokens, shift, BITS: tl.constexpr):
    """Buckets of some keys, and -1 behind the last one."""
    there = at < tokens
    low = tl.load(signs + at, mask=there, other=0).to(tl.int32) & 0xFFFF
    reach = tl.where(shift + BITS > 16, tokens, 0)  # none where the first word has all bits
    high = tl.load(signs + tokens + at, mask=at < reach, other=0).to(tl.int32) & 0xFFFF
    codes = ((low | (high << 16)) >> shift) & ((1 << BITS) - 1)
    return tl.where(there, codes, -1)


@triton.jit
def _alike(codes, lanes, ON_GPU: tl.constexpr):
    if ON_GPU:
        return tl.inline_asm_elementwise(
            ALIKE, "=r,=r,r", [codes], (tl.int32, tl.int32), is_pure=False, pack=1
        )
    alike, others = codes[:, None] == codes[None, :], lanes[None, :] - lanes[:, None]
    before = tl.sum((alike & (others < 0)).to(tl.int32), 1)
    return before, tl.sum((alike & (others > 0)).to(tl.int32), 1)


@triton.jit
def _sort(
    signs, places, offsets, ids, tokens, words,
    BITS: tl.constexpr, COUNTED: tl.constexpr, BUCKETS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """places: for each bucket 0, and then where its next key goes."""
    table, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    buckets: tl.constexpr = 1 << BITS
    own = head * tl.num_programs(0) + table
    signs += (head * words + table * BITS // 16) * tokens
    shift = table * BITS % 16
    places, offsets, ids = places + own * buckets, offsets + own * (buckets + 1), ids + own * tokens
    for first in range(0, tokens, COUNTED):
        codes = _codes(signs, first + tl.arange(0, COUNTED), tokens, shift, BITS)
        tl.atomic_add(places + codes, 1, mask=codes >= 0, sem="relaxed")
    tl.debug_barrier()
    total = 0
    for first in range(0, buckets, BUCKETS):
        at = first + tl.arange(0, BUCKETS)
        counts = tl.load(places + at, cache_modifier=".cg")
        ends = total + tl.cumsum(counts, 0)
        tl.store(places + at, ends - counts)
        tl.store(offsets + 1 + at, ends)
        total += tl.sum(counts, 0)
    tl.store(offsets, 0)
    tl.debug_barrier()
    lanes = tl.arange(0, LANES)
    codes = _codes(signs, lanes, tokens, shift, BITS)
    for first in range(0, tokens, LANES):
        there = codes >= 0
        place = tl.load(places + codes, mask=there, other=0, cache_modifier=".cg")
        following = _codes(signs, first + LANES + lanes, tokens, shift, BITS)
        before, behind = _alike(codes, lanes, ON_GPU)
        place += before
        tl.store(ids + place, (first + lanes).to(tl.int16), mask=there)
        tl.debug_barrier()  # all have read their places
        tl.store(places + codes, place + 1, mask=there & (behind == 0))
        tl.debug_barrier()
        codes = following


def sort(signs: Tensor, num_tables: int, bits_per_table: int) -> tuple[Tensor, Tensor]:
    """Tables of keys, from the signs of their projections, int16 [kv_heads, projections / 16,
    tokens]: where buckets begin, int32 [kv_heads, tables, buckets + 1], and the keys of one after
    the other, uint16 as int16 [kv_heads, tables, tokens]."""
    heads, words, tokens = signs.shape
    buckets, device = 1 << bits_per_table, signs.device
    places = torch.zeros(heads, num_tables, buckets, dtype=torch.int32, device=device)
    offsets = torch.empty(heads, num_tables, buckets + 1, dtype=torch.int32, device=device)
    ids = torch.empty(heads, num_tables, tokens, dtype=torch.int16, device=device)
    _sort[(num_tables, heads)](
        signs,
        places,
        offsets,
        ids,
        tokens,
        words,
        BITS=bits_per_table,
        COUNTED=AT_ONCE,
        BUCKETS=min(AT_ONCE, buckets),
        ON_GPU=signs.is_cuda,
        num_warps=1,
    )
    return offsets, ids
