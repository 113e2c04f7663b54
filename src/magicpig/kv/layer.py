"""LayerKV: the far context of one sequence in one layer, and attention over it.

Checks what callers pass, in torch's words, and hands it to the native core. No algorithm here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from magicpig import _native, reference
from magicpig.config import IndexConfig, LSHConfig, ScanConfig, check_int

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
MAX_HEADS = 4096
MAX_NORM = 1e18  # of keys, values and queries
MAX_SCALE = 100.0  # beyond it, scores of the largest accepted vectors would overflow
MAX_SOFTCAP = 1e6


@dataclass(frozen=True)
class NBytes:
    """Bytes of a LayerKV's rows and index; a shared segment counts in each that shares it."""

    rows: int
    index: int


@dataclass(frozen=True)
class AttendStats:
    """What an attend read.

    rows: int64 [num_heads], key/value rows per query head. num_tokens: of the sequence then.
    visited: int64 [num_heads], entries of hash buckets that were walked through.
    predicted_error: float32 [num_heads], of the output, relative to its norm; None unless the index
        has a target_error.
    """

    rows: Tensor
    num_tokens: int
    visited: Tensor
    predicted_error: Tensor | None = None

    @property
    def share(self) -> Tensor:
        """float32 [num_heads]: the share of the sequence's rows that was read."""
        return self.rows / max(self.num_tokens, 1)


@lru_cache(maxsize=64)
def native_lsh(lsh: LSHConfig, head_dim: int) -> _native.Lsh:
    """The native form of a configuration: one for all layers and sequences that use it."""
    directions = reference.projection(lsh, head_dim)
    return _native.Lsh(lsh.bits_per_table, lsh.num_tables, lsh.min_collisions, directions)


@lru_cache(maxsize=64)
def native_scan(scan: ScanConfig, head_dim: int) -> _native.Scan:
    """The native form of a configuration: one for all layers and sequences that use it."""
    signs = reference.rotation_signs(scan, head_dim)
    return _native.Scan(
        scan.bits_per_dim,
        scan.budget,
        scan.min_rows,
        scan.target_error or 0.0,
        scan.seed,
        head_dim,
        signs,
    )


