"""PackedLinear: a linear layer whose weights lie as the native kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from magicpig import _native


def without_graph(x: Tensor) -> Tensor:
    """`x`, dense; an error where a gradient would get lost."""
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("packed layers have no gradient; run them under torch.no_grad()")
    return x.contiguous()


def weight_and_bias(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """As the native core wants them."""
    bias = None if linear.bias is None else linear.bias.detach().contiguous()
    return linear.weight.detach().contiguous(), bias


class PackedLinear(nn.Module):
    """The same map as `linear`, whose bfloat16 CPU weights are copied.

    Sums in float32 and rounds once. A row of the result does not depend on the other rows of the
    call or on the number of threads. There is no `weight`; `embedding.py` looks rows of it up.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._native = _native.PackedLinear(*weight_and_bias(linear))

    def forward(self, x: Tensor) -> Tensor:
        """[..., out_features] of x [..., in_features]."""
        out = x.new_empty((*x.shape[:-1], self.out_features))
        self._native.forward(without_graph(x), out)
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
