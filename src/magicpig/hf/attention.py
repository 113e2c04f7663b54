"""The attention function that transformers models call, and its registration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from magicpig.attention.exact import exact_attention
from magicpig.hf.cache import TAG, BatchLayer

DROP_IN = "magicpig"  # masks as for transformers' own attention
ENGINE = "magicpig_engine"  # no masks: nothing is padded


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over a BatchLayer's tokens; over any other keys, transformers' own."""
    layer: BatchLayer | None = getattr(key, TAG, None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layer is not None:
        return layer.attend(query, key, value, attention_mask, scale, softcap), None
    if softcap is not None:  # which transformers' quick one cannot
        out = exact_attention(query, key, value, attention_mask, scale, softcap)
        return out.transpose(1, 2), None
    out, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return out, None


def register() -> None:
    """Makes the attention function known to transformers. Models that do not ask for it by name
    are not touched."""
    for name in (DROP_IN, ENGINE):
        AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(DROP_IN, sdpa_mask)
