"""DeviceWindow: a window in the memory of the model's device, with what the native one can do."""

from __future__ import annotations

import torch
from torch import Tensor

from magicpig.kv.base import LayerShape
from magicpig.kv.layer import MAX_NORM
from magicpig.kv.seats import Seats, Sitter


class DeviceWindow(Sitter):
    """As _native.Window, whose methods have the same names and meaning.

    seconds: thread-seconds of the native core on steps whose first sequence this was: drawing rows,
        attention over drawn rows, and over rows read whole.
    """

    spoiled = False  # numbers that are not finite are found when they leave for the far context

    def __init__(self, shape: LayerShape) -> None:
        self.shape = shape
        empty = torch.empty(
            shape.num_kv_heads, 0, shape.head_dim, dtype=shape.dtype, device=shape.device
        )
        self.sit(Seats([(empty, empty)]), 0)
        self.reads = 0, 0
        self.far_reads = 0, 0, 0, 0
        self.seconds = 0.0, 0.0, 0.0

    @property
    def num_tokens(self) -> int:
        return self.seats.lengths[self.seat]

    @property
    def nbytes(self) -> int:
        return 2 * self.seats.window(self.seat)[0].nbytes

    @torch.inference_mode()
    def append(self, keys: Tensor, values: Tensor) -> bool:
        """Adds tokens [num_kv_heads, tokens, head_dim]; whether their norms are in bounds, which is
        looked at where they come from."""
        old_keys, old_values = self.seats.window(self.seat)
        new = keys.to(old_keys), values.to(old_values)
        window = torch.cat([old_keys, new[0]], 1), torch.cat([old_values, new[1]], 1)
        self.sit(Seats([window]), 0)
        stored = (x.to(self.shape.dtype).float() for x in (keys, values))
        return all(bool((x.norm(dim=-1) <= MAX_NORM).all()) for x in stored)

    @torch.inference_mode()
    def drop(self, first: int, count: int) -> None:
        self.seats.drop(self.seat, first, count)

    @torch.inference_mode()
    def read(self, first: int, keys: Tensor, values: Tensor) -> None:
        """Copies tokens from `first` on to keys and values [num_kv_heads, tokens, head_dim]."""
        for mine, theirs in zip(self.seats.window(self.seat), (keys, values), strict=True):
            theirs.copy_(mine[:, first : first + theirs.shape[1]])

    @torch.inference_mode()
    def fork(self) -> DeviceWindow:
        other = DeviceWindow(self.shape)
        other.sit(Seats([self.seats.window(self.seat)]), 0)
        return other

    def spend(self, spent: tuple[float, float, float]) -> None:
        draw, drawn, whole = self.seconds
        self.seconds = draw + spent[0], drawn + spent[1], whole + spent[2]

    def count(self, rows: int, visited: int, far_tokens: int) -> None:
        """A step of all query heads: rows of the far context that they read, of those there are."""
        heads = self.shape.num_heads
        near, there = heads * self.num_tokens, heads * far_tokens
        self.reads = self.reads[0] + rows + near, self.reads[1] + there + near
        steps, far_rows, far_there, walked = self.far_reads
        self.far_reads = steps + 1, far_rows + rows, far_there + there, walked + visited