def check_tensor(name: str, tensor: object, shape: Sequence[int | str]) -> Tensor:
    """`tensor`, if it is a dense CPU tensor of a known dtype and this shape (a str: any size)."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, not on {tensor.device}; move it with .cpu()")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, not {tensor.layout}")
    if tensor.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"{name} must be one of {known}, not {tensor.dtype}")
    if tensor.dim() != len(shape) or any(
        isinstance(size, int) and size != given
        for size, given in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join(str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], not {list(tensor.shape)}")
    if tensor.numel() and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension; call .contiguous()")
    return tensor.detach().resolve_neg()


class LayerKV:
    """Keys and values of one sequence in one layer, as immutable indexed segments in CPU memory.

    num_heads, num_kv_heads: query heads and the key/value heads they share, evenly.
    head_dim: a multiple of 8 up to 256.
    index: how rows are drawn, or None to always read every row.
    dtype: of the stored rows: torch.bfloat16, float16 or float32.

    Thread-safe: any number of threads may attend, fork and append at once; an attend sees the
    tokens appended before it began.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        index: IndexConfig | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
            check_int(name, value, 1, MAX_HEADS)
        check_int("head_dim", head_dim, 8, 256)
        if index is not None and not isinstance(index, IndexConfig):
            raise TypeError(f"index must be an LSHConfig, a ScanConfig or None, not {index!r}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, not {dtype}")
        if head_dim % 8:
            raise ValueError(f"head_dim must be a multiple of 8, not {head_dim}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.index = index
        self.dtype = dtype
        self.last_stats: AttendStats | None = None
        self._native = _native.LayerKV(
            num_heads,
            num_kv_heads,
            head_dim,
            DTYPES[dtype],
            native_lsh(index, head_dim) if isinstance(index, LSHConfig) else None,
            native_scan(index, head_dim) if isinstance(index, ScanConfig) else None,
            index.shortest_indexed if index else 0,
        )

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Adds tokens: keys and values [num_kv_heads, tokens, head_dim], copied. All or nothing."""
        shape = (self.num_kv_heads, "tokens", self.head_dim)
        keys = check_tensor("keys", keys, shape)
        values = check_tensor("values", values, (self.num_kv_heads, keys.shape[1], self.head_dim))
        self._native.append(keys, values)

    def attend(
        self,
        queries: Tensor,
        *,
        exact: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of queries [num_heads, head_dim].

        Returns float32 output [num_heads, head_dim] and log-sum-exp [num_heads].

        exact: read all rows instead of drawing them.
        scale: of the scores, 1 / sqrt(head_dim) unless given.
        softcap: scores s become softcap * tanh(s / softcap), as some models want it.
        Over no tokens the result is (0, -inf).
        """
        queries = check_tensor("queries", queries, (self.num_heads, self.head_dim))
        out, lse = _attend([self], queries[None], exact, scale, softcap)
        return out[0], lse[0]

    def sample(
        self, queries: Tensor, scale: float | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What `attend` would read for queries [num_heads, head_dim] at this scale of the scores.

        Per head: row ids (int32, ascending) and the logs of the probabilities that each was drawn
        (float32). Rows of segments without an index are all there, with probability 1. With a
        target_error and a softcap, which is not known here, attend may read a few rows more or
        less.
        """
        queries = check_tensor("queries", queries, (self.num_heads, self.head_dim)).contiguous()
        scale = _number("scale", scale, self.head_dim**-0.5, MAX_SCALE)
        heads = _native.sample(self._native, queries[None], scale)
        return [rows for rows, _ in heads], [log_probability for _, log_probability in heads]

    def attend_rows(
        self,
        queries: Tensor,
        rows: Sequence[Tensor],
        log_probability: Sequence[Tensor],
        *,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of queries [num_heads, head_dim] over rows that the caller chose.

        rows: of each head, row ids, int32. log_probability: as rows, float32, logs of the
        probabilities that each was drawn: it counts one over that times. What `sample` gives for
        the queries is what `attend` reads; another rule's rows are as welcome.
        Returns float32 output [num_heads, head_dim] and log-sum-exp [num_heads], as `attend`.
        """
        queries = check_tensor("queries", queries, (self.num_heads, self.head_dim)).contiguous()
        ids = _padded("rows", rows, self.num_heads, torch.int32)
        logs = _padded("log_probability", log_probability, self.num_heads, torch.float32)
        counts = torch.tensor([[len(each) for each in rows]], dtype=torch.int32)
        if counts[0].tolist() != [len(each) for each in log_probability]:
            raise ValueError("rows and log_probability must have as many elements, head by head")
        scale = _number("scale", scale, self.head_dim**-0.5, MAX_SCALE)
        softcap = _number("softcap", softcap, 0.0, MAX_SOFTCAP)
        out, lse = torch.empty(1, self.num_heads, self.head_dim), torch.empty(1, self.num_heads)
        _native.attend_rows(
            [self._native], queries[None], scale, softcap, ids, logs, counts, out, lse
        )
        return out[0], lse[0]

    def read(self, first: int = 0, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values [num_kv_heads, count, head_dim] of tokens from `first` on, copied."""
        count = self.num_tokens - first if count is None else count
        return read_tokens(self._native, self, first, count)

    def fork(self) -> LayerKV:
        """A LayerKV that shares all tokens so far. Appends to one do not show in the other."""
        other = copy.copy(self)
        other._native = self._native.fork()
        other.last_stats = None
        return other

    @property
    def num_tokens(self) -> int:
        return self._native.num_tokens

    @property
    def segment_sizes(self) -> list[int]:
        """Tokens of each segment, oldest first."""
        return self._native.segment_sizes

    @property
    def nbytes(self) -> NBytes:
        return NBytes(*self._native.nbytes)

    def __repr__(self) -> str:
        return (
            f"LayerKV({self.num_tokens} tokens, {self.num_heads}/{self.num_kv_heads} heads, "
            f"head_dim {self.head_dim}, {self.dtype}, index={self.index})"
        )


class Rows(Protocol):
    """Tokens that can be copied: a native LayerKV's or a window's."""

    @property
    def num_tokens(self) -> int: ...

    def read(self, first: int, keys: Tensor, values: Tensor, /) -> None: ...


def read_tokens(source: Rows, like: LayerKV, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Copies of keys and values [num_kv_heads, count, head_dim] of native rows shaped as `like`."""
    if first < 0 or count < 0 or first + count > source.num_tokens:
        raise ValueError(
            f"tokens {first} to {first + count} are not all among the {source.num_tokens} there are"
        )
    shape = (like.num_kv_heads, count, like.head_dim)
    keys, values = torch.empty(shape, dtype=like.dtype), torch.empty(shape, dtype=like.dtype)
    source.read(first, keys, values)
    return keys, values


def attend(
    kvs: Sequence[LayerKV],
    queries: Tensor,
    *,
    exact: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a batch of sequences in one native call: queries[i] over kvs[i].

    queries: [batch, num_heads, head_dim].
    Returns float32 output of that shape and log-sum-exp [batch, num_heads].
    Sequences may differ in length, not in heads, head_dim, dtype or index. See LayerKV.attend.
    """
    if not isinstance(kvs, Sequence):
        raise TypeError(f"kvs must be a list of LayerKV, not {type(kvs).__name__}")
    if not kvs:
        raise ValueError("kvs must hold at least one LayerKV; it is empty")
    for i, kv in enumerate(kvs):
        if not isinstance(kv, LayerKV):
            raise TypeError(f"kvs[{i}] must be a LayerKV, not {type(kv).__name__}")
        for field in ("num_heads", "num_kv_heads", "head_dim", "dtype", "index"):
            mine, expected = getattr(kv, field), getattr(kvs[0], field)
            if mine != expected:
                raise ValueError(
                    f"kvs[{i}] has {field} {mine}, kvs[0] has {expected}: a batch must agree"
                )
    shape = (len(kvs), kvs[0].num_heads, kvs[0].head_dim)
    return _attend(kvs, check_tensor("queries", queries, shape), exact, scale, softcap)


def _padded(name: str, tensors: Sequence[Tensor], num_heads: int, dtype: torch.dtype) -> Tensor:
    """[1, num_heads, most], of a tensor for each head."""
    if not isinstance(tensors, Sequence) or len(tensors) != num_heads:
        raise ValueError(f"{name} must be a list of {num_heads} tensors, one for each head")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or tensor.dim() != 1 or tensor.dtype != dtype:
            raise TypeError(f"{name}[{i}] must be a tensor [n] of {dtype}")
    padded = torch.zeros(1, num_heads, max(map(len, tensors)), dtype=dtype)
    for i, tensor in enumerate(tensors):
        padded[0, i, : len(tensor)] = tensor
    return padded


def _number(name: str, value: float | None, default: float, highest: float) -> float:
    """`value`, or the default for None, if it is a number above 0 and at most `highest`."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number or None, not {value!r}")
    if not 0 < value <= highest:
        raise ValueError(f"{name} must be above 0 and at most {highest:g}, not {value}")
    return value


def _attend(
    kvs: Sequence[LayerKV],
    queries: Tensor,
    exact: bool,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    if not isinstance(exact, bool):
        raise TypeError(f"exact must be True or False, not {exact!r}")
    scale = _number("scale", scale, kvs[0].head_dim ** -0.5, MAX_SCALE)
    softcap = _number("softcap", softcap, 0.0, MAX_SOFTCAP)
    out = torch.empty(queries.shape, dtype=torch.float32)
    lse, predicted = torch.empty(queries.shape[:2]), torch.zeros(queries.shape[:2])
    rows, visited = torch.zeros(2, *queries.shape[:2], dtype=torch.int64)
    natives = [kv._native for kv in kvs]
    *_, tokens = _native.attend(
        natives, queries.contiguous(), scale, softcap, exact, out, lse, rows, visited, predicted
    )
    index = kvs[0].index
    predicts = isinstance(index, ScanConfig) and index.target_error is not None
    for i, kv in enumerate(kvs):
        kv.last_stats = AttendStats(
            rows[i], tokens[i], visited[i], predicted[i] if predicts else None
        )
    return out, lse
