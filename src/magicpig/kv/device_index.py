"""Keys hashed on the model's device, which sorts them into tables as well if it has Triton; if not,
the native core does.

A GPU does both in a fraction of the time that a CPU takes. Signs agree with the native core's but
for projections within rounding of zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from queue import Empty
from typing import Any

import numpy as np
import torch
from torch import Tensor

from magicpig import _native, reference, trace
from magicpig.attention.gpu import has_triton, is_out_of_memory
from magicpig.config import LSHConfig
from magicpig.kv import places
from magicpig.kv.base import LayerShape
from magicpig.kv.courier import courier, current, turns
from magicpig.kv.layer import LayerKV
from magicpig.kv.places import Place
from magicpig.kv.segments import LONGEST, MOST_AHEAD

MOST_BITS = 12  # of tables that are sorted on a GPU
PART, MOST_PARTS = 2048, 8  # of keys that it sorts side by side: keys of one, until there are 8
TRIED = 5000  # keys, in some parts
ALIGNED = 256  # bytes
UNSIGNED = {torch.int16: np.uint16, torch.int32: np.uint32}


def append_from(device: torch.device, kv: LayerKV, keys: Tensor, values: Tensor) -> None:
    """Adds tokens [num_kv_heads, tokens, head_dim], wherever they are; the device hashes them."""
    for first in range(0, keys.shape[1], LONGEST):
        part = slice(first, first + LONGEST)
        own, values_here = keys[:, part], _on_host(values[:, part])
        if not isinstance(kv.index, LSHConfig) or own.shape[1] < kv.index.shortest_indexed:
            kv.append(_on_host(own), values_here)
            continue
        found = _found_by(device, [own], kv)
        if found is None:
            kv.append(_on_host(own), values_here)
        else:
            kv._native.append_hashed(_on_host(own), values_here, found)


class GrowingSegment:
    """A segment of so many tokens, which come in parts. An index is made when all are there: keys
    are centred at the mean of all."""

    def __init__(self, kv: LayerKV, tokens: int) -> None:
        self.kv = kv
        self.has_tables = isinstance(kv.index, LSHConfig) and tokens >= kv.index.shortest_indexed
        self._native = _native.GrowingSegment(kv._native, tokens)
        self._ahead: _Ahead | None = None
        self._keys: list[Tensor] = []  # to be hashed when all are there

    def add(self, keys: Tensor, values: Tensor) -> None:
        """The next tokens [num_kv_heads, tokens, head_dim], in host memory."""
        self._native.add(keys, values)
        if self.has_tables:
            self._keys.append(keys)

    def hash_ahead(self, keys: Tensor) -> None:
        """Of all tokens, while the device has them; where the host has room for what it finds."""
        if self.has_tables:
            with suppress(Empty), _as_far_as_memory_goes():
                self._ahead = _Ahead(keys, self.kv)
            places.last_asked.append(courier(keys.device).mark())

    def finish_from(self, device: torch.device) -> None:
        """When all are there: the far context gets them. For hash tables, the device hashes their
        keys, if it has not done so."""
        if not self.has_tables:
            return self._native.finish()
        (ahead, self._ahead), (keys, self._keys) = (self._ahead, None), (self._keys, [])
        self._native.finish(ahead.found if ahead else _found_by(device, keys, self.kv))


class _Ahead:
    """What a device has found of keys, on its way to the host, where it takes one of the places;
    queue.Empty where there is none."""

    _place: Place | None = None

    def __init__(self, keys: Tensor, kv: LayerKV) -> None:
        assert isinstance(kv.index, LSHConfig)
        self._free = places.free
        self._place = places.place_or_empty()
        found = found_of(keys.to(kv.dtype), kv.index)
        sizes = [_aligned(tensor.nbytes) for tensor in found]
        self._memory = self._place.take(sum(sizes), keys.device)
        parts = torch.split(self._memory[: sum(sizes)], sizes)
        self._found = [
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(parts, found, strict=True)
        ]
        self._copies = courier(keys.device).fetch(found, self._found)

    def __del__(self) -> None:
        if self._place is not None:
            self._free.put(self._place)

    @property
    def found(self) -> Any:
        """Once: its place keeps the memory for the next one."""
        assert self._place
        self._copies.before_host()
        self._place.keep(self._memory)
        return _for_native(*self._found)


def _found_by(device: torch.device, keys: Sequence[Tensor], kv: LayerKV) -> Any:
    """What the native core wants to know of keys, which come in parts; None where the device has no
    memory to find it out: the native core can too."""
    assert isinstance(kv.index, LSHConfig)
    with _as_far_as_memory_goes(), turns(device), current(device):
        found = found_of(_side_by_side(keys, device).to(kv.dtype), kv.index)
        return _for_native(*map(_on_host, found))
    return None


def _side_by_side(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Keys [num_kv_heads, tokens, head_dim] as one tensor on the device, and not twice there."""
    if len(parts) == 1:
        return parts[0].to(device, non_blocking=True)
    heads, _, dim = parts[0].shape
    tokens = sum(part.shape[1] for part in parts)
    there = torch.empty(tokens, heads, dim, dtype=parts[0].dtype, device=device)
    first = 0
    for part in parts:
        last = first + part.shape[1]
        there[first:last].copy_(part.transpose(0, 1), non_blocking=True)
        first = last
    return there.transpose(0, 1)


