"""Segments made on another device: rows side by side and hash tables, as the native core has them.

A GPU that reads a prompt has its keys at hand: it hashes and sorts them in a fraction of the time
that a CPU takes, and the finished memory is copied over. Signs agree with the native core's but for
projections within rounding of zero.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from magicpig import _native, reference
from magicpig.config import LSHConfig
from magicpig.kv.layer import LayerKV

MAX_TOKENS = 65536  # of a segment
AT_MEAN = 1e-4  # nearer to the mean than this share of its norm, a key has no direction
MAX_NORM = 1e18
ALIGNMENT = 64


def append_from_device(kv: LayerKV, keys: Tensor, values: Tensor) -> None:
    """Adds tokens [num_kv_heads, tokens, head_dim] as segments that are made where they are."""
    for name, tensor in (("keys", keys), ("values", values)):
        if not bool((tensor.float().norm(dim=-1) <= MAX_NORM).all()):
            raise ValueError(f"{name} are NaN or infinite, or their norm exceeds {MAX_NORM:g}")
    for first in range(0, keys.shape[1], MAX_TOKENS):
        part = slice(first, min(first + MAX_TOKENS, keys.shape[1]))
        count = part.stop - first
        if not isinstance(kv.index, LSHConfig) or count < kv.index.shortest_indexed:
            kv.append(keys[:, part].cpu(), values[:, part].cpu())
            continue
        rows = _rows(keys[:, part], values[:, part], kv.dtype)
        tables = tables_of(keys[:, part].to(kv.dtype), kv.index)
        kv._native.adopt(count, _on_host(rows), _on_host(tables))


def _on_host(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The tensor's bytes, in memory on huge pages."""
    flat = tensor.contiguous().view(torch.uint8).flatten()
    memory = _native.empty_bytes(flat.numel())
    torch.from_numpy(memory).copy_(flat)
    return memory


def _rows(keys: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """[num_kv_heads, tokens, 2 * padded head_dim]: key and value of a token in one stretch."""
    short = -keys.shape[2] % 16
    return torch.cat([pad(keys, (0, short)), pad(values, (0, short))], 2).to(dtype)


def tables_of(keys: Tensor, lsh: LSHConfig) -> Tensor:
    """The memory of a segment's hash tables: uint8 [num_kv_heads, bytes]."""
    return torch.stack([_tables_of_head(head, lsh) for head in keys])


def _tables_of_head(keys: Tensor, lsh: LSHConfig) -> Tensor:
    """Of keys [tokens, head_dim]: ids, borders of buckets, 1 / |k - mean|, the mean."""
    wide = keys.float()
    mean = wide.double().mean(0).float()
    centred = wide - mean
    norms = centred.norm(dim=-1)
    far = norms > (AT_MEAN * mean.norm()).clamp(min=reference.MIN_NORM)
    centred = torch.where(far[:, None], centred, 0.0)
    ids, borders = _sorted(_codes(centred, lsh), 2**lsh.bits_per_table)
    parts = (
        ids.to(torch.int32).to(torch.int16),  # as 16 bits, whatever their sign
        borders.to(torch.int32),
        torch.where(far, 1 / norms, 0.0),
        pad(mean, (0, -len(mean) % 16)),
    )
    return torch.cat([_aligned(part) for part in parts])


@lru_cache(maxsize=8)
def directions_of(lsh: LSHConfig, head_dim: int, device: torch.device) -> Tensor:
    """Those of the projection, [head_dim, projections], bfloat16."""
    return reference.projection(lsh, head_dim).to(device).bfloat16()


def _codes(centred: Tensor, lsh: LSHConfig) -> Tensor:
    """The bucket [num_tables, tokens] of each key in each table."""
    directions = directions_of(lsh, centred.shape[1], centred.device)
    bits = (centred.bfloat16() @ directions >= 0).view(len(centred), lsh.num_tables, -1)
    codes = torch.zeros(bits.shape[:2], dtype=torch.int32, device=centred.device)
    for i in range(lsh.bits_per_table):
        codes |= bits[..., i].int() << i
    return codes.T.contiguous()


def _sorted(codes: Tensor, num_buckets: int) -> tuple[Tensor, Tensor]:
    """Ids [num_tables, tokens] by bucket, and the buckets' borders [num_tables, buckets + 1]."""
    ordered, ids = codes.sort(dim=1, stable=True)
    edges = torch.arange(num_buckets + 1, dtype=torch.int32, device=codes.device)
    return ids, torch.searchsorted(ordered, edges.expand(len(codes), -1).contiguous())


def _aligned(part: Tensor) -> Tensor:
    """A tensor's bytes, padded."""
    flat = part.contiguous().view(torch.uint8).flatten()
    return pad(flat, (0, -flat.numel() % ALIGNMENT))
