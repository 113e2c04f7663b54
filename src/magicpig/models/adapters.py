"""Adapters: what fine-tuning added to a model's weights, in 8-bit rows.

A safetensors file holds NAME.q int8 [out, in] and NAME.s float16 [out] for each matrix, NAME
float32 for each vector; a weight that is not in it did not change. A JSON file of the same name
beside it says with which rotary base and how many tokens of context the model was trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicpig.models.catalog import Builtin, ModelError
from magicpig.models.fetch import sha256

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CODES, SCALES = ".q", ".s"


def check(path: Path, name: str, builtin: Builtin) -> None:
    """Raises unless `path` is the adapter of the built-in model of this name."""
    if builtin.adapter is None:
        raise ModelError(f"{name} takes no adapter, but {path} was given")
    if not path.is_file():
        raise ModelError(f"no file {path}: give the path of {name}'s {builtin.adapter.name}")
    if (got := sha256(path)) != builtin.adapter.sha256:
        raise ModelError(
            f"{path} is not the adapter of {name}: its SHA-256 is {got}, not "
            f"{builtin.adapter.sha256}. It is another version, or damaged: get the file again"
        )
    for field, value in _settings(path).items():
        if value != builtin.config[field]:
            raise ModelError(
                f"{_beside(path)} is not the one of {name}: {field} would be {value!r}, not "
                f"{builtin.config[field]!r}. Get the file again"
            )


def add(path: Path, model: PreTrainedModel) -> None:
    """Adds the adapter to a model in float32, and gives its configuration the new settings."""
    import torch
    from safetensors import safe_open

    weights = dict(model.named_parameters())
    with safe_open(path, framework="pt") as file, torch.no_grad():
        for key in file.keys():  # noqa: SIM118, the file is no dictionary
            if key.endswith(SCALES):
                continue
            name = key.removesuffix(CODES)
            change = file.get_tensor(key).float()
            if key.endswith(CODES):
                change *= file.get_tensor(name + SCALES).float()[:, None]
            if name not in weights or weights[name].shape != change.shape:
                shape = list(weights[name].shape) if name in weights else "none"
                raise ModelError(
                    f"{path} changes {name} {list(change.shape)}, where the model has {shape}: "
                    "it belongs to another model"
                )
            weights[name].add_(change)
    for field, value in _settings(path).items():
        setattr(model.config, field, value)


def _settings(path: Path) -> dict[str, Any]:
    """Fields of config.json that the adapter changes."""
    try:
        settings = json.loads(_beside(path).read_text())
        return {
            "max_position_embeddings": int(settings["context"]),
            "rope_parameters": {
                "rope_theta": float(settings["rope_theta"]),
                "rope_type": "default",
            },
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{_beside(path)} must say with which rope_theta and context {path.name} was trained: "
            f"{error!r}. Put the file that came with the adapter beside it"
        ) from error


def _beside(path: Path) -> Path:
    return path.with_suffix(".json")