@contextmanager
def _as_far_as_memory_goes() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise


def _for_native(means: Tensor, inv_norms: Tensor, *found: Tensor) -> Any:
    return means, inv_norms, *(tensor.numpy().view(UNSIGNED[tensor.dtype]) for tensor in found)


def sizes_ahead(lsh: LSHConfig, shape: LayerShape, tokens: int) -> list[int]:
    """Bytes of the host's memory, for what is found of keys of so many tokens: means, norms, and
    tables or signs."""
    heads, tables = shape.num_kv_heads, shape.num_kv_heads * lsh.num_tables
    sizes = [4 * heads * shape.head_dim, 4 * heads * tokens]
    if sorted_there(lsh):
        sizes += [4 * tables * (2**lsh.bits_per_table + 1), 2 * tables * tokens]
    else:
        sizes += [2 * heads * words_of(lsh) * tokens]
    return list(map(_aligned, sizes))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def bytes_hashing(lsh: LSHConfig, shape: LayerShape, tokens: int) -> int:
    """Of the device's memory: for what is found ahead, on its way to the host; for what is found
    beside that, with its keys; and for finding each."""
    heads, dim = shape.num_kv_heads, shape.head_dim
    found = sum(sizes_ahead(lsh, shape, tokens))
    signs, finding = 2 * heads * words_of(lsh) * tokens, 16 * dim * tokens  # by plain torch
    if sorted_there(lsh):
        counts = 4 * heads * lsh.num_tables * 2**lsh.bits_per_table * parts_of(tokens)
        finding = max(finding, signs + counts)
    return (MOST_AHEAD + 1) * found + 2 * finding + tokens * heads * dim * shape.dtype.itemsize


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.is_cpu:
        return tensor
    copied = courier(tensor.device).host_memory(tuple(tensor.shape), tensor.dtype)
    copied.copy_(tensor, non_blocking=True)
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return copied


def sorted_there(lsh: LSHConfig) -> bool:
    """Whether a GPU sorts keys into such tables. With more bits buckets hold fewer keys than their
    borders take."""
    return lsh.bits_per_table <= MOST_BITS


