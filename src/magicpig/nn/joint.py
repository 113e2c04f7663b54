"""Joint: linear layers of one input as one product, on a GPU, which reads small matrices slowly."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from magicpig.nn.linear import without_graph


def side_by_side(layers: Sequence[nn.Linear]) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Weights and biases of one layer with all their outputs, end to end."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    if all(layer.bias is None for layer in layers):
        return weight, None
    biases: list[Tensor] = [
        weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
        for layer in layers
    ]
    return weight, nn.Parameter(torch.cat(biases), requires_grad=False)


class Joint(nn.Module):
    """The layers' weights, copied."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.weight, self.bias = side_by_side(layers)
        self._last = threading.local()  # .x, .left: an input, and what was not asked for yet

    def share(self, number: int, x: Tensor) -> Tensor:
        """What layer `number` makes of x; all layers' is made for the first that asks."""
        if getattr(self._last, "x", None) is not x or number not in self._last.left:
            whole = linear(without_graph(x), self.weight, self.bias)
            outs = torch.split(whole, self.sizes, -1)
            self._last.x, self._last.left = x, dict(enumerate(outs))
        out: Tensor = self._last.left.pop(number)
        if not self._last.left:
            self._last.x = None
        return out


class Share(nn.Module):
    """One of the layers of a Joint."""

    def __init__(self, joint: Joint, number: int) -> None:
        super().__init__()
        self.joint, self.number = joint, number

    def forward(self, x: Tensor) -> Tensor:
        """[..., out_features] of x [..., in_features]."""
        return self.joint.share(self.number, x)
