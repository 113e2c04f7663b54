"""Exact attention of many queries in plain torch: any device, dtype and mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from magicpig.attention.merge import merge

SCORES_AT_ONCE = 2**24  # floats, where scores are written out


def attention_in_torch(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    span: int | None = None,
) -> Tensor:
    """As `exact_attention`."""
    if span is not None:
        mask = sliding_mask(queries.shape[2], keys.shape[2], span, queries.device)
    if softcap is not None:
        return _by_scores(queries, keys, values, mask, scale, softcap)
    num_queries, tokens = queries.shape[2], keys.shape[2]
    here = queries.device.type == "cpu"
    if mask is not None and not here:  # most GPUs have no kernel for groups of heads and a mask
        keys, values = _for_each_head(queries, keys, values)
    if mask is not None or num_queries == 1 or (here and num_queries == tokens):
        causal = mask is None and num_queries > 1
        return scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
        )
    if not here:
        if not _has_flash(queries, keys, values):
            return _in_parts(queries, keys, values, scale)
        bias: Any = causal_lower_right(num_queries, tokens)
        return scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, scale=scale, enable_gqa=True
        )
    # What all queries see, then what they see of each other: no mask is ever written out.
    seen = tokens - num_queries
    folded = _folded(queries, keys)
    past, past_lse = _flash(folded, keys[:, :, :seen], values[:, :, :seen], False, scale)
    own_keys, own_values = _for_each_head(queries, keys[:, :, seen:], values[:, :, seen:])
    own, own_lse = _flash(queries, own_keys, own_values, True, scale)
    shape = own.shape
    out, _ = merge(past.reshape(shape).float(), past_lse.reshape(shape[:-1]), own.float(), own_lse)
    return out.to(queries.dtype)


def _folded(queries: Tensor, keys: Tensor) -> Tensor:
    """Queries [batch, kv_heads, queries of a group's heads, dim], one head's behind the other's:
    keys that a group shares need not be repeated for them."""
    batch, kv_heads = keys.shape[:2]
    return queries.reshape(batch, kv_heads, -1, queries.shape[-1])


def _for_each_head(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a group's heads, which share them."""
    group = queries.shape[1] // keys.shape[1]
    if group == 1:
        return keys, values
    return keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)


def _has_flash(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether a GPU does without scores that are written out; not in float32, nor do older ones."""
    if not queries.is_cuda:
        return False
    asked = SDPAParams(queries, keys, values, None, 0.0, False, True)
    return can_use_flash_attention(asked)


def _flash(
    queries: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, 0.0, causal, scale=scale
    )
    return out, lse


def _in_parts(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention, some queries at a time."""
    num_queries, tokens = queries.shape[2], keys.shape[2]
    group = queries.shape[1] // keys.shape[1]
    outs = []
    for part in _parts(queries, tokens):
        own = queries[:, :, part]
        seen = _causal(num_queries, tokens, queries.device, part).repeat(group, 1)
        out = scaled_dot_product_attention(
            _folded(own, keys), keys, values, attn_mask=seen, scale=scale
        )
        outs.append(out.reshape(own.shape))
    return torch.cat(outs, 2)


def _parts(queries: Tensor, tokens: int) -> Iterator[slice]:
    """Of the queries, such that their scores may be written out."""
    batch, heads, num_queries, _ = queries.shape
    at_once = max(1, SCORES_AT_ONCE // (batch * heads * tokens))
    for first in range(0, num_queries, at_once):
        yield slice(first, min(first + at_once, num_queries))


def _causal(num_queries: int, tokens: int, device: torch.device, part: slice) -> Tensor:
    """bool [queries of a part, tokens], of queries that are the last tokens."""
    positions = torch.arange(tokens - num_queries, tokens, device=device)[part]
    return torch.arange(tokens, device=device) <= positions[:, None]


def _by_scores(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """With bent scores, which torch's own attention does not know: some queries at a time."""
    num_queries, tokens = queries.shape[2], keys.shape[2]
    lowest = torch.finfo(torch.float32).min  # not -inf: padding sees nothing, and must not be NaN
    outs = []
    for part in _parts(queries, tokens):
        if mask is None:
            own = _causal(num_queries, tokens, queries.device, part)
        else:
            own = mask[:, :, part]
        mine = queries[:, :, part]
        folded = _folded(mine, keys)
        scores = (folded @ keys.transpose(2, 3)).float().view(*mine.shape[:3], tokens) * scale
        scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~own, lowest) if own.dtype == torch.bool else scores + own
        weights = scores.softmax(-1).to(values.dtype)
        outs.append((weights.view(*folded.shape[:3], tokens) @ values).view(mine.shape))
    return torch.cat(outs, 2)


def sliding_mask(num_queries: int, tokens: int, span: int, device: torch.device) -> Tensor:
    """bool [1, 1, queries, tokens]: each query sees itself and the span - 1 tokens before it."""
    positions = torch.arange(tokens - num_queries, tokens, device=device)[:, None]
    behind = positions - torch.arange(tokens, device=device)
    return ((behind >= 0) & (behind < span))[None, None]
