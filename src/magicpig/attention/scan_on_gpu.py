"""`scan` on a GPU: codes lie there, rows are drawn there; the CPU reads the rows.

Codes are the native core's, copied as they are: blocks of sixteen keys, in each of which lines of
sixteen words have a word of every key. What is drawn follows the same rules as on the CPU, with
other random numbers and probabilities that are exact powers.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16  # keys, coded together
PIECE = 1024  # keys that a program draws from; the native core has the same number
CHUNK = 256  # keys of a sample that a program weighs
LOG_LEAST = tl.constexpr(-16 * math.log(2))


@triton.jit
def _prepare(
    queries, rotation, codes, lines, hashes, scale, seed,
    DIM: tl.constexpr, WIDE: tl.constexpr, CODED: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """One query: eight bits per dimension, rotated; slope and offset; and what it hashes to."""
    head = tl.program_id(0)
    dims = tl.arange(0, WIDE)
    x = tl.zeros([WIDE], tl.float32)
    for first in range(0, DIM, 16):
        some = first + tl.arange(0, 16)
        q = tl.load(queries + head * DIM + some, mask=some < DIM, other=0.0).to(tl.float32)
        turn = tl.load(
            rotation + dims[:, None] * DIM + some[None, :],
            mask=(dims < CODED)[:, None] & (some < DIM)[None, :],
            other=0.0,
        )
        x += tl.sum(turn * q[None, :], 1)
    largest = tl.max(tl.abs(x), 0)
    inverse = tl.where(largest > 0, 127.0 / tl.where(largest > 0, largest, 1.0), 0.0)
    rounded = tl.floor(tl.minimum(tl.maximum(x * inverse, -127.0), 127.0) + 0.5)
    tl.store(codes + head * CODED + dims, rounded.to(tl.int8), mask=dims < CODED)
    unit = scale * largest / 127.0
    tl.store(lines + 2 * head, 2.0 * unit)
    tl.store(lines + 2 * head + 1, -unit * TOP * tl.sum(rounded, 0))
    own = tl.load(queries + head * DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    word = own.to(tl.int32, bitcast=True) ^ (dims + seed) * -1640531535
    word = (word ^ (word >> 15)) * -2048144789
    word = (word ^ (word >> 13)) * -1028477387
    tl.store(hashes + head, tl.xor_sum(word, 0))


@triton.jit
def _dot4(word, four, acc, FAST: tl.constexpr):
    """acc plus the product of four unsigned bytes and four signed ones."""
    if FAST:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [word, four, acc],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    for i in tl.static_range(4):
        acc += ((word >> (8 * i)) & 255) * ((four << (24 - 8 * i)) >> 24)
    return acc


@triton.jit
def _weigh(
    address, keys, mask, queries, row, kv_head, tokens, codes, lines, scale,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    CODED: tl.constexpr, BITS: tl.constexpr, COUNT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Logs [HEADS, COUNT] of the weights of a segment's keys, for the heads of one KV head."""
    LINES: tl.constexpr = CODED * BITS // 32
    STRIDE: tl.constexpr = LINES * 16 + 32  # words of a block
    PADDED: tl.constexpr = (DIM + 15) // 16 * 16
    blocks = (tokens + 15) // 16
    head_words = blocks.to(tl.int64) * STRIDE + 2 * PADDED
    base = address.to(tl.pointer_type(tl.int32)) + kv_head * head_words
    heads, dims = tl.arange(0, HEADS), tl.arange(0, WIDE)
    first = (row * tl.num_programs(1) + kv_head) * GROUP
    at = base + keys // 16 * STRIDE + keys % 16
    acc = tl.zeros([HEADS, COUNT], tl.int32)
    mine = codes.to(tl.pointer_type(tl.int32)) + (first + heads) * (CODED // 4)
    for line in tl.static_range(LINES):
        words = tl.load(at + line * 16, mask=mask, other=0)
        for g in tl.static_range(8 // BITS):
            four = tl.load(mine + line * (8 // BITS) + g, mask=heads < GROUP, other=0)
            part = (words >> (BITS * g)) & (0x01010101 * ((1 << BITS) - 1))
            acc = _dot4(
                part[None, :] + tl.zeros_like(acc), four[:, None] + tl.zeros_like(acc), acc, FAST
            )
    factor = tl.load(at + LINES * 16, mask=mask, other=0).to(tl.float32, bitcast=True)
    bias = tl.load(at + LINES * 16 + 16, mask=mask, other=0).to(tl.float32, bitcast=True)
    mean = (base + blocks.to(tl.int64) * STRIDE).to(tl.pointer_type(tl.float32))
    q = tl.load(
        queries + (first + heads)[:, None] * DIM + dims[None, :],
        mask=(heads < GROUP)[:, None] & (dims < DIM)[None, :],
        other=0.0,
    ).to(tl.float32)
    mean_key = tl.load(mean + dims, mask=dims < DIM, other=0.0)
    product = scale * tl.sum(q * mean_key[None, :], 1)
    slope = tl.load(lines + 2 * (first + heads), mask=heads < GROUP, other=0.0)
    offset = tl.load(lines + 2 * (first + heads) + 1, mask=heads < GROUP, other=0.0)
    score = acc.to(tl.float32) * slope[:, None] + offset[:, None]
    return factor[None, :] * score + bias[None, :] + product[:, None]


@triton.jit
def _sample(
    addresses, segments, chunks, queries, codes, lines, logs, room, scale,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    CODED: tl.constexpr, BITS: tl.constexpr, CHUNK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Weighs some keys of a segment: blocks that lie evenly over it."""
    chunk, kv_head = tl.program_id(0), tl.program_id(1)
    segment = tl.load(chunks + 18 * chunk)
    place = tl.load(chunks + 18 * chunk + 1)
    row = tl.load(segments + 3 * segment)
    tokens = tl.load(segments + 3 * segment + 1)
    lanes = tl.arange(0, CHUNK)
    block = tl.load(chunks + 18 * chunk + 2 + lanes // 16)
    keys = block * 16 + lanes % 16
    mask = (block >= 0) & (keys < tokens)
    found = _weigh(
        tl.load(addresses + segment), keys, mask, queries, row, kv_head, tokens, codes, lines,
        scale, GROUP, HEADS, DIM, WIDE, CODED, BITS, CHUNK, FAST,
    )  # fmt: skip
    heads = tl.arange(0, HEADS)
    head = (row * tl.num_programs(1) + kv_head) * GROUP + heads
    to = logs + head[:, None] * room + place * CHUNK + lanes[None, :]
    found = tl.where(mask[None, :], found, -float("inf"))
    tl.store(to, found, mask=(heads < GROUP)[:, None])


@triton.jit
def _threshold(logs, sizes, thresholds, totals, room, heads, ROOM: tl.constexpr):
    """Of one head: so that probabilities add up to the rows that it may read."""
    head = tl.program_id(0)
    row = head // heads
    chunks = tl.load(sizes + 3 * row).to(tl.int32)
    rows = tl.load(sizes + 3 * row + 1)  # of the sample; below 0: all
    at = tl.arange(0, ROOM)
    own = tl.load(logs + head * room + at, mask=at < chunks * 256, other=-float("inf"))
    peak = tl.max(own, 0)
    weights = tl.exp(own - peak)
    threshold = tl.sum(weights, 0) / rows
    for _ in range(24):
        above = weights > threshold
        light = tl.sum(tl.where(above, 0.0, weights), 0)
        left = rows - tl.sum(above.to(tl.float32), 0)
        threshold = tl.minimum(threshold, tl.maximum(light / tl.maximum(left, 1e-3), 1e-37))
    tl.store(thresholds + head, tl.where(rows > 0, peak + tl.log(threshold), -float("inf")))
    tl.store(totals + head, 0)


@triton.jit
def _draw(
    addresses, segments, items, queries, codes, lines, hashes, thresholds,
    ids, log_probability, starts, counts, totals, room, pieces, scale,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    CODED: tl.constexpr, BITS: tl.constexpr, PIECE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Rows of one piece of a segment, for the heads of one KV head."""
    item, kv_head = tl.program_id(0), tl.program_id(1)
    segment = tl.load(items + 2 * item)
    piece = tl.load(items + 2 * item + 1)  # of the segment
    row = tl.load(segments + 3 * segment)
    tokens = tl.load(segments + 3 * segment + 1)
    first_piece = tl.load(segments + 3 * segment + 2)  # of the sequence
    lanes = tl.arange(0, PIECE)
    keys = piece * PIECE + lanes
    mask = keys < tokens
    logs = _weigh(
        tl.load(addresses + segment), keys, mask, queries, row, kv_head, tokens, codes, lines,
        scale, GROUP, HEADS, DIM, WIDE, CODED, BITS, PIECE, FAST,
    )  # fmt: skip
    heads = tl.arange(0, HEADS)
    real = heads < GROUP
    head = (row * tl.num_programs(1) + kv_head) * GROUP + heads
    threshold = tl.load(thresholds + head, mask=real, other=0.0)
    log_p = tl.minimum(tl.maximum(logs - threshold[:, None], LOG_LEAST), 0.0)
    hashed = tl.xor_sum(tl.load(hashes + head, mask=real, other=0), 0)
    uniform = tl.rand(hashed, (first_piece + piece) * PIECE + lanes)  # the same for all heads
    drawn = (uniform[None, :] < tl.exp(log_p)) & mask[None, :] & real[:, None]
    place = tl.cumsum(drawn.to(tl.int32), 1) - 1
    count = tl.sum(drawn.to(tl.int32), 1)
    start = tl.atomic_add(totals + head, count, mask=real, sem="relaxed")
    tl.store(starts + head * pieces + first_piece + piece, start, mask=real)
    tl.store(counts + head * pieces + first_piece + piece, count, mask=real)
    to = start[:, None] + place
    fits = drawn & (to < room)
    at = head[:, None].to(tl.int64) * room + to
    tl.store(ids + at, (keys[None, :] + tl.zeros_like(to)).to(tl.int16), mask=fits)
    tl.store(log_probability + at, log_p, mask=fits)


def _fast(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _wide(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


class Coded:
    """Queries of a batch as codes want them; buffers that every step fills anew.

    rotation: [coded dim, head_dim], float32. scale: of the scores, tempered.
    """

    def __init__(self, batch: int, heads: int, rotation: Tensor, bits: int, seed: int) -> None:
        device = rotation.device
        self.rotation, self.bits, self.seed = rotation, bits, seed & 0x7FFFFFFF
        self.codes = torch.empty(batch * heads, len(rotation), dtype=torch.int8, device=device)
        self.lines = torch.empty(batch * heads, 2, device=device)
        self.hashes = torch.empty(batch * heads, dtype=torch.int32, device=device)

    def fill(self, queries: Tensor, scale: float) -> None:
        """queries: [batch, heads, head_dim]."""
        dim, coded = queries.shape[2], len(self.rotation)
        _prepare[(len(self.codes),)](
            queries,
            self.rotation,
            self.codes,
            self.lines,
            self.hashes,
            scale,
            self.seed,
            DIM=dim,
            WIDE=_wide(coded),
            CODED=coded,
            TOP=float(2**self.bits - 1),
        )
