"""DeviceScan: rows of far contexts drawn on the model's device, by codes that lie there.

The CPU keeps the rows, and reads those that were drawn.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary, ref

import numpy as np
import torch
from torch import Tensor

from magicpig import reference
from magicpig.attention.scan_on_gpu import BLOCK, CHUNK, PIECE, Drawing, Table
from magicpig.config import ScanConfig
from magicpig.kv.base import LayerShape
from magicpig.kv.layer import LayerKV
from magicpig.kv.tray import Drawn

SEGMENTS, CHUNKS = 40, 32  # of a sequence, at most
ROOMIER = 9  # eighths of a context's length that there is room for
MOST_KEPT = 16  # of scans, by a thread
# As in threshold.cpp: of an eighth of the keys, so many blocks at least, and at most.
SHARE, LEAST_BLOCKS, MOST_BLOCKS = 8, 64, 256


class _Copy:
    """A segment's codes on a device. owner: holds the native core's, and so their address."""

    def __init__(self, owner: Any, device: torch.device) -> None:
        self.owner = owner
        self.there = torch.from_numpy(owner.copy()).to(device)


_copies: WeakValueDictionary[tuple[torch.device, int], _Copy] = WeakValueDictionary()
_copying = threading.Lock()


class DeviceCodes:
    """Of the segments of a far context, each copied once for all sequences that share it."""

    def __init__(self, far: LayerKV, device: torch.device) -> None:
        self.far = far
        self._held: list[tuple[_Copy, int]] = []
        for i, tokens in enumerate(far.segment_sizes):
            _, codes = far._native.segment_memory(i)
            if codes.size:
                self._held.append((_copy_of(codes, device), tokens))

    @property
    def segments(self) -> list[tuple[Tensor, int]]:
        """Codes and tokens."""
        return [(copy.there, tokens) for copy, tokens in self._held]

    @property
    def places(self) -> list[tuple[ref[_Copy], int]]:
        """Equal to what it was, and to that of forks, while segments are where they were."""
        return [(ref(copy), tokens) for copy, tokens in self._held]


def _copy_of(codes: Any, device: torch.device) -> _Copy:
    key = device, codes.ctypes.data
    with _copying:
        found = _copies.get(key)
        if found is None:
            found = _copies[key] = _Copy(codes, device)
        return found


class DeviceScan:
    """For a batch in layers of one kind, which use it one after another, in one stream.

    tokens: of a far context, that there is room for.
    """

    def __init__(self, batch: int, shape: LayerShape, scan: ScanConfig, tokens: int) -> None:
        self.batch, self.config, self.tokens, self.device = batch, scan, tokens, shape.device
        self.pieces = -(-tokens // PIECE) + SEGMENTS
        most = max(scan.budget * tokens, scan.min_rows)
        self.room = tokens if most >= tokens else min(tokens, int(1.3 * most) + 256)
        rotation = reference.rotation(scan, shape.head_dim)[:, : shape.head_dim].float()
        line = 32 // scan.bits_per_dim
        rotation = torch.nn.functional.pad(rotation, (0, 0, 0, -len(rotation) % line))
        self._drawing = Drawing(
            batch,
            shape.num_heads,
            shape.num_kv_heads,
            rotation.to(shape.device).contiguous(),
            scan.bits_per_dim,
            scan.seed,
            self.room,
            self.pieces,
            CHUNKS * CHUNK,
        )
        self._mirror = torch.zeros_like(
            self._drawing.found, device="cpu", pin_memory=shape.device.type == "cuda"
        )
        views = [view.numpy() for view in self._drawing.views(self._mirror)]
        log_probability, starts, counts, totals, ids = views
        self._totals = totals[:, :, 0]
        self._rows = ids.view(np.uint16), log_probability, starts, counts

    def new_table(self) -> tuple[Table, Table]:
        """On the host and on the device."""
        sizes = self.batch, self.batch * SEGMENTS, self.batch * CHUNKS, self.batch * self.pieces
        words, pinned = Table.words(*sizes), self.device.type == "cuda"
        host = torch.zeros(words, dtype=torch.int64, pin_memory=pinned)
        there = torch.zeros(words, dtype=torch.int64, device=self.device)
        return Table(host, *sizes), Table(there, *sizes)

    def fill(self, table: Table, each: Sequence[DeviceCodes]) -> bool:
        """The host's table, for a batch; False where there is no room, and nothing is drawn."""
        segment = chunk = item = 0
        table.memory.zero_()
        for row, codes in enumerate(each):
            sizes = [tokens for _, tokens in codes.segments]
            blocks = [-(-tokens // BLOCK) for tokens in sizes]
            pieces = [-(-tokens // PIECE) for tokens in sizes]
            if len(sizes) > SEGMENTS or sum(pieces) > self.pieces or sum(sizes) > self.tokens:
                return False
            place = keys = first_piece = first_block = 0
            picked = _sample(sum(blocks))
            for i, (there, tokens) in enumerate(codes.segments):
                line = torch.tensor([there.data_ptr(), row, tokens, first_piece])
                table.segments[segment] = line
                mine = picked[(picked >= first_block) & (picked < first_block + blocks[i])]
                mine = mine - first_block
                keys += int(_keys_of(mine, tokens).sum())
                for first in range(0, len(mine), CHUNK // BLOCK):
                    if place == CHUNKS:
                        return False
                    some = mine[first : first + CHUNK // BLOCK]
                    table.chunks[chunk, 0], table.chunks[chunk, 1] = segment, place
                    table.chunks[chunk, 2:] = -1
                    table.chunks[chunk, 2 : 2 + len(some)] = torch.from_numpy(some)
                    chunk, place = chunk + 1, place + 1
                here = table.items[item : item + pieces[i]]
                here[:, 0], here[:, 1] = segment, torch.arange(pieces[i])
                item, segment = item + pieces[i], segment + 1
                first_piece, first_block = first_piece + pieces[i], first_block + blocks[i]
            total = sum(sizes)
            most = max(self.config.budget * total, self.config.min_rows)
            rows = 0 if most >= total else max(1, round(65536 * most * keys / total))
            table.sizes[row] = torch.tensor([place, rows])
        table.numbers[0], table.numbers[1] = chunk, item
        return True

    def draw(self, queries: Tensor, table: Table, scale: float) -> None:
        """Rows for queries [batch, heads, head_dim], on their way to the host."""
        tempered = scale * reference.TEMPERS[self.config.bits_per_dim]
        self._drawing.draw(queries, table, tempered)
        self._mirror.copy_(self._drawing.found, non_blocking=True)

    @property
    def drawn(self) -> Drawn:
        """What arrives, for the native core; it draws itself where it is more than fits."""
        return self._rows, self._totals


def with_room(tokens: int) -> int:
    """Of a context that grows: the tokens that memory is taken for."""
    return ROOMIER * tokens // 8 + 1024


_kept = threading.local()


def scan_for(batch: int, shape: LayerShape, index: ScanConfig, tokens: int) -> DeviceScan:
    """This thread's, for contexts of so many tokens."""
    scans: dict[Any, DeviceScan] = _kept.__dict__.setdefault("scans", {})
    key = batch, shape, index
    found = scans.pop(key, None)
    if found is None or found.tokens < tokens:
        found = None
        if len(scans) >= MOST_KEPT:
            del scans[next(iter(scans))]
        found = DeviceScan(batch, shape, index, with_room(tokens))
    scans[key] = found  # behind those that were not used since
    return found


class LayerScan:
    """A layer's part in it: where the codes of its sequences are."""

    def __init__(self, scan: DeviceScan) -> None:
        self.scan = scan
        self._host, self._there = scan.new_table()
        self._codes: list[ref[DeviceCodes]] = []  # their sequences' to keep
        self._places: list[Any] = []
        self._fits = False

    def prepare(self, codes: list[DeviceCodes]) -> None:
        """For these sequences; nothing to do where they are those of the step before."""
        if [known() for known in self._codes] == codes:
            return
        places = [each.places for each in codes]
        if places != self._places:
            self._codes, self._places, self._fits = [], [], False  # until it is there
            fits = self.scan.fill(self._host, codes)
            if not fits:
                self._host.memory.zero_()  # nothing to draw from
            self._there.memory.copy_(self._host.memory, non_blocking=True)
            self._places, self._fits = places, fits
        self._codes = [ref(each) for each in codes]

    def draw(self, queries: Tensor, scale: float) -> None:
        """See DeviceScan."""
        self.scan.draw(queries, self._there, scale)

    @property
    def drawn(self) -> Drawn | None:
        """None: the native core draws, as there is too much."""
        return self.scan.drawn if self._fits else None


def _sample(blocks: int) -> Any:
    """Some of so many blocks: one of each of equal stretches, where threshold.cpp takes it too."""
    count = min(blocks, max(LEAST_BLOCKS, min(MOST_BLOCKS, blocks // SHARE)))
    borders = np.arange(count + 1, dtype=np.int64) * blocks // max(count, 1)
    where = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B1)
    where = (where ^ where >> np.uint32(15)) * np.uint32(0x85EBCA6B)
    where = (where ^ where >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    where = (where ^ where >> np.uint32(16)).astype(np.uint64)
    stretches = np.diff(borders).astype(np.uint64)
    return borders[:-1] + (where * stretches >> np.uint64(32)).astype(np.int64)


def _keys_of(blocks: Any, tokens: int) -> Any:
    """How many keys each of some blocks of a segment has; a piece's are dealt out to its blocks."""
    of_piece = PIECE // BLOCK
    own = np.minimum(PIECE, tokens - blocks // of_piece * PIECE)
    there = -(-own // BLOCK)
    return np.minimum(BLOCK, -(-(own - blocks % of_piece) // there))
