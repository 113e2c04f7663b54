"""pack: a transformers model's layers become native ones, in place.

Only what is known to compute the same is exchanged (twins.py); the rest of the model stays.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from magicpig.nn.twins import (
    embedding_twin,
    fuse_rotary,
    is_plain_linear,
    joint_projections,
    linear_twin,
    mlp_twin,
    norm_twin,
    weights_read_by,
)


@torch.no_grad()
def pack(model: nn.Module) -> None:
    """Exchanges linear layers, gated MLPs, RMS norms and tied embeddings of `model`.

    For inference with bfloat16 weights on the CPU. On a GPU, in half precision, MLPs, norms, rotary
    embeddings and the projections before them are exchanged for such as launch fewer kernels. Other
    layers are left as they are. Weights are copied layer by layer and the originals let go, so that
    no more than one layer is there twice. A weight that something else uses too is not touched,
    unless it is an embedding tied to the output layer.
    """
    users = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    shared = {key for key, count in users.items() if count > 1}
    fused = sum(fuse_rotary(module) for module in model.modules())
    fused += sum(_join_projections(module, shared) for module in model.modules())
    if _swap_tied(model, shared) + _swap_children(model, shared, {}) + fused:
        model.requires_grad_(False)


def _join_projections(module: nn.Module, shared: set[int]) -> int:
    if any(id(parameter) in shared for parameter in module.parameters()):
        return 0
    shares = joint_projections(module)
    for name, share in shares.items():
        setattr(module, name, share)
    return len(shares)


def _swap_tied(model: nn.Module, shared: set[int]) -> int:
    """An embedding and a linear layer with one weight: both read one packed copy."""
    count = 0
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    linears = [m for m in model.modules() if is_plain_linear(m) and id(m.weight) in shared]
    for embedding in embeddings:
        weight = embedding.weight
        tied = [linear for linear in linears if linear.weight is weight]
        uses = sum(p is weight for m in model.modules() for p in m._parameters.values())
        packed = linear_twin(tied[0]) if len(tied) == 1 and uses == 2 else None
        twin = embedding_twin(embedding, packed) if packed else None
        if packed and twin:
            _put(model, tied[0], packed)
            _put(model, embedding, twin)
            count += 1
    return count


def _put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)


def _swap_children(parent: nn.Module, shared: set[int], twins: dict[int, nn.Module | None]) -> int:
    """Children first met are decided upon once; `twins` remembers those with several parents."""
    count, read = 0, weights_read_by(parent)
    for name in list(parent._modules):  # names: a list of modules would keep them alive
        child = parent._modules[name]
        if child is None or name in read:
            continue
        if id(child) not in twins:
            twins[id(child)] = _twin(child, shared)
        twin = twins[id(child)]
        if twin is not None:
            setattr(parent, name, twin)
            count += 1
        else:
            count += _swap_children(child, shared, twins)
    return count


def _twin(module: nn.Module, shared: set[int]) -> nn.Module | None:
    if any(id(parameter) in shared for parameter in module.parameters()):
        return None
    return mlp_twin(module) or linear_twin(module) or norm_twin(module)
