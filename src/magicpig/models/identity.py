"""Which model is it: a fingerprint of configuration and weights."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel

SAMPLED = 64  # values of each weight: a fine-tuned or merged model differs in some of them
NOT_THE_MODEL = {"_name_or_path", "transformers_version", "use_cache", "architectures"}


@torch.no_grad()
def identity(model: PreTrainedModel) -> str:
    """Equal for models that compute the same, in hex. The attention in use does not count."""
    config = {k: v for k, v in model.config.to_diff_dict().items() if k not in NOT_THE_MODEL}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        digest.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        digest.update(weight.reshape(-1)[:SAMPLED].float().cpu().numpy().tobytes())
    return digest.hexdigest()
