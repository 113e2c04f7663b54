"""Tray: what goes from the model's device to the CPU in a step of a layer, and what comes back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from magicpig import _native
from magicpig.attention.gpu import has_triton
from magicpig.attention.merge import merge
from magicpig.config import IndexConfig, LSHConfig
from magicpig.kv.base import LayerShape
from magicpig.kv.device_index import columns_of, directions_of, hashed, words_of
from magicpig.kv.layer import MAX_NORM

MOST_KEPT = 16  # of trays, by a thread
PATIENCE = 10.0  # seconds, before a device is asked what is the matter
NEVER = 2**62  # a ticket that is not reached


Drawn = tuple[tuple[Any, Any, Any, Any], Any]  # rows, and how many of each head


class Served(NamedTuple):
    """took: seconds, from when it was asked. spent: thread-seconds of drawing, of attention over
    drawn rows and over rows read whole. tokens: of each context."""

    took: float
    spent: tuple[float, float, float]
    tokens: list[int]


class Tray:
    """For a batch in layers of one kind, which use it one after another, in one stream.

    near: output [batch, heads, dim] and log-sum-exp [batch, heads] over windows, on the device.
    far: the same over far contexts, in host memory that the device can read.
    asked: the queries there.
    out, lse, rows, visited, predicted: `far` and what the native core counts, [batch, heads]; numpy
        arrays, which it takes faster than tensors.
    signs: of the queries' projections, uint16 [projections / 16, batch * heads], for hash tables.
    """

    def __init__(self, batch: int, shape: LayerShape, index: IndexConfig | None) -> None:
        heads, dim, device = shape.num_heads, shape.head_dim, shape.device
        pinned = device.type == "cuda"
        self.near = (
            torch.empty(batch, heads, dim, device=device),
            torch.empty(batch, heads, device=device),
        )
        self.far = (
            torch.empty(batch, heads, dim, pin_memory=pinned),
            torch.empty(batch, heads, pin_memory=pinned),
        )
        self.asked = torch.empty(batch, heads, dim, dtype=shape.dtype, pin_memory=pinned)
        self._signs: Tensor | None = None
        self.signs: Any = None
        self._hash: tuple[Tensor, int] | None = None
        if isinstance(index, LSHConfig):
            self._hash = directions_of(index, dim, device), columns_of(index)  # graphs read it
            self._signs = torch.empty(
                words_of(index), batch * heads, dtype=torch.int16, pin_memory=pinned
            )
            self.signs = self._signs.numpy().view(np.uint16)
        self.out: Any = self.far[0].numpy()
        self.lse: Any = self.far[1].numpy()
        self.rows: Any = np.zeros((batch, heads), np.int64)
        self.visited: Any = np.zeros((batch, heads), np.int64)
        self.predicted: Any = np.zeros((batch, heads), np.float32)
        self._ticket = torch.zeros(1, dtype=torch.int64, device=device)  # the last that was sent
        self._arrived = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self._answered = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self._seen: Any = self._arrived.numpy()
        self._told: Any = self._answered.numpy()
        self._expected = 0
        self._open = False

    def ask(self, queries: Tensor) -> None:
        """Sends queries [batch, heads, dim], and their hashes; zeros for those that are not finite
        or too large."""
        if has_triton(queries):
            from magicpig.attention import exchange_on_gpu

            exchange_on_gpu.ask(queries, self.asked)
        else:
            fine = _are_fine(queries)
            self.asked.copy_(torch.where(fine, queries, 0.0), non_blocking=True)
        if self._signs is not None and self._hash is not None:
            hashed(queries.flatten(0, 1), *self._hash, self._signs)

    def begin(self) -> None:
        """Before a step that is not recorded."""
        if self._open:
            self.forget()
        self._open = True

    def sent(self, stamp: Tensor | None = None) -> None:
        """Behind all that is asked, in the device's stream: its arrival shows by a new ticket."""
        if has_triton(self._ticket):
            from magicpig.attention import exchange_on_gpu

            exchange_on_gpu.send(self._ticket, self._arrived, stamp)
        else:
            self._ticket += 1
            self._arrived.copy_(self._ticket, non_blocking=True)

    def serve(
        self, contexts: Sequence[Any], scale: float, softcap: float | None, drawn: Drawn | None
    ) -> Served:
        """Waits for what was sent once more, attends to the contexts and fills `far`; the device
        that waits for it goes on.

        contexts: of the batch, in the native core. drawn: see DeviceScan.
        """
        self._expected += 1
        found = None
        while found is None:
            found = _native.serve(
                self._seen,
                self._expected,
                PATIENCE,
                self._told,
                contexts,
                self.asked,
                scale,
                softcap or 0.0,
                self.out,
                self.lse,
                self.rows,
                self.visited,
                self.predicted,
                self.signs,
                *(drawn or (None, None)),
            )
            if found is None:
                self._check()
        self._open = False
        took, (drawing, reading, whole, tokens) = found
        return Served(took, (drawing, reading, whole), tokens)

    def _check(self) -> None:
        """Raises what went wrong with the device, if something did."""
        done = torch.cuda.current_stream(self._ticket.device).query()
        if done and self._seen[0] != self._expected:
            raise RuntimeError(
                f"the device came to its end without ticket {self._expected}: its last is "
                f"{self._seen[0]}"
            )

    def give_up(self) -> None:
        """On the step: the device is not to wait, whatever it finds."""
        _native.tell(self._told, NEVER)

    def forget(self) -> None:
        """After a step that did not come to its end."""
        if self._ticket.is_cuda:
            torch.cuda.current_stream(self._ticket.device).synchronize()
        self._expected = int(self._seen[0])
        _native.tell(self._told, self._expected)

    def await_answer(self, stamps: Tensor | None = None) -> None:
        """In the stream of a GPU: it goes on when the CPU has told it to."""
        from magicpig.attention import exchange_on_gpu

        exchange_on_gpu.await_answer(self._ticket, self._answered, stamps)

    def answer(self, queries: Tensor, advanced: Tensor | None = None) -> Tensor:
        """Both parts merged, in the queries' dtype; NaN for those that were not fine.

        advanced: where windows are that grew by a token; see exchange_on_gpu.answer.
        """
        if has_triton(queries):
            from magicpig.attention import exchange_on_gpu

            return exchange_on_gpu.answer(queries, self.near, self.far, advanced)
        out, lse = (part.to(queries.device, non_blocking=True) for part in self.far)
        merged, _ = merge(*self.near, out, lse)
        return torch.where(_are_fine(queries), merged, torch.nan).to(queries.dtype)


def _are_fine(queries: Tensor) -> Tensor:
    norms: Tensor = queries.float().norm(dim=-1, keepdim=True)
    return norms <= MAX_NORM


_kept = threading.local()


def tray_for(batch: int, shape: LayerShape, index: IndexConfig | None) -> Tray:
    """This thread's."""
    trays: dict[Any, Tray] = _kept.__dict__.setdefault("trays", {})
    key = batch, shape, index
    if key not in trays:
        if len(trays) >= MOST_KEPT:
            del trays[next(iter(trays))]
        trays[key] = Tray(batch, shape, index)
    return trays[key]
