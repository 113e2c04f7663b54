"""Seats: the windows of sequences that step together, as one tensor.

For windows in the memory of the model's device. A sequence that steps with others than last time
moves, with its window, to new seats.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magicpig.kv.far_tokens import FarTokens

ROOM = 64  # tokens that a window may grow by before it moves


class Seats:
    """Windows of a batch in one layer. Each sequence has a seat; one thread at a time.

    keys, values: [batch, num_kv_heads, capacity, head_dim], used up to lengths[i].
    far: their far contexts as they stepped last.
    drawn: int64 [batch], rows that were counted on the device.
    sums: what a method adds up for its sequences while they sit here, [batch, ...] each.
    """

    def __init__(self, windows: Sequence[tuple[Tensor, Tensor]]) -> None:
        """windows: keys and values [num_kv_heads, tokens, head_dim] of each, copied."""
        self.lengths = [keys.shape[1] for keys, _ in windows]
        self._there: Tensor | None = None
        self.far: FarTokens | None = None
        self.sums: tuple[Tensor, Tensor] | None = None
        first = windows[0][0]
        shape = len(windows), first.shape[0], _capacity(max(self.lengths) + ROOM), first.shape[2]
        self.keys, self.values = first.new_zeros(shape), first.new_zeros(shape)
        self.drawn = torch.zeros(len(windows), dtype=torch.int64, device=first.device)
        for i, (keys, values) in enumerate(windows):
            self.keys[i, :, : keys.shape[1]], self.values[i, :, : keys.shape[1]] = keys, values

    def window(self, i: int) -> tuple[Tensor, Tensor]:
        """Views [num_kv_heads, tokens, head_dim]."""
        return self.keys[i, :, : self.lengths[i]], self.values[i, :, : self.lengths[i]]

    @property
    def there(self) -> Tensor:
        """int32 [batch], the lengths, on the device: what depends on them need not wait."""
        if self._there is None:
            self._there = torch.tensor(self.lengths, dtype=torch.int32, device=self.keys.device)
        return self._there

    @property
    def place(self) -> tuple[int, int, int, int]:
        """For kernels: addresses of keys, values and `there`, and the capacity."""
        return (
            self.keys.data_ptr(),
            self.values.data_ptr(),
            self.there.data_ptr(),
            self.keys.shape[2],
        )

    @property
    def place_there(self) -> Tensor:
        """The same on the device, int64 [4]."""
        return torch.tensor(self.place, device=self.keys.device)

    def make_room(self) -> None:
        """For one token more."""
        if max(self.lengths) < self.keys.shape[2]:
            return
        grown = list(self.keys.shape)
        grown[2] = _capacity(grown[2] + max(ROOM, grown[2] // 2))
        before = self.keys, self.values
        keys, values = (old.new_zeros(grown) for old in before)  # there may be no memory for both
        for old, new in zip(before, (keys, values), strict=True):
            new[:, :, : old.shape[2]] = old
            _used_here(old)
        self.keys, self.values = keys, values

    def append(self, keys: Tensor, values: Tensor) -> None:
        """A token [batch, num_kv_heads, head_dim] of each."""
        self.make_room()
        if min(self.lengths) == max(self.lengths):
            self.keys[:, :, self.lengths[0]], self.values[:, :, self.lengths[0]] = keys, values
        else:
            rows = torch.arange(len(self.lengths), device=keys.device)
            self.keys[rows, :, self.there], self.values[rows, :, self.there] = keys, values
        self.advance()

    def advance(self, there: bool = False) -> None:
        """A token of each was written. there: the device has counted it itself."""
        self.lengths = [length + 1 for length in self.lengths]
        if self._there is not None and not there:
            self._there += 1

    def drop(self, i: int, first: int, count: int) -> None:
        """Removes tokens from a window."""
        end = self.lengths[i]
        for tensor in (self.keys, self.values):
            tensor[i, :, first : end - count] = tensor[i, :, first + count : end].clone()
        self.lengths[i] -= count
        self._there = None

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values [batch, num_kv_heads, tokens, head_dim], and which to hide: bool [batch,
        1, tokens]; None: none."""
        longest = max(self.lengths)
        keys, values = self.keys[:, :, :longest], self.values[:, :, :longest]
        if min(self.lengths) == longest:
            return keys, values, None
        hidden = torch.arange(longest, device=keys.device) >= self.there[:, None]
        return keys, values, hidden[:, None]


def _capacity(tokens: int) -> int:
    """A multiple of 16, which kernels are compiled for."""
    return -(-tokens // 16) * 16


class Sitter:
    """Who has a seat."""

    seats: Seats
    seat: int

    def sit(self, seats: Seats, seat: int) -> None:
        self.seats, self.seat = seats, seat

    def leave(self) -> None:
        """Before it sits elsewhere: takes what was left with the seats."""


def together(sitters: Sequence[Sitter]) -> Seats:
    """The seats of exactly these, in this order."""
    seats = sitters[0].seats
    if len(seats.lengths) == len(sitters) and all(
        sitter.seats is seats and sitter.seat == i for i, sitter in enumerate(sitters)
    ):
        return seats
    seats = Seats([sitter.seats.window(sitter.seat) for sitter in sitters])
    for i, sitter in enumerate(sitters):
        sitter.leave()
        for tensor in (sitter.seats.keys, sitter.seats.values, sitter.seats.drawn):
            _used_here(tensor)
        sitter.sit(seats, i)
    return seats


def _used_here(tensor: Tensor) -> None:
    """Its memory may be another stream's, which must not have it back before this one is done."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
