"""The attention function that transformers models call, and its registration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from magicpig.attention.exact import exact_attention
from magicpig.config import UnsupportedModel
from magicpig.hf.tagged import TAG, TaggedLayer, expect_none
from magicpig.kv.courier import current

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
    layer: TaggedLayer | None = getattr(key, TAG, None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layer is not None:
        _refuse_what_counts(module, dropout, kwargs)
        if attention_mask is not None and attention_mask.shape[1] != 1:
            raise UnsupportedModel("magicpig knows no masks that differ from head to head")
        layer.receive(key, value)
        with current(query.device):  # which kernels of ours do not choose by their tensors
            out = layer.attend(query, key, value, attention_mask, scale, softcap)
        return out.contiguous(), None
    expect_none()
    _refuse_unknown_tensors(kwargs, {*HARMLESS, "position_bias"})
    if softcap is not None:  # which transformers' quick one cannot
        out = exact_attention(query, key, value, attention_mask, scale, softcap)
        return out.transpose(1, 2), None
    out, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return out, None


# Tensors that attention functions get and that change nothing here.
HARMLESS = {"cache_position", "labels", "position_ids", "token_type_ids"}


def engine_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in the engine, which makes no masks: all keys must be of layers of ours."""
    if getattr(key, TAG, None) is None:
        raise UnsupportedModel(
            f"{type(module).__name__} attends to keys of a kind of cache that magicpig's engine "
            "does not know; magicpig.hf.enable may do"
        )
    if attention_mask is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} makes masks of its own, which magicpig does not know"
        )
    return attention(module, query, key, value, attention_mask, **kwargs)


def _refuse_what_counts(module: torch.nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raises for what would change the result, such as learned sinks or biases."""
    if dropout:
        raise UnsupportedModel("magicpig knows no dropout in attention: call model.eval()")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedModel("magicpig knows causal attention only, and the model's is not")
    _refuse_unknown_tensors(kwargs, HARMLESS)


def _refuse_unknown_tensors(kwargs: dict[str, Any], known: set[str]) -> None:
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and name not in known:
            raise UnsupportedModel(
                f"this model's attention takes {name!r}, which magicpig does not know"
            )


def register() -> None:
    """Makes the attention function known to transformers. Models that do not ask for it by name
    are not touched."""
    AttentionInterface.register(DROP_IN, attention)
    AttentionInterface.register(ENGINE, engine_attention)
    AttentionMaskInterface.register(DROP_IN, sdpa_mask)