def parts_of(tokens: int) -> int:
    """Of a table, for as many warps: beyond that a GPU runs no more of them at a time."""
    return min(MOST_PARTS, -(-tokens // PART))


def found_of(keys: Tensor, lsh: LSHConfig) -> tuple[Tensor, ...]:
    """What the native core wants to know of keys [num_kv_heads, tokens, head_dim]: their means, and
    one over their norms, as hash_keys has them; and the tables, if the device sorts and has the
    memory for it, or signs."""
    with trace.device_span("hash", tokens=keys.shape[1]):
        means, inv_norms, signs = hash_keys(keys, lsh)
    shape = lsh.num_tables, lsh.bits_per_table
    if sorted_there(lsh) and has_triton(signs):
        from magicpig.kv import tables_on_gpu

        with _as_far_as_memory_goes():
            if _sorts_right(signs.device, *shape):
                with trace.device_span("sort", tokens=keys.shape[1]):
                    return means, inv_norms, *tables_on_gpu.sort(signs, *shape)
    return means, inv_norms, signs


@lru_cache(maxsize=8)
def _sorts_right(device: torch.device, num_tables: int, bits_per_table: int) -> bool:
    """Tried before it is relied on: a key in the wrong bucket would be no error but a bias, and the
    kernel counts on which lanes of a warp Triton gives keys to."""
    fault = "its tables are others than they should be"
    try:
        if _sorted_as_should_be(device, num_tables, bits_per_table, TRIED):
            return True
    except Exception as error:
        if is_out_of_memory(error):
            raise
        fault = str(error).split("\n", 1)[0] or type(error).__name__
    warnings.warn(
        f"{device} cannot sort keys into {num_tables} tables of {bits_per_table} bits ({fault}): "
        "the CPU does, and prompts take longer. Please report it.",
        stacklevel=2,
    )
    return False


def _sorted_as_should_be(
    device: torch.device, num_tables: int, bits_per_table: int, tokens: int
) -> bool:
    from magicpig.kv import tables_on_gpu

    shape = 2, -(-num_tables * bits_per_table // 16), tokens
    signs = np.random.default_rng(0).integers(-(2**15), 2**15, shape, dtype=np.int16)
    signs[:, :, 500:700] = signs[:, :, :1]  # keys that share their buckets
    there = torch.from_numpy(signs).to(device)
    found = tables_on_gpu.sort(there, num_tables, bits_per_table)
    expected = reference.sorted_into_tables(there, num_tables, bits_per_table)
    return all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, expected, strict=True))


@torch.no_grad()
def hash_keys(keys: Tensor, lsh: LSHConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Of keys [num_kv_heads, tokens, head_dim]: their means [num_kv_heads, head_dim]; and of keys
    less those, one over their norms [num_kv_heads, tokens], and signs of their projections, int16
    [num_kv_heads, projections / 16, tokens], a bit for each."""
    heads, tokens, dim = keys.shape
    if has_triton(keys):
        from magicpig.kv import hash_on_gpu

        directions = directions_of(lsh, dim, keys.device)
        return hash_on_gpu.hash_keys(keys, directions, columns_of(lsh))
    means = torch.empty(heads, dim, device=keys.device)
    inv_norms = torch.empty(heads, tokens, device=keys.device)
    signs = torch.empty(heads, words_of(lsh), tokens, dtype=torch.int16, device=keys.device)
    for head, *found in zip(keys, means, inv_norms, signs, strict=True):
        _hash_head(head, lsh, *found)
    return means, inv_norms, signs


def _hash_head(keys: Tensor, lsh: LSHConfig, mean: Tensor, inv_norms: Tensor, out: Tensor) -> None:
    wide = keys.float()
    mean.copy_(wide.double().mean(0))
    centred = wide - mean
    norms = centred.norm(dim=-1)
    has_direction = norms > (reference.AT_MEAN * mean.norm()).clamp(min=reference.MIN_NORM)
    inv_norms.copy_(torch.where(has_direction, 1 / norms, 0.0))
    centred = torch.where(has_direction[:, None], centred, 0.0)
    hashed(centred, directions_of(lsh, keys.shape[1], keys.device), columns_of(lsh), out)


@lru_cache(maxsize=8)
def directions_of(lsh: LSHConfig, head_dim: int, device: torch.device) -> Tensor:
    """Those of the projection, [head_dim, projections], bfloat16; on a GPU, as its kernel wants."""
    directions = reference.projection(lsh, head_dim).to(device).bfloat16()
    if not has_triton(device):
        return directions
    from magicpig.attention import exchange_on_gpu

    return exchange_on_gpu.padded(directions)


def columns_of(lsh: LSHConfig) -> int:
    """Projections."""
    return lsh.num_tables * lsh.bits_per_table


def words_of(lsh: LSHConfig) -> int:
    """Sixteen signs in each."""
    return -(-columns_of(lsh) // 16)


def hashed(vectors: Tensor, directions: Tensor, columns: int, out: Tensor | None = None) -> Tensor:
    """Signs of the projections of vectors [n, head_dim]: int16 [columns / 16, n].

    directions: as directions_of gives them, of which so many columns are real.
    out: to be filled, in the memory of the host or of the device.
    """
    if out is None:
        shape = -(-columns // 16), len(vectors)
        out = torch.empty(shape, dtype=torch.int16, device=vectors.device)
    if has_triton(vectors):
        from magicpig.attention import exchange_on_gpu

        exchange_on_gpu.hash_signs(vectors.contiguous(), directions, columns, out)
        return out
    found = vectors.bfloat16().float() @ directions.float() >= 0
    bits = torch.nn.functional.pad(found, (0, -columns % 16)).view(len(found), -1, 16)
    places = 1 << torch.arange(16, dtype=torch.int32, device=vectors.device)
    out.copy_((bits * places).sum(-1).to(torch.int16).T, non_blocking=True)
    return out
