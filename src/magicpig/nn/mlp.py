"""GatedMLP: down(activation(gate(x)) * up(x)) in one native call; FusedMLP: the same on a GPU."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import linear

from magicpig import _native
from magicpig.nn.joint import side_by_side
from magicpig.nn.linear import weight_and_bias, without_graph


class GatedMLP(nn.Module):
    """The three layers' bfloat16 CPU weights, copied, gate and up side by side.

    activation: "silu" or "gelu_tanh". float32 inside; the product that goes into `down` and its
    result are rounded to bfloat16.
    """

    def __init__(
        self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, activation: str = "silu"
    ) -> None:
        super().__init__()
        self.in_features = gate.in_features
        self.hidden_features = gate.out_features
        self.out_features = down.out_features
        self.activation = activation
        (gate_weight, gate_bias), (up_weight, up_bias), (down_weight, down_bias) = (
            weight_and_bias(layer) for layer in (gate, up, down)
        )
        self._native = _native.GatedMLP(
            gate_weight, up_weight, down_weight, activation, gate_bias, up_bias, down_bias
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., out_features] of x [..., in_features]."""
        out = x.new_empty((*x.shape[:-1], self.out_features))
        self._native.forward(without_graph(x), out)
        return out

    def extra_repr(self) -> str:
        sizes = f"{self.in_features}, {self.hidden_features}, {self.out_features}"
        return f"{sizes}, activation={self.activation}"


class FusedMLP(nn.Module):
    """On a GPU: gate and up are one product, activation and product one kernel."""

    def __init__(
        self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, activation: str = "silu"
    ) -> None:
        super().__init__()
        self.activation = activation
        self.both, self.bias = side_by_side([gate, up])
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        """[..., out_features] of x [..., in_features]."""
        from magicpig.nn import on_gpu

        both = linear(without_graph(x), self.both, self.bias)
        out: Tensor = self.down(on_gpu.gate(both, self.activation))
        return out
