"""Exact attention of many queries, what a prompt needs: on the native core where it can, else in
torch."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from magicpig import _native
from magicpig.attention.in_torch import attention_in_torch

MAX_DIM, MAX_SCALE, MAX_SOFTCAP = 256, 100, 1e6  # what the native core takes


def exact_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    span: int | None = None,
) -> Tensor:
    """Attention [batch, heads, queries, dim] of queries that shaped over keys and values.

    keys, values: [batch, kv_heads, tokens, dim].
    mask: [batch or 1, 1, queries, tokens], True (or 0, of floats) where a query sees a key;
        None: the queries are the last tokens, and each sees what is not behind it.
    span: without a mask, how many tokens a query sees at most, itself the last; None: all.
    """
    if span is not None and mask is not None:
        raise ValueError("mask and span exclude each other: a mask says all")
    if mask is None and _suits_native(queries, keys, values, scale, softcap):
        return _natively(queries, keys, values, scale, softcap, span)
    return attention_in_torch(queries, keys, values, mask, scale, softcap, span)


def _suits_native(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
) -> bool:
    tensors = (queries, keys, values)
    return (
        all(x.is_cpu and x.dtype == torch.bfloat16 and x.stride(-1) == 1 for x in tensors)
        and keys.shape == values.shape
        and queries.shape[-1] % 8 == 0
        and queries.shape[-1] <= MAX_DIM
        and 0 < scale <= MAX_SCALE
        and (softcap is None or 0 < softcap <= MAX_SOFTCAP)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        and _native.isa() != "scalar"  # torch has vectors
        and not torch_has_tiles()
    )


@cache
def torch_has_tiles() -> bool:
    """Whether torch multiplies with AMX tiles here: two to five times as fast as vectors are."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def _natively(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
    span: int | None,
) -> Tensor:
    batch, heads, num_queries, dim = queries.shape
    out = queries.new_empty(batch, num_queries, heads, dim)  # as the model's next layer wants it
    for i in range(batch):
        _native.attend_prompt(
            queries[i], keys[i], values[i], scale, softcap or 0.0, span or 0, out[i]
        )
    return out.transpose(1, 2)
