"""SequenceKV: keys and values of one sequence in every layer of a model.

A SequenceLayer is a window, whose tokens are attended to exactly, and a far context behind it.
Tokens enter at the window's end; what outgrows the window becomes a segment of the far context,
built in the background. Until it is there the window keeps it: no token is ever out of sight.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from magicpig import _native
from magicpig.config import LSHConfig, WindowConfig
from magicpig.kv.layer import LayerKV, read_tokens


@cache
def _builder(process_id: int) -> ThreadPoolExecutor:
    """The one thread that builds segments in this process; native threads do the work."""
    return ThreadPoolExecutor(1, thread_name_prefix="magicpig-segments")


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes of a sequence: rows and index of the far context, and the windows."""

    rows: int
    index: int
    window: int


class SequenceLayer:
    """One sequence in one layer. One thread at a time.

    span: for layers with sliding attention: only this many of the newest tokens are kept and seen.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        index: LSHConfig | None,
        window: WindowConfig,
        span: int | None = None,
    ) -> None:
        self.config = window
        self.span = span
        self.far = LayerKV(num_heads, num_kv_heads, head_dim, None if span else index, dtype)
        self.window = _native.Window(self.far._native)
        self._next_far: Future[LayerKV] | None = None
        self._builder_process = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that can be seen."""
        return self.far.num_tokens + self.window.num_tokens

    def extend(self, keys: Tensor, values: Tensor) -> None:
        """Adds tokens [num_kv_heads, tokens, head_dim] and leaves no more than local in the window.

        A short context stays in the window as a whole.
        """
        if self.span:
            self._append(keys[:, -self.span :], values[:, -self.span :])
            return self.settle()
        self.settle(wait=True)
        sinks = max(self.config.sinks - self.window.num_tokens, 0) if not self.far.num_tokens else 0
        self._append(keys[:, :sinks], values[:, :sinks])
        keys, values = keys[:, sinks:], values[:, sinks:]
        recent = max(self.window.num_tokens - self.config.sinks, 0)
        moved = recent + keys.shape[1] - self.config.local
        if moved < self.config.block:
            return self._append(keys, values)
        if recent:
            old_keys, old_values = read_tokens(self.window, self.far, self.config.sinks, recent)
            keys = torch.cat([old_keys, keys.to(old_keys)], 1)
            values = torch.cat([old_values, values.to(old_values)], 1)
        far = self.far.fork()
        far.append(keys[:, :moved], values[:, :moved])
        self.far = far
        self.window.drop(self.config.sinks, recent)
        self._append(keys[:, moved:], values[:, moved:])

    def _append(self, keys: Tensor, values: Tensor) -> None:
        before = self.window.num_tokens
        if keys.shape[1] and not self.window.append(keys, values):
            self.window.drop(before, keys.shape[1])
            raise ValueError("keys or values are NaN or infinite, or their norm exceeds 1e18")

    def settle(self, wait: bool = False) -> None:
        """Moves what outgrew the window to the far context.

        A block's segment is begun when the block is full and takes its place when the next one is:
        at fixed lengths, so that what a token reads does not depend on how quick the builder was.
        wait: let it take its place now, if it was begun.
        """
        config = self.config
        if self.span:
            if self.window.num_tokens > self.span + config.block:
                self.window.drop(0, self.window.num_tokens - self.span)
            return
        if self.window.spoiled:
            return  # numbers that are not finite make no segment; the sequence's outputs tell
        if self._next_far and self._builder_process != os.getpid():
            self._next_far = None  # begun by the process this one was forked from, where it stays
        recent = self.window.num_tokens - config.sinks
        if self._next_far and (wait or recent >= config.local + 2 * config.block):
            # Before its result is asked for, so that a failed one is begun anew.
            job, self._next_far = self._next_far, None
            self.far = job.result().fork()
            self.window.drop(config.sinks, config.block)
            recent -= config.block
        if not self._next_far and recent >= config.local + config.block:
            tokens = read_tokens(self.window, self.far, config.sinks, config.block)
            self._builder_process = os.getpid()
            self._next_far = _builder(self._builder_process).submit(_extended, self.far, *tokens)

    def read_window(self) -> tuple[Tensor, Tensor]:
        """Keys and values [num_kv_heads, tokens, head_dim] of the window, copied."""
        return read_tokens(self.window, self.far, 0, self.window.num_tokens)

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values [num_kv_heads, tokens, head_dim] of all tokens, in order, copied."""
        keys, values = self.read_window()
        if not self.far.num_tokens:
            return keys, values
        sinks = self.config.sinks
        far_keys, far_values = self.far.read()
        return (
            torch.cat([keys[:, :sinks], far_keys, keys[:, sinks:]], 1),
            torch.cat([values[:, :sinks], far_values, values[:, sinks:]], 1),
        )

    def fork(self) -> SequenceLayer:
        """A sequence that shares the far context and has a window of its own."""
        other = copy.copy(self)
        other.far = self.far.fork()
        other.window = self.window.fork()
        return other

    def with_index(self, index: LSHConfig | None) -> SequenceLayer:
        """The same tokens with another index over the far context, or none; rows are shared."""
        if self.span or index == self.far.index:
            return self.fork()
        self.settle(wait=True)
        far = self.far
        other = SequenceLayer(
            far.num_heads, far.num_kv_heads, far.head_dim, far.dtype, index, self.config
        )
        if index is None:
            for i, num_tokens in enumerate(far.segment_sizes):
                rows, tables = far._native.segment_memory(i)
                other.far._native.adopt(num_tokens, rows, tables[:0])
        else:
            other.far.append(*far.read())
        other._append(*self.read_window())
        return other

    @property
    def nbytes(self) -> SequenceBytes:
        far = self.far.nbytes
        return SequenceBytes(far.rows, far.index, self.window.nbytes)


def _extended(far: LayerKV, keys: Tensor, values: Tensor) -> LayerKV:
    longer = far.fork()
    longer.append(keys, values)
    return longer


def step(
    layers: Sequence[SequenceLayer],
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """One token of each sequence: its key and value are added, its query attends to all of it.

    queries: [batch, num_heads, head_dim]; keys, values: [batch, num_kv_heads, head_dim].
    Returns the output, shaped and typed as queries; NaN where a sequence's numbers are not finite.
    """
    out = torch.empty(queries.shape, dtype=queries.dtype)
    span = layers[0].span
    _native.step(
        [layer.window for layer in layers],
        [] if span else [layer.far._native for layer in layers],
        queries if queries.is_contiguous() else queries.contiguous(),
        keys,
        values,
        scale,
        softcap or 0.0,
        span or 2**32,
        out,
    )
    return out


class SequenceKV:
    """One sequence in all layers of a model.

    layers: in the model's order. Those that are not attention are the model's own, and any type.
    num_tokens: whose keys and values are here.
    """

    def __init__(self, layers: Sequence[Any], num_tokens: int = 0) -> None:
        self.layers = list(layers)
        self.num_tokens = num_tokens

    @property
    def attention_layers(self) -> list[SequenceLayer]:
        return [layer for layer in self.layers if isinstance(layer, SequenceLayer)]

    def settle(self) -> None:
        """Moves what outgrew the windows; see SequenceLayer.settle."""
        for layer in self.attention_layers:
            layer.settle()

    def fork(self) -> SequenceKV:
        """A sequence that shares all far contexts and has windows of its own."""
        layers = [
            layer.fork() if isinstance(layer, SequenceLayer) else copy.deepcopy(layer)
            for layer in self.layers
        ]
        return SequenceKV(layers, self.num_tokens)

    def with_indexes(self, index_of: Callable[[int], LSHConfig | None]) -> SequenceKV:
        """The same tokens, layer i indexed as index_of(i) says; see SequenceLayer.with_index."""
        layers = [
            layer.with_index(index_of(i))
            if isinstance(layer, SequenceLayer)
            else copy.deepcopy(layer)
            for i, layer in enumerate(self.layers)
        ]
        return SequenceKV(layers, self.num_tokens)

    @property
    def nbytes(self) -> SequenceBytes:
        sizes = [layer.nbytes for layer in self.attention_layers]
        return SequenceBytes(
            sum(size.rows for size in sizes),
            sum(size.index for size in sizes),
            sum(size.window for size in sizes),
        )

    @property
    def share_read(self) -> float:
        """The share of the rows that decode steps have read of those there were; 1 before any."""
        reads = [layer.window.reads for layer in self.attention_layers]
        tokens = sum(there for _, there in reads)
        return sum(rows for rows, _ in reads) / tokens if tokens else 1.0
