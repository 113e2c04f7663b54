"""ModelGeometry: what a step of a model reads and computes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

# Enough of their configurations to plan for models that are not here.
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "vocab_size": 128256,
        },
    ),
    "llama-3.1-70b": (
        "llama",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "vocab_size": 128256,
        },
    ),
    "llama-2-7b": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4_096,
            "vocab_size": 32000,
        },
    ),
    "llama-2-13b": (
        "llama",
        {
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "max_position_embeddings": 4_096,
            "vocab_size": 32000,
        },
    ),
    "mistral-7b": (
        "mistral",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32_768,
            "vocab_size": 32768,
            "sliding_window": None,
        },
    ),
    "qwen2.5-7b": (
        "qwen2",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "vocab_size": 152064,
        },
    ),
}


@dataclass(frozen=True)
class ModelGeometry:
    """layers: those with full attention over the whole context.

    parameters: all of them; parameters_read: those that a step may read, which takes one row of the
    embedding. longest: tokens that it was made for, where that is known. config: transformers'.
    expert_parameters: of mixtures of experts, theirs; a token goes to `expert_share` of them.
    spans: tokens that layers with sliding attention see, one for each.
    notes: what a plan does not know of it.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    parameters_read: int
    longest: int | None
    config: Any = field(repr=False, compare=False)
    itemsize: int = 2
    expert_parameters: int = 0
    expert_share: float = 1.0
    spans: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Of a token's key and value in one KV head."""
        return 2 * self.head_dim * self.itemsize

    def weights_read(self, batch: int) -> float:
        """Bytes in a step: experts that none of the batch goes to are not read."""
        missed = self.expert_parameters * (1 - self.expert_share) ** batch
        return (self.parameters_read - missed) * self.itemsize

    @property
    def parameters_used(self) -> float:
        """By one token."""
        return self.parameters_read - self.expert_parameters * (1 - self.expert_share)

    def sliding_bytes(self, context: int) -> float:
        """Of keys and values in layers with sliding attention."""
        return sum(self.kv_bytes(min(span, context), 1) for span in self.spans)

    def as_dict(self) -> dict[str, Any]:
        return {x.name: getattr(self, x.name) for x in fields(self) if x.name != "config"}

    def kv_bytes(self, tokens: float, layers: float | None = None) -> float:
        layers = self.layers if layers is None else layers
        return layers * self.kv_heads * tokens * self.row_bytes


def geometry_of(name: str) -> ModelGeometry:
    """Of a model by its name: one of KNOWN, a built-in one, a folder, or a name on the hub."""
    import torch
    from transformers import AutoModelForCausalLM

    from magicpig.engine.memory import heads_of
    from magicpig.engine.support import check_supported, check_weights, take_attention
    from magicpig.hf.cache import full_attention_layers
    from magicpig.models.loader import check_causal, own_attention
    from magicpig.models.quiet import quietly

    config = config_of(name)
    if name.lower() not in KNOWN:
        check_causal(f"--model {name}", config)
    text = config.get_text_config(decoder=True)
    check_supported(text)
    layers = full_attention_layers(config)
    if not layers:
        raise ValueError(f"--model {name!r} has no layer that attends to a whole context")
    attention = own_attention(config)
    try:
        with torch.device("meta"), quietly():
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation=attention
            )
    except (ArithmeticError, ValueError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"--model {name!r} has a configuration that makes no model: {error}"
        ) from error
    check_weights(model)
    take_attention(model)
    embedded = model.get_input_embeddings()
    parameters = parameters_read = sum(p.numel() for p in model.parameters())
    if not getattr(text, "tie_word_embeddings", False) and embedded is not None:
        parameters_read -= embedded.weight.numel()
    kv_heads, dim = heads_of(text)
    return ModelGeometry(
        name,
        len(layers),
        text.num_attention_heads,
        kv_heads,
        dim,
        parameters,
        parameters_read,
        getattr(text, "max_position_embeddings", None),
        config,
        expert_parameters=sum(p.numel() for n, p in model.named_parameters() if ".experts." in n),
        expert_share=_expert_share(text),
        spans=_spans(config),
        notes=_notes(config, text),
    )


def _expert_share(text: Any) -> float:
    """Of the experts of a layer, those that a token goes to."""
    names = "num_local_experts", "num_experts", "n_routed_experts"
    experts = next((n for n in (getattr(text, name, None) for name in names) if n), 1)
    used = getattr(text, "num_experts_per_tok", None) or experts
    return min(1.0, float(used) / float(experts))


def _spans(config: Any) -> tuple[int, ...]:
    from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

    layers = DynamicCache(config=config).layers
    return tuple(x.sliding_window for x in layers if type(x) is DynamicSlidingWindowLayer)


def _notes(config: Any, text: Any) -> tuple[str, ...]:
    quantized = getattr(config, "quantization_config", None) or {}
    method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
    notes = [f"its weights are quantized ({method})"] * bool(quantized)
    notes += ["its weights are float32"] * (str(text.dtype) == "torch.float32")
    return tuple(f"{note}; this plan counts two bytes for each" for note in notes)


def config_of(name: str) -> Any:
    """As in geometry_of."""
    from transformers import AutoConfig

    from magicpig.models import BUILTIN, cache_folder, hub

    if name.lower() in KNOWN:
        kind, fields = KNOWN[name.lower()]
        return AutoConfig.for_model(kind, **fields)
    folder = str(cache_folder() / name) if name in BUILTIN else name
    if name in BUILTIN and not (cache_folder() / name).is_dir():
        flag, how = (" --adapter PATH", "makes") if BUILTIN[name].adapter else ("", "fetches")
        raise ValueError(f"--model {name!r} is not here yet: `magicpig pull {name}{flag}` {how} it")
    try:
        here = os.path.isdir(folder) or hub.cached_folder(folder) is not None
        if not here:
            hub.check_reachable(name)
        return AutoConfig.from_pretrained(folder, local_files_only=here)
    except Exception as error:  # transformers has no base class for its own
        reason = (str(error) or type(error).__name__).strip().splitlines()[0][:200]
        if os.path.isdir(folder):
            raise ValueError(f"--model {name!r} cannot be read: {reason}") from error
        raise ValueError(
            f"--model {name!r} is neither here nor on the hub ({reason}); "
            f"known without either: {', '.join(KNOWN)}"
        ) from error
