"""The native twin of a module, or None: decided by what the module computes, not by its name.

A twin is compared with the module's own forward on random input before it is taken.
"""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from magicpig.attention.gpu import has_triton
from magicpig.nn.embedding import PackedEmbedding
from magicpig.nn.joint import Joint, Share
from magicpig.nn.linear import PackedLinear
from magicpig.nn.mlp import FusedMLP, GatedMLP
from magicpig.nn.norm import RMSNorm

ROTARY = "apply_rotary_pos_emb"
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def untouched(module: nn.Module) -> bool:
    """Whether calling the module runs its class's forward and nothing else."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return not any(hooks) and "forward" not in vars(module)


def packable(tensor: object) -> TypeGuard[Tensor]:
    return (
        isinstance(tensor, Tensor)
        and tensor.dtype == torch.bfloat16
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.numel() > 0
    )


def fusable(tensor: object) -> TypeGuard[Tensor]:
    """Whether kernels of ours can replace torch's on a GPU; in float32 they would round less."""
    return (
        isinstance(tensor, Tensor)
        and tensor.dtype in (torch.bfloat16, torch.float16)
        and has_triton(tensor)
        and tensor.numel() > 0
    )


def is_plain_linear(
    module: object, fits: Callable[[object], bool] = packable
) -> TypeGuard[nn.Linear]:
    return (
        type(module) is nn.Linear
        and untouched(module)
        and fits(module.weight)
        and (module.bias is None or fits(module.bias))
    )


def _random(rows: int, columns: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)  # leaves torch's own generator as it is
    return torch.randn(rows, columns, generator=generator).to(like)


def _outcome(module: nn.Module, x: Tensor) -> Tensor | None:
    """module(x), or None if it wants to be called differently."""
    try:
        out = module(x)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None
    return out if isinstance(out, Tensor) and out.dtype in (torch.bfloat16, torch.float16) else None


def linear_twin(module: nn.Module) -> PackedLinear | None:
    return PackedLinear(module) if is_plain_linear(module) else None


