"""RMSNorm: one native call, or one kernel on a GPU, instead of half a dozen torch operations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from magicpig import _native
from magicpig.nn.linear import without_graph


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), computed in float32.

    Rounded to the dtype of x, then times `weight`, as Llama has it; or, with `one_plus_weight`,
    times 1 + weight before it is rounded, as Gemma does.
    """

    def __init__(self, weight: Tensor, eps: float, one_plus_weight: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.eps = eps
        self.one_plus_weight = one_plus_weight

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of x [..., dim]."""
        x = without_graph(x)
        if x.is_cuda:
            from magicpig.nn import on_gpu

            return on_gpu.rms_norm(x, self.weight, self.eps, self.one_plus_weight)
        out = torch.empty_like(x)
        _native.rms_norm(x, self.weight, self.eps, self.one_plus_weight, out)
        return out

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, one_plus_weight={self.one_plus_weight}"
