"""Small models with random weights, one of each architecture that is shown to work."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from magicpig.models import LoadedModel

COMMON = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # so that attention has peaks, as trained models' has
}
CONFIGS = {
    "llama": lambda: LlamaConfig(
        **COMMON,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ),
    "mistral": lambda: MistralConfig(**COMMON, head_dim=32, sliding_window=None),
    "mistral-sliding": lambda: MistralConfig(**COMMON, sliding_window=24),
    "lfm2": lambda: Lfm2Config(
        **COMMON, layer_types=["conv", "full_attention", "conv", "full_attention"]
    ),
    "qwen2": lambda: Qwen2Config(**COMMON),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=24),
    "gemma3": lambda: Gemma3TextConfig(
        **COMMON,
        head_dim=32,
        sliding_window=20,
        query_pre_attn_scalar=48,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gemma2": lambda: Gemma2Config(
        **COMMON,
        head_dim=32,
        sliding_window=20,
        attn_logit_softcapping=5.0,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}


def make_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; a chat is its messages on lines of their own."""
    specials = ["<pad>", "<bos>", "<eos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(specials + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    )


def loaded(name: str, **arguments) -> LoadedModel:
    return LoadedModel(make_model(name, **arguments), make_tokenizer(), name, Path())
