"""Which models magicpig can follow; others are refused before they are read."""

from __future__ import annotations

import inspect

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from magicpig.config import UnsupportedModel
from magicpig.engine.memory import heads_of
from magicpig.hf.attention import ENGINE, register
from magicpig.models.quiet import quietly

ROTARY_BY_LENGTH = {"dynamic", "longrope"}
KNOWN_LAYERS = {DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer}  # of caches
OTHERWISE = {
    "diffllama": "takes differences of attention",
    "doge": "makes masks of its own",
    "git": "attends to pictures",
    "jamba": "forgets its state between parts of a prompt",
    "jetmoe": "has experts in its attention",
    "minimax": "has a cache of its own",
    "mllama_text_model": "attends to pictures",
    "recurrent_gemma": "keeps its state outside of its cache",
}


def rotary_kinds(config: PreTrainedConfig) -> set[str]:
    """The kinds of rotary embedding that a model uses, by transformers' names."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(one["rope_type"]) for one in each if "rope_type" in one}


def check_supported(config: PreTrainedConfig) -> None:
    """Raises for models that would give wrong results, or an error after a long prompt."""
    if not hasattr(config, "num_attention_heads"):
        raise UnsupportedModel(f"a {config.model_type} model has no attention to be quicker at")
    if "chunked_attention" in get_layer_types_and_kwargs(config)[0]:
        raise UnsupportedModel("magicpig does not know chunked attention, which the model has")
    if getattr(config, "kv_lora_rank", 0):
        raise UnsupportedModel("magicpig does not know latent attention (MLA), which the model has")
    if config.model_type in OTHERWISE:
        does = OTHERWISE[config.model_type]
        raise UnsupportedModel(f"a {config.model_type} model {does}: magicpig does not know that")
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if unknown := sorted(kind.__name__ for kind in kinds - KNOWN_LAYERS):
        raise UnsupportedModel(f"magicpig does not know layers that cache as {unknown[0]} does")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel("magicpig does not know layers that share keys and values")
    parts = [getattr(config, f"qk_{part}_head_dim", None) or 0 for part in ("nope", "rope")]
    of_values = getattr(config, "v_head_dim", None)
    if of_values and any(parts) and sum(parts) != of_values:
        raise UnsupportedModel(
            f"keys of {sum(parts)} dimensions and values of {of_values}: magicpig knows such as "
            "have as many"
        )
    kv_heads, dim = heads_of(config)
    if config.num_attention_heads % kv_heads:
        raise UnsupportedModel(
            f"{config.num_attention_heads} heads cannot share {kv_heads} KV heads evenly"
        )
    if dim % 8 or not 8 <= dim <= 256:
        raise UnsupportedModel(f"head_dim must be a multiple of 8 up to 256, not {dim}")


def take_attention(model: PreTrainedModel) -> None:
    """The model attends by the engine's function from now on; raises where it cannot."""
    register()
    with quietly():  # what transformers says of models that cannot, our error says
        model.set_attn_implementation(ENGINE)
    if model.config._attn_implementation != ENGINE:
        raise UnsupportedModel(
            f"{type(model).__name__} does not let its attention be replaced: magicpig cannot run it"
        )


def check_weights(model: PreTrainedModel) -> None:
    """Raises for a model whose attention takes weights that magicpig does not know, or looks at
    tokens that follow."""
    for name, _ in model.named_parameters():
        if name.endswith(".sinks"):
            raise UnsupportedModel(f"magicpig does not know learned sinks, as in {name}")
    decoder = model.get_decoder() or model  # type: ignore[no-untyped-call]
    for name, module in decoder.named_modules():
        of_others = any(part in name for part in ("encoder_attn", "crossattention"))
        if getattr(module, "is_causal", None) is False and not of_others:
            raise UnsupportedModel(f"{type(model).__name__} looks at tokens that follow, in {name}")


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether it does as it is told: others take positions from the longest sequence of a batch."""
    config = model.config.get_text_config(decoder=True)
    told = "position_ids" in inspect.signature(model.forward).parameters
    return told and not getattr(config, "attn_temperature_tuning", False)
