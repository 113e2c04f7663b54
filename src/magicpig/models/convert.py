"""From a GGUF file to a folder in Hugging Face format: bf16 weights, tokenizer, chat template.

Quantised weights are unpacked, not requantised: the model is the one in the file, plus what an
adapter adds.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr
from pathlib import Path

from magicpig.models import adapters
from magicpig.models.catalog import Builtin, ModelError
from magicpig.models.quiet import quietly, without_collections


def convert(gguf: Path, adapter: Path | None, folder: Path, builtin: Builtin) -> None:
    """Writes the model in `gguf`, with the adapter if there is one, to `folder`.

    Checks that nothing was lost on the way.
    """
    with without_collections():
        import numpy as np
        import torch
        from tokenizers import pre_tokenizers
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"gguf_file": gguf.name, "local_files_only": True}
    with quietly(), redirect_stderr(io.StringIO()):  # the GGUF reader has a bar of its own
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            **source,
        )
        if adapter:
            adapters.add(adapter, model)
        model.bfloat16()
        # GGUF names its way of splitting text instead of holding it; transformers takes GPT-2's.
        if builtin.splits_digits:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        tokenizer.model_max_length = model.config.max_position_embeddings
        # GGUF keeps it in float32: 9.999999747378752e-06 was written as 1e-05.
        model.config.rms_norm_eps = float(str(np.float32(model.config.rms_norm_eps)))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        check(folder, builtin)


def check(folder: Path, builtin: Builtin) -> None:
    """Raises unless configuration, tokenizer and chat template are what they must be."""
    from transformers import AutoTokenizer

    config = json.loads((folder / "config.json").read_text())
    for field, wanted in builtin.config.items():
        _same(f"config.json has {field}", config.get(field), wanted)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = list(tokenizer(builtin.sample)["input_ids"])
    _same(f"the tokenizer encodes {builtin.sample!r} as", ids, list(builtin.sample_ids))
    _same("decoding gives", tokenizer.decode(ids), builtin.sample)
    _same("the end-of-text token is", tokenizer.eos_token_id, config["eos_token_id"])
    if not tokenizer.chat_template:
        raise ModelError(_advice("the chat template is missing"))


def _same(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise ModelError(_advice(f"{what} {got!r} instead of {wanted!r}"))


def _advice(what: str) -> str:
    import transformers

    return (
        f"the converted model is wrong: {what}. transformers {transformers.__version__} reads "
        "GGUF files differently from the versions this was tested with (5.22): install that one"
    )
