"""Keys sorted into hash tables on a GPU, as the native core has them.

By counting: how many keys each bucket has, in each of some parts of the keys; where each part
begins in each bucket; and then each key goes to its place. A warp has one part for one table, of
which it places 32 keys at a time, in their order. Tables are many, so all warps have enough to do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from magicpig.kv.device_index import parts_of

AT_ONCE = 256  # keys that are counted, or buckets, at most
SIZES = ["tokens", "words", "part", "parts"]
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
def _table_of(signs, tokens, words, BITS: tl.constexpr):
    """Its number among all, where the signs of its keys are, and from which bit on."""
    table, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    own = head * tl.num_programs(1) + table
    return own, signs + (head * words + table * BITS // 16) * tokens, table * BITS % 16


@triton.jit
def _codes(signs, at, end, tokens, shift, BITS: tl.constexpr):
    """Buckets of some keys, and -1 from `end` on."""
    there = at < end
    low = tl.load(signs + at, mask=there, other=0).to(tl.int32) & 0xFFFF
    reach = tl.where(shift + BITS > 16, end, 0)  # none where the first word has all bits
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


@triton.jit(do_not_specialize=SIZES)  # the kernel that was tried is the one that is used
def _count(signs, counts, tokens, words, part, BITS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Of a part of a head's keys, for one table: how many are in each bucket."""
    own, signs, shift = _table_of(signs, tokens, words, BITS)
    counts += (own * tl.num_programs(0) + tl.program_id(0)) * (1 << BITS)
    begin = tl.program_id(0) * part
    end = tl.minimum(begin + part, tokens)
    for first in range(begin, end, AT_ONCE):
        codes = _codes(signs, first + tl.arange(0, AT_ONCE), end, tokens, shift, BITS)
        tl.atomic_add(counts + codes, 1, mask=codes >= 0, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def _begin(counts, offsets, parts, BITS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Of one table: where each bucket begins, and there each part. counts: become the latter."""
    buckets: tl.constexpr = 1 << BITS
    own = tl.program_id(0).to(tl.int64)
    counts, offsets = counts + own * parts * buckets, offsets + own * (buckets + 1)
    total = 0
    tl.store(offsets, 0)
    for first in range(0, buckets, AT_ONCE):
        at = first + tl.arange(0, AT_ONCE)
        whole = tl.zeros([AT_ONCE], tl.int32)
        for part in range(parts):
            whole += tl.load(counts + part * buckets + at)
        ends = total + tl.cumsum(whole, 0)
        tl.store(offsets + 1 + at, ends)
        place = ends - whole
        for part in range(parts):
            count = tl.load(counts + part * buckets + at)
            tl.store(counts + part * buckets + at, place)
            place += count
        total += tl.sum(whole, 0)


@triton.jit(do_not_specialize=SIZES)
def _place(
    signs, places, ids, tokens, words, part, BITS: tl.constexpr, ON_GPU: tl.constexpr
):  # fmt: skip
    """Puts a part's keys where they belong, in their order. places: of the next key of a bucket;
    no other part writes there, so that they stay in this processor's cache."""
    own, signs, shift = _table_of(signs, tokens, words, BITS)
    places += (own * tl.num_programs(0) + tl.program_id(0)) * (1 << BITS)
    ids += own * tokens
    begin = tl.program_id(0) * part
    end = tl.minimum(begin + part, tokens)
    lanes = tl.arange(0, LANES)
    codes = _codes(signs, begin + lanes, end, tokens, shift, BITS)
    for first in range(begin, end, LANES):
        there = codes >= 0
        place = tl.load(places + codes, mask=there, other=0)
        following = _codes(signs, first + LANES + lanes, end, tokens, shift, BITS)
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
    buckets, parts, device = 1 << bits_per_table, parts_of(tokens), signs.device
    places = torch.zeros(heads, num_tables, parts, buckets, dtype=torch.int32, device=device)
    offsets = torch.empty(heads, num_tables, buckets + 1, dtype=torch.int32, device=device)
    ids = torch.empty(heads, num_tables, tokens, dtype=torch.int16, device=device)
    part, grid = triton.cdiv(tokens, parts), (parts, num_tables, heads)
    _count[grid](
        signs, places, tokens, words, part, BITS=bits_per_table, AT_ONCE=AT_ONCE, num_warps=1
    )
    _begin[(num_tables * heads,)](
        places, offsets, parts, BITS=bits_per_table, AT_ONCE=min(AT_ONCE, buckets), num_warps=1
    )
    _place[grid](
        signs,
        places,
        ids,
        tokens,
        words,
        part,
        BITS=bits_per_table,
        ON_GPU=signs.is_cuda,
        num_warps=1,
    )
    return offsets, ids
