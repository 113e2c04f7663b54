"""The attention that tokens of a prompt get, summed over its queries: what H2O evicts by."""

from __future__ import annotations

import torch
from torch import Tensor

from magicpig.attention.gpu import has_triton

SCORES_AT_ONCE = 2**20  # floats: they stay in the cache
SCORES_AT_ONCE_ON_GPU = 2**28


def attention_mass(
    queries: Tensor, keys: Tensor, mask: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """Sums [batch, kv_heads, tokens] of softmax weights over the last queries of a sequence and the
    query heads of a group; arguments as of `exact_attention`."""
    if mask is None and has_triton(keys):
        from magicpig.attention.mass_on_gpu import causal_mass

        return causal_mass(queries, keys, scale, softcap)
    batch, heads, num_queries, dim = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    mass = torch.zeros(batch, kv_heads, tokens, device=keys.device)
    scores_at_once = SCORES_AT_ONCE if keys.device.type == "cpu" else SCORES_AT_ONCE_ON_GPU
    at_once = max(1, scores_at_once // (batch * heads * tokens))
    for first in range(0, num_queries, at_once):
        last = min(first + at_once, num_queries)
        seen = tokens - num_queries + last if mask is None else tokens
        grouped = queries[:, :, first:last].reshape(batch, kv_heads, -1, dim)
        scores = (grouped @ keys[:, :, :seen].transpose(2, 3)).float().mul_(scale)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        by_head = scores.view(batch, heads, last - first, seen)
        if mask is None:  # of the queries at hand, each sees the part of them up to itself
            own = torch.ones(last - first, last - first, dtype=torch.bool, device=keys.device)
            by_head[..., seen - (last - first) :].masked_fill_(own.triu_(1), -torch.inf)
            weights = by_head.softmax(-1)
        else:
            part = mask[:, :, first:last]
            shown = part if part.dtype == torch.bool else part == 0
            weights = by_head.masked_fill_(~shown, -torch.inf).softmax(-1)
            weights.masked_fill_(~shown.any(-1, keepdim=True), 0.0)  # padding sees nothing
        mass[:, :, :seen] += weights.view(scores.shape).sum(2)
    return mass
