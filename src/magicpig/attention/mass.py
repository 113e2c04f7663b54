"""The attention that tokens of a prompt get, summed over its queries: what H2O evicts by."""

from __future__ import annotations

import torch
from torch import Tensor

from magicpig.attention.in_torch import SCORES_AT_ONCE


def attention_mass(
    queries: Tensor, keys: Tensor, mask: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """Sums [batch, kv_heads, tokens] of softmax weights over the last queries of a sequence and the
    query heads of a group; arguments as of `exact_attention`."""
    batch, heads, num_queries, dim = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    mass = torch.zeros(batch, kv_heads, tokens, device=keys.device)
    at_once = max(1, SCORES_AT_ONCE // (batch * heads * tokens))
    positions = torch.arange(tokens - num_queries, tokens, device=keys.device)
    for first in range(0, num_queries, at_once):
        part = slice(first, min(first + at_once, num_queries))
        seen = int(positions[part][-1]) + 1 if mask is None else tokens
        grouped = queries[:, :, part].reshape(batch, kv_heads, -1, dim)
        scores = (grouped @ keys[:, :, :seen].transpose(2, 3)).float() * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.view(batch, heads, -1, seen)
        if mask is None:
            behind = torch.arange(seen, device=keys.device) > positions[part, None]
            scores = scores.masked_fill_(behind, -torch.inf)
        elif mask.dtype == torch.bool:
            scores = scores.masked_fill_(~mask[:, :, part], torch.finfo(torch.float32).min)
        else:
            scores = scores + mask[:, :, part]
        weights = scores.softmax(-1).view(batch, kv_heads, -1, seen)
        mass[:, :, :seen] += weights.sum(2)
    return mass