def norm_twin(module: nn.Module) -> RMSNorm | None:
    """For modules with one vector `weight` and an epsilon that behave as Llama's or Gemma's."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    state = [*module.parameters(), *module.buffers()]
    if not (packable(weight) or fusable(weight)) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if len(state) != 1 or isinstance(module, RMSNorm) or not untouched(module):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # such as a gate
        return None
    # Rows so small that epsilon counts, and rows so large that it does not.
    scales = torch.tensor([[0.01], [0.1], [1.0], [30.0]]).sqrt() * eps**0.5
    x = torch.cat([_random(4, len(weight), scales) * scales, _random(4, len(weight), scales)])
    x = x.to(weight)
    truth = _outcome(module, x)
    if truth is None or truth.shape != x.shape:
        return None
    for one_plus_weight in (False, True):
        twin = RMSNorm(weight, eps, one_plus_weight)
        out = twin(x)
        close = (out.float() - truth.float()).abs() <= 2**-7 * truth.float().abs()
        # float32 sums in another order may tip a rounding, but rarely.
        if close.all() and (out != truth).sum() <= 2 + 0.01 * out.numel():
            return twin
    return None


def activation_of(function: object) -> str | None:
    """The name of the known activation that `function` computes."""
    if not callable(function):
        return None
    x = torch.linspace(-12, 12, 4801)
    try:
        y = function(x)
    except (TypeError, ValueError, RuntimeError):
        return None
    for name, known in ACTIVATIONS.items():
        if isinstance(y, Tensor) and y.shape == x.shape and torch.allclose(y, known(x), 1e-5, 1e-5):
            return name
    return None


def mlp_twin(module: nn.Module) -> GatedMLP | FusedMLP | None:
    """For modules of gate_proj, up_proj, down_proj and act_fn, and nothing else."""
    gate, up, down = (getattr(module, name, None) for name in MLP_LAYERS)
    fits = fusable if fusable(getattr(gate, "weight", None)) else packable
    if not (
        is_plain_linear(gate, fits) and is_plain_linear(up, fits) and is_plain_linear(down, fits)
    ):
        return None
    activation = activation_of(getattr(module, "act_fn", None))
    extra = {name for name, _ in module.named_children()} - {*MLP_LAYERS, "act_fn"}
    own = [*module.parameters(recurse=False), *module.buffers()]
    if activation is None or extra or own or not untouched(module):
        return None
    if gate.weight.shape != up.weight.shape or down.in_features != gate.out_features:
        return None
    x = _random(4, gate.in_features, gate.weight)
    truth = _outcome(module, x)
    if truth is None:
        return None
    kind = FusedMLP if fits is fusable else GatedMLP
    twin = kind(gate, up, down, activation)
    out = twin(x)
    if out.shape != truth.shape:
        return None
    error = (out.float() - truth.float()).norm()  # the module rounds twice more than the twin
    return twin if error <= 0.02 * truth.float().norm() else None


def _turns_by_rotary(module: nn.Module) -> TypeGuard[nn.Module]:
    """Whether it is attention of tokens to themselves, with a rotary embedding."""
    forward = type(module).forward
    return isinstance(forward, FunctionType) and ROTARY in forward.__code__.co_names


def joint_projections(module: nn.Module) -> dict[str, Share]:
    """For attention: what can take the place of its projections, by their names; one product."""
    found = [getattr(module, name, None) for name in PROJECTIONS]
    layers = [layer for layer in found if is_plain_linear(layer, fusable)]
    if not _turns_by_rotary(module) or len(layers) < len(found):
        return {}
    if len({(x.in_features, x.weight.dtype, x.weight.device) for x in layers}) > 1:
        return {}
    joint = Joint(layers)
    return {name: Share(joint, i) for i, name in enumerate(PROJECTIONS)}


def fuse_rotary(module: nn.Module) -> bool:
    """Lets an attention module turn queries and keys in one kernel, if its own way of it, a
    function that it knows as apply_rotary_pos_emb, gives the same numbers.

    The module gets a forward of its own, which is its class's but for this function: other models
    of the class are not touched.
    """
    forward: Any = type(module).forward
    weight = getattr(getattr(module, "q_proj", None), "weight", None)
    dim = getattr(module, "head_dim", None)
    if not _turns_by_rotary(module):
        return False
    theirs = forward.__globals__.get(ROTARY)
    if theirs is None or not fusable(weight) or not isinstance(dim, int) or not untouched(module):
        return False
    from magicpig.nn import on_gpu

    def ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        if more or named or not on_gpu.can_rotate(q, k, cos, sin):
            return theirs(q, k, cos, sin, *more, **named)
        return on_gpu.rotary(q, k, cos, sin)

    x = _random(5 * 12, dim, weight).view(5, 2, 6, dim)
    q, k = x[:, :, :4].transpose(1, 2), x[:, :, 4:].transpose(1, 2)
    cos, sin = (_random(10, dim, weight).add(shift).view(5, 2, dim) for shift in (0, 1))
    try:
        pairs = zip(theirs(q, k, cos, sin), on_gpu.rotary(q, k, cos, sin), strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            return False
    except (TypeError, ValueError, RuntimeError):
        return False
    own = FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTARY: ours},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(own, module)
    return True


def embedding_twin(module: nn.Module, linear: PackedLinear) -> PackedEmbedding | None:
    """For embeddings tied to `linear`, with or without a constant factor."""
    if not untouched(module):
        return None
    ids = torch.linspace(0, linear.out_features - 1, 16).long()
    truth = _outcome(module, ids)
    scale = getattr(module, "embed_scale", None)
    twin = PackedEmbedding(linear, None if scale is None else float(scale))
    return twin if truth is not None and torch.equal(twin(ids), truth) else None


def weights_read_by(module: nn.Module) -> set[str]:
    """Children whose weight or bias the module's own methods read, instead of calling them."""
    found = set()
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        for method in vars(kind).values():
            if isinstance(method, FunctionType):
                steps = list(dis.get_instructions(method))
                found |= {
                    one.argval
                    for one, following in itertools.pairwise(steps)
                    if one.opname == following.opname == "LOAD_ATTR"
                    and following.argval in ("weight", "bias")
                }
    return found
