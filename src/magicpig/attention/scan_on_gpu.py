"""`scan` on a GPU: codes lie there, rows are drawn there; the CPU reads the rows.

Codes are the native core's, copied as they are: blocks of sixteen keys, in each of which lines of
sixteen words have a word of every key, and pieces of 64 blocks, where neighbours are in different
ones. What is drawn follows the same rules as on the CPU, with other random numbers and
probabilities that are exact powers.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from magicpig.attention.kernel_sizes import wide

BLOCK = 16  # keys, coded together
PIECE = 1024  # keys that a program draws from; the native core has the same number
CHUNK = 256  # keys of a sample that a program weighs
MOST_PROGRAMS = 65535  # along a grid's second axis
LOG_LEAST = tl.constexpr(-16 * math.log(2))


@triton.jit
def _prepare(
    queries, rotation, codes, lines, hashes, scale, seed,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, CODED: tl.constexpr,
    TOP: tl.constexpr,
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
    place = head % GROUP * WIDE + dims  # heads of a group that ask alike must not hash alike
    word = own.to(tl.int32, bitcast=True) ^ (place + seed) * -1640531535
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
        acc += ((word >> (8 * i)) & 255).to(tl.int32) * ((four << (24 - 8 * i)) >> 24)
    return acc


@triton.jit
def _key_at(places, tokens):
    """Which key of a segment is at a place among its codes; from `tokens` on: none."""
    first = places // 1024 * 1024  # of the piece
    own = tl.minimum(tokens - first, 1024)
    blocks, block = (own + 15) // 16, (places - first) // 16
    return tl.where(block < blocks, first + places % 16 * blocks + block, tokens)


@triton.jit
def _weigh(
    address, places, mask, queries, head, kv_head, tokens, codes, lines, scale,
    DIM: tl.constexpr, WIDE: tl.constexpr, CODED: tl.constexpr, BITS: tl.constexpr,
    COUNT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Logs [COUNT] of the weights of keys at such places, for a head of the batch; anything where
    the mask hides it."""
    LINES: tl.constexpr = CODED * BITS // 32
    STRIDE: tl.constexpr = LINES * 16 + 32  # words of a block
    PADDED: tl.constexpr = (DIM + 15) // 16 * 16
    blocks = (tokens + 15) // 16
    head_words = blocks.to(tl.int64) * STRIDE + 2 * PADDED
    base = address.to(tl.pointer_type(tl.int32)) + kv_head * head_words
    at = base + places // 16 * STRIDE + places % 16
    at = tl.max_contiguous(tl.multiple_of(at, 16), 16)  # a thread may read four words at once
    mine = codes.to(tl.pointer_type(tl.int32)) + head * (CODED // 4)
    acc = tl.zeros([COUNT], tl.int32)
    for g in tl.static_range(8 // BITS):
        part = tl.zeros([COUNT], tl.int32)
        for line in tl.static_range(LINES):
            words = tl.load(at + line * 16, mask=mask).to(tl.uint32, bitcast=True)
            four = tl.load(mine + line * (8 // BITS) + g)
            # Bits stay where they are in their bytes, and products are that much too large.
            some = words & (0x01010101 * ((1 << BITS) - 1) << BITS * g)
            part = _dot4(some, four + tl.zeros_like(part), part, FAST)
        acc += part >> (BITS * g)
    factor = tl.load(at + LINES * 16, mask=mask).to(tl.float32, bitcast=True)
    bias = tl.load(at + LINES * 16 + 16, mask=mask).to(tl.float32, bitcast=True)
    mean = (base + blocks.to(tl.int64) * STRIDE).to(tl.pointer_type(tl.float32))
    dims = tl.arange(0, WIDE)
    q = tl.load(queries + head * DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    mean_key = tl.load(mean + dims, mask=dims < DIM, other=0.0)
    score = acc.to(tl.float32) * tl.load(lines + 2 * head) + tl.load(lines + 2 * head + 1)
    return factor * score + (bias + scale * tl.sum(q * mean_key, 0))


@triton.jit
def _uniform(places, key):
    """Numbers in (0, 1), by such places; as the native core makes them."""
    x = (places ^ key).to(tl.uint32, bitcast=True) * 0x9E3779B1
    x = (x ^ (x >> 15)) + key.to(tl.uint32, bitcast=True)
    x = x * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return (x >> 9).to(tl.float32) * 2**-23 + 2**-24


@triton.jit
def _sample(
    segments, chunks, number, queries, codes, lines, logs, room, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, CODED: tl.constexpr,
    BITS: tl.constexpr, CHUNK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Weighs some keys of segments for a head: blocks from all over a sequence."""
    own, lanes = tl.program_id(0), tl.arange(0, CHUNK)
    for chunk in range(tl.program_id(1), tl.load(number).to(tl.int32), tl.num_programs(1)):
        segment = tl.load(chunks + 18 * chunk)
        place = tl.load(chunks + 18 * chunk + 1)
        tokens = tl.load(segments + 4 * segment + 2).to(tl.int32)
        head = tl.load(segments + 4 * segment + 1) * tl.num_programs(0) + own
        block = tl.load(chunks + 18 * chunk + 2 + lanes // 16).to(tl.int32)
        block = tl.max_constancy(block, 16)
        places = block * 16 + lanes % 16
        found = _weigh(
            tl.load(segments + 4 * segment), places, block >= 0, queries, head, own // GROUP,
            tokens, codes, lines, scale, DIM, WIDE, CODED, BITS, CHUNK, FAST,
        )  # fmt: skip
        mask = (block >= 0) & (_key_at(places, tokens) < tokens)
        tl.store(logs + head * room + place * CHUNK + lanes, tl.where(mask, found, -float("inf")))


@triton.jit
def _threshold(logs, sizes, thresholds, totals, heads, ROOM: tl.constexpr):
    """Of one head: such that probabilities add up to the rows that it may read."""
    head = tl.program_id(0)
    chunks = tl.load(sizes + 2 * (head // heads))
    rows = tl.load(sizes + 2 * (head // heads) + 1).to(tl.float32) / 65536  # of the sample; 0: all
    at = tl.arange(0, ROOM)
    own = tl.load(logs + head * ROOM + at, mask=at < chunks * 256, other=-float("inf"))
    peak = tl.max(own, 0)
    threshold = peak + tl.log(tl.sum(tl.exp(own - peak), 0) / tl.maximum(rows, 1e-3))
    number, before = 0.0, -1.0
    while number > before:  # keys above it count as one each: without their weights it falls
        before = number
        above = own > threshold
        number = tl.sum(above.to(tl.float32), 0)
        top = threshold
        light = tl.sum(tl.where(above, 0.0, tl.exp(own - top)), 0)
        if light < 1e-30:  # all others lie too far below for a float
            top = tl.max(tl.where(above, -1e37, own), 0)
            light = tl.sum(tl.where(above, 0.0, tl.exp(own - top)), 0)
        next_one = top + tl.log(light / tl.maximum(rows - number, 1e-3))
        threshold = tl.minimum(threshold, tl.where(light > 0, next_one, threshold))
    tl.store(thresholds + head, tl.where(rows > 0, threshold, -1e30))
    tl.store(totals + head, 0)


@triton.jit
def _draw(
    segments, items, number, queries, codes, lines, hashes, thresholds,
    ids, log_probability, starts, counts, totals, room, pieces, scale,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    CODED: tl.constexpr, BITS: tl.constexpr, PIECE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Rows of pieces of segments, for a head. Heads of a group come one after another, as they read
    the same codes."""
    own, lanes = tl.program_id(0), tl.arange(0, PIECE)
    group = tl.arange(0, HEADS)
    for item in range(tl.program_id(1), tl.load(number).to(tl.int32), tl.num_programs(1)):
        segment = tl.load(items + 2 * item)
        piece = tl.load(items + 2 * item + 1).to(tl.int32)  # of the segment
        tokens = tl.load(segments + 4 * segment + 2).to(tl.int32)
        there = tl.load(segments + 4 * segment + 3).to(tl.int32) + piece  # of the sequence
        first = tl.load(segments + 4 * segment + 1) * tl.num_programs(0)
        head = first + own
        places = piece * PIECE + lanes
        keys = _key_at(places, tokens)
        there_are = places // 16 < (tokens + 15) // 16  # whole blocks, the last one padded
        logs = _weigh(
            tl.load(segments + 4 * segment), places, there_are, queries, head, own // GROUP, tokens,
            codes, lines, scale, DIM, WIDE, CODED, BITS, PIECE, FAST,
        )  # fmt: skip
        log_p = tl.minimum(tl.maximum(logs - tl.load(thresholds + head), LOG_LEAST), 0.0)
        asked = hashes + first + own // GROUP * GROUP + group
        key = tl.xor_sum(tl.load(asked, mask=group < GROUP, other=0), 0)
        uniform = _uniform(there * PIECE + lanes, key)  # the same for the group
        drawn = (uniform < tl.exp(log_p)) & (keys < tokens)
        count = tl.sum(drawn.to(tl.int32), 0)
        start = tl.atomic_add(totals + head, count, sem="relaxed")
        tl.store(starts + head * pieces + there, start)
        tl.store(counts + head * pieces + there, count)
        to = start + tl.cumsum(drawn.to(tl.int32), 0) - 1
        fits = drawn & (to < room)
        tl.store(ids + head * room + to, keys.to(tl.int16), mask=fits)
        tl.store(log_probability + head * room + to, log_p, mask=fits)


class Drawing:
    """Draws rows for a batch, into buffers on the device.

    rotation: [coded dim, head_dim], float32.
    room: rows of a head. pieces: of a sequence. sample: keys of one that are weighed first.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        kv_heads: int,
        rotation: Tensor,
        bits: int,
        seed: int,
        room: int,
        pieces: int,
        sample: int,
    ) -> None:
        device, count = rotation.device, batch * heads
        self.batch, self.heads, self.kv_heads = batch, heads, kv_heads
        self.rotation, self.bits, self.seed = rotation, bits, seed & 0x7FFFFFFF
        self.room, self.pieces = room, pieces
        self.codes = torch.empty(count, len(rotation), dtype=torch.int8, device=device)
        self.lines = torch.empty(count, 2, device=device)
        self.hashes = torch.empty(count, dtype=torch.int32, device=device)
        self.sample = triton.next_power_of_2(sample)
        self.thresholds = torch.empty(count, device=device)
        sizes = (
            4 * count * room,
            4 * count * pieces,
            4 * count * pieces,
            4 * count,
            2 * count * room,
        )
        self.found = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self.parts = self.views(self.found)

    def views(self, found: Tensor) -> tuple[Tensor, ...]:
        """Of a buffer like `found`: log probabilities [batch, heads, room], starts and counts of
        pieces [batch, heads, pieces], totals [batch, heads, 1], ids [batch, heads, room]."""
        count, rows, at = self.batch * self.heads, [], 0
        for width, dtype in (
            (self.room, torch.float32),
            (self.pieces, torch.int32),
            (self.pieces, torch.int32),
            (1, torch.int32),
            (self.room, torch.int16),
        ):
            end = at + count * width * dtype.itemsize
            rows.append(found[at:end].view(dtype).view(self.batch, self.heads, width))
            at = end
        return tuple(rows)

    def draw(self, queries: Tensor, table: Table, scale: float) -> None:
        """queries: [batch, heads, head_dim]. scale: of the scores, tempered."""
        dim, coded = queries.shape[2], len(self.rotation)
        group = self.heads // self.kv_heads
        count = self.batch * self.heads
        _prepare[(count,)](
            queries, self.rotation, self.codes, self.lines, self.hashes, scale, self.seed,
            GROUP=group, DIM=dim, WIDE=wide(coded), CODED=coded, TOP=float(2**self.bits - 1),
        )  # fmt: skip
        same = {
            "GROUP": group,
            "DIM": dim,
            "WIDE": wide(dim),
            "CODED": coded,
            "BITS": self.bits,
            "FAST": queries.is_cuda,
        }
        asked = queries, self.codes, self.lines
        log_probability, starts, counts, totals, ids = self.parts
        # Of this layer alone: recorded steps of all sizes share the memory.
        logs = torch.empty(count, self.sample, device=queries.device)
        _sample[self.heads, min(16 * self.batch, MOST_PROGRAMS)](
            table.segments, table.chunks, table.numbers, *asked, logs, self.sample,
            scale, CHUNK=CHUNK, **same,
        )  # fmt: skip
        _threshold[(count,)](
            logs, table.sizes, self.thresholds, totals, self.heads, ROOM=self.sample, num_warps=8,
        )  # fmt: skip
        _draw[self.heads, min(128 * self.batch, MOST_PROGRAMS)](
            table.segments, table.items, table.numbers[1:], *asked, self.hashes, self.thresholds,
            ids, log_probability, starts, counts, totals, self.room, self.pieces, scale,
            HEADS=triton.next_power_of_2(group), PIECE=PIECE, num_warps=8, **same,
        )  # fmt: skip


class Table:
    """Where codes are, and which program looks at what; int64, on the host or on a device.

    numbers: of chunks and items. sizes: of each sequence, chunks, and the rows that a sample of its
    keys stands for, in 65536ths; 0: all. segments: address, sequence, tokens, first piece in the
    sequence. chunks: segment, place in its sequence's sample, sixteen blocks (-1: none).
    items: segment, piece in it.
    """

    def __init__(self, memory: Tensor, batch: int, segments: int, chunks: int, items: int) -> None:
        self.memory = memory
        shapes = ((2,), (batch, 2), (segments, 4), (chunks, 18), (items, 2))
        parts, at = [], 0
        for shape in shapes:
            end = at + math.prod(shape)
            parts.append(memory[at:end].view(shape))
            at = end
        self.numbers, self.sizes, self.segments, self.chunks, self.items = parts

    @staticmethod
    def words(batch: int, segments: int, chunks: int, items: int) -> int:
        return 2 + 2 * batch + 4 * segments + 18 * chunks + 2 * items
