"""NativeLayer: a sequence in one layer, kept by the native core in CPU memory.

Tokens enter at the window's end; what outgrows the window becomes a segment of the far context,
built in the background. Until it is there the window keeps it: no token is ever out of sight.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from magicpig import _native, trace
from magicpig.config import IndexConfig, ScanConfig, WindowConfig
from magicpig.kv.base import LayerShape, SequenceBytes, SequenceLayer
from magicpig.kv.cost import Cost
from magicpig.kv.layer import DTYPES, LayerKV, read_tokens


@cache
def builder(process_id: int) -> ThreadPoolExecutor:
    """The one thread that builds segments of new tokens; native threads do the work."""
    return ThreadPoolExecutor(1, thread_name_prefix="magicpig-segments")


class NativeLayer(SequenceLayer):
    """index: how rows of the far context are drawn; None: all are read."""

    def __init__(
        self,
        shape: LayerShape,
        index: IndexConfig | None,
        window: WindowConfig,
        span: int | None = None,
    ) -> None:
        self.shape = shape
        self.config = window
        self.span = span
        index = None if span else index
        self.far = LayerKV(shape.num_heads, shape.num_kv_heads, shape.head_dim, index, shape.dtype)
        self.window: _native.Window = self._new_window()
        self._next_far: Future[LayerKV] | None = None
        self._builder_process = 0
        self._book(Cost())

    def _new_window(self) -> Any:
        return _native.Window(self.far._native)

    @classmethod
    def step(
        cls,
        layers: Sequence[NativeLayer],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        device, queries = queries.device, queries.cpu()
        out = torch.empty(queries.shape, dtype=queries.dtype)
        span = layers[0].span
        with trace.span("attention", batch=len(layers)):
            _native.step(
                [layer.window for layer in layers],
                [] if span else [layer.far._native for layer in layers],
                queries if queries.is_contiguous() else queries.contiguous(),
                keys.cpu(),
                values.cpu(),
                scale,
                softcap or 0.0,
                span or 2**32,
                out,
            )
        return out.to(device)

    @property
    def kind(self) -> object:
        return type(self), self.far.index, self.span

    @property
    def num_tokens(self) -> int:
        return self.far.num_tokens + self.window.num_tokens

    def extend(self, keys: Tensor, values: Tensor, mass: Tensor | None = None) -> None:
        """Leaves no more than local in the window; a short context stays there as a whole."""
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
            dtype = old_keys.dtype
            keys = torch.cat([old_keys.to(keys.device), keys.to(dtype)], 1)
            values = torch.cat([old_values.to(keys.device), values.to(dtype)], 1)
        far = self.far.fork()
        self._append_far(far, keys[:, :moved], values[:, :moved])
        self._replace_far(far)
        self.window.drop(self.config.sinks, recent)
        self._append(keys[:, moved:], values[:, moved:])

    def _append_far(self, far: LayerKV, keys: Tensor, values: Tensor) -> None:
        far.append(keys.cpu(), values.cpu())

    def _append(self, keys: Tensor, values: Tensor) -> None:
        before = self.window.num_tokens
        if not keys.shape[1]:
            return
        if isinstance(self.window, _native.Window):
            keys, values = keys.cpu(), values.cpu()
        if not self.window.append(keys, values):
            self.window.drop(before, keys.shape[1])
            raise ValueError(
                "keys or values are NaN or infinite, or their norm exceeds 1e18 or the range of "
                f"{DTYPES[self.shape.dtype]}"
            )

    def settle(self, wait: bool = False) -> None:
        """A block's segment is begun when the block is full and takes its place when the next one
        is: at fixed lengths, so that what a token reads does not depend on the builder's speed.
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
            self._replace_far(job.result().fork())
            self.window.drop(config.sinks, config.block)
            recent -= config.block
        if not self._next_far and recent >= config.local + config.block:
            tokens = read_tokens(self.window, self.far, config.sinks, config.block)
            self._builder_process = os.getpid()
            self._next_far = builder(self._builder_process).submit(_extended, self.far, *tokens)

    def _replace_far(self, far: LayerKV) -> None:
        self._book(self.cost)  # what steps over the other one took
        self.far = far

    def _book(self, cost: Cost) -> None:
        self._booked, self._booked_reads = cost, self.window.far_reads

    def read_window(self) -> tuple[Tensor, Tensor]:
        """Keys and values [num_kv_heads, tokens, head_dim] of the window, copied."""
        return read_tokens(self.window, self.far, 0, self.window.num_tokens)

    def read(self) -> tuple[Tensor, Tensor]:
        keys, values = self.read_window()
        if not self.far.num_tokens:
            return keys, values
        sinks = self.config.sinks
        far_keys, far_values = self.far.read()
        return (
            torch.cat([keys[:, :sinks], far_keys, keys[:, sinks:]], 1),
            torch.cat([values[:, :sinks], far_values, values[:, sinks:]], 1),
        )

    def fork(self) -> NativeLayer:
        other = copy.copy(self)
        other.far = self.far.fork()
        other.window = self.window.fork()
        other._book(Cost())
        return other

    def empty(self) -> NativeLayer:
        return type(self)(self.shape, self.far.index, self.config, self.span)

    def take(self, other: NativeLayer) -> None:
        """An empty layer gets the tokens of another, which may have another index, or its window
        elsewhere; rows are shared where they can be."""
        other.settle(wait=True)
        if self.far.index == other.far.index:
            self._replace_far(other.far.fork())
        elif self.far.index is None:
            for i, num_tokens in enumerate(other.far.segment_sizes):
                rows, tables = other.far._native.segment_memory(i)
                self.far._native.adopt(num_tokens, rows, tables[:0])
        else:
            self.far.append(*other.far.read())
        self._append(*other.read_window())

    @property
    def nbytes(self) -> SequenceBytes:
        far = self.far.nbytes
        return SequenceBytes(far.rows, far.index, self.window.nbytes)

    @property
    def reads(self) -> tuple[int, int]:
        return self.window.reads

    @property
    def cost(self) -> Cost:
        reads = self.window.far_reads
        since = (now - then for now, then in zip(reads, self._booked_reads, strict=True))
        return replace(self._booked + self._spent(*since), steps=reads[0])

    def _spent(self, steps: int, rows: int, tokens: int, visited: int) -> Cost:
        """Of steps over the far context as it is.

        visited: entries of hash buckets.
        """
        shape, index, sizes = self.shape, self.far.index, self.far.segment_sizes
        queries = tokens // max(sum(sizes), 1)
        indexed = [size for size in sizes if index and size >= index.shortest_indexed]
        whole = queries * (sum(sizes) - sum(indexed))  # rows of segments that are read whole
        row_bytes = whole * shape.num_kv_heads // shape.num_heads * shape.row_bytes
        if not index or not indexed:
            return Cost(steps, rows, tokens, row_bytes)
        if isinstance(index, ScanConfig):
            code = shape.head_dim * index.bits_per_dim // 8 + 8  # with its factor and bias
            return Cost(
                steps,
                rows,
                tokens,
                row_bytes + (rows - whole) * shape.row_bytes,
                queries * shape.num_kv_heads // shape.num_heads * sum(indexed) * code,
                queries * (sum(indexed) + shape.head_dim) * shape.head_dim,
            )
        borders = 2 * 4 * index.num_tables * len(indexed)
        return Cost(
            steps,
            rows,
            tokens,
            row_bytes + (rows - whole) * (shape.row_bytes + 4),  # keys' norms are read along
            2 * visited + queries * borders,
            queries * index.bits_per_table * index.num_tables * shape.head_dim,
        )


def _extended(far: LayerKV, keys: Tensor, values: Tensor) -> LayerKV:
    longer = far.fork()
    with trace.span("segment", tokens=keys.shape[1]):
        longer.append(keys, values)
    return longer
