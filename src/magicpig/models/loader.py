"""Loading a model and its tokenizer: a built-in one, a local folder, or one of the hub's.

transformers is imported when a model is loaded, not before.
"""

from __future__ import annotations

import os
import platform
import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from magicpig.models import hub
from magicpig.models.catalog import BUILTIN, ModelError
from magicpig.models.quiet import quietly, without_collections
from magicpig.models.store import pull
from magicpig.native import supported_isas

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model ready to run, its tokenizer, and where they came from.

    name: as it was asked for. path: the folder of its files.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    path: Path

    @property
    def max_length(self) -> int:
        """Of its context, in tokens."""
        text = self.model.config.get_text_config(decoder=True)
        return int(getattr(text, "max_position_embeddings", None) or 2**31 - 1)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Behind which a text is at its end: what the model says and what the tokenizer does."""
        ends = self.model.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else ends or []
        return frozenset([*ends, self.tokenizer.eos_token_id]) - {None}


def load(name: str, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """Loads a model, ready for inference, and its tokenizer.

    name: a built-in model (installed first if need be), a local folder in Hugging Face format, or
        a name on the Hugging Face hub. What the hub's own cache holds is used as it is there,
        without asking the network.
    device: "auto" is the GPU if torch sees one, else the CPU; otherwise cpu, cuda or cuda:N.
    dtype: float32, bfloat16 or float16. "auto" is the checkpoint's own, except on CPUs, where
        float16 is slow: there both half precisions become bfloat16 if the CPU computes in it
        (AVX512-BF16; ARM64 is taken to), else float32, which is twice the memory and several
        times the speed at long prompts.
    """
    place = _device(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, not {dtype!r}")
    if name in BUILTIN:
        return _load(name, str(pull(name)), place, dtype, offline=True)
    folder = Path(os.path.expanduser(name))
    if os.path.exists(folder):  # unlike Path.exists no name is too long for it
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"{name!r} has no config.json: name the folder of a model in Hugging Face format, "
                f"a name on the hub, or a built-in model ({', '.join(sorted(BUILTIN))})"
            )
        return _load(name, str(folder), place, dtype, offline=True)
    if hub.cached_folder(name):
        try:
            return _load(name, name, place, dtype, offline=True)
        except ModelError as error:  # perhaps only a part of it is in the cache
            try:
                hub.check_reachable(name)
            except ModelError as unreachable:
                raise error from unreachable
    else:
        hub.check_reachable(name)
    return _load(name, name, place, dtype, offline=False)


def _load(
    name: str, source: str, device: torch.device, dtype: str, *, offline: bool
) -> LoadedModel:
    """`source`: a folder or a hub name, as transformers takes it."""
    with without_collections():
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        where = {"local_files_only": offline, "trust_remote_code": False}
        with quietly() if offline else nullcontext():
            try:
                config = AutoConfig.from_pretrained(source, **where)
                check_causal(name, config)
                tokenizer = AutoTokenizer.from_pretrained(source, **where)
                model, report = cast(Any, AutoModelForCausalLM).from_pretrained(
                    source,
                    config=config,
                    dtype=_dtype(config, device, dtype),
                    device_map=None if device.type == "cpu" else {"": device},
                    attn_implementation=own_attention(config),
                    output_loading_info=True,
                    **where,
                )
            except ModelError:
                raise
            except Exception as error:  # transformers has no base class for its own
                raise ModelError(f"{name!r} cannot be loaded: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{name!r} lacks {len(missing)} of its weights, {missing[0]} for one: "
            "its files are incomplete or belong to another architecture"
        )
    folder = Path(source) if Path(source).is_dir() else hub.cached_folder(name)
    return LoadedModel(model, tokenizer, name, folder or Path(source))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", str(name)):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, not {str(name)!r}")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"device {name!r} cannot be used: {reason}. Try auto or cpu") from error
    return device


def own_attention(config: PreTrainedConfig) -> str:
    """Transformers' own kind for a model, whatever its checkpoint was trained with: it serves until
    ours takes its place."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"


def _dtype(config: PreTrainedConfig, device: torch.device, name: str) -> torch.dtype | str:
    """The dtype to load in; "auto", where the configuration does not say, is the weights' own."""
    if name != "auto":
        return DTYPES[name]
    stored = config.get_text_config().dtype
    if device.type == "cpu" and stored in (torch.bfloat16, torch.float16):
        return torch.bfloat16 if _computes_in_bfloat16() else torch.float32
    return stored or "auto"


def _computes_in_bfloat16() -> bool:
    return platform.machine() in ("aarch64", "arm64") or "avx512_bf16" in supported_isas()


def check_causal(name: str, config: PreTrainedConfig) -> None:
    """Raises unless the checkpoint was saved from a model that continues text."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    saved = config.architectures or []
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder:
        expected = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "__name__", "")
        if not saved or any(a == expected or a.endswith("ForCausalLM") for a in saved):
            return
    what = " or ".join(saved) or config.model_type
    raise ModelError(f"{name!r} is a {what}, which does not continue text: take a causal LM")
