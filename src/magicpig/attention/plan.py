"""Plan: which method each layer of a model has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from magicpig.attention.base import Method
from magicpig.attention.full import Full
from magicpig.attention.lsh import Lsh
from magicpig.attention.registry import parse
from magicpig.config import LSHConfig, WindowConfig, check_int
from magicpig.kv.base import LayerShape, SequenceLayer
from magicpig.kv.hybrid_layer import new_layer
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.sequence import SequenceKV


@dataclass(frozen=True)
class Plan:
    """method: of all layers but the dense ones, which read every row.

    Exact methods have all layers; dense ones are left out of their cost too, so that costs compare.
    """

    method: Method
    dense_layers: frozenset[int] = frozenset()

    def of(self, layer: int) -> Method:
        dense = layer in self.dense_layers and not self.method.exact
        return Full() if dense else self.method

    def new_layer(
        self, layer: int, shape: LayerShape, window: WindowConfig, span: int | None = None
    ) -> SequenceLayer:
        """An empty sequence in a model's layer; span: of sliding attention."""
        if span:
            return new_layer(shape, None, window, span)
        new = self.of(layer).new_layer(shape, window, layer)
        new.dense = layer in self.dense_layers
        return new

    def adopt(self, sequence: SequenceKV, device: torch.device | None = None) -> SequenceKV:
        """The same tokens as this plan keeps them; rows are shared where they can be.

        device: the model's; None: as it was.
        """
        layers = [
            self._adopted(i, layer, device or layer.shape.device)
            if isinstance(layer, SequenceLayer)
            else layer
            for i, layer in enumerate(sequence.layers)
        ]
        return SequenceKV(layers, sequence.num_tokens, sequence.long_rope).fork()

    def _adopted(self, i: int, layer: SequenceLayer, device: torch.device) -> SequenceLayer:
        shape = replace(layer.shape, device=device)
        new = self.new_layer(i, shape, layer.config, layer.span)
        if new.kind == layer.kind:
            new = layer.fork()
        elif isinstance(new, NativeLayer) and isinstance(layer, NativeLayer):
            new.take(layer)
        else:
            if layer.evicts:
                raise ValueError(
                    "tokens of the text were evicted: read it again by a method that keeps them"
                )
            new.extend(*layer.read())
        new.dense = i in self.dense_layers
        return new


DEFAULT_METHOD = "scan"


def make_plan(
    method: str | Method | None,
    num_layers: int,
    lsh: LSHConfig | None = None,
    dense_layers: Sequence[int] | None = None,
    full_layers: Sequence[int] | None = None,
) -> Plan:
    """The plan of a method for a model of so many layers.

    method: a spec like "lsh" or "quest:16:4%", or a method; None: DEFAULT_METHOD, or "lsh" where
        its hash tables are given.
    lsh: the hash tables of "lsh" where its spec does not say; other methods have none.
    dense_layers: layers that always read every row; None: the first and the middle one of those
        with full attention.
    full_layers: these; None: all.
    """
    if method is None:
        method = DEFAULT_METHOD if lsh is None else "lsh"
    if isinstance(method, str):
        spec = method
        method = parse(spec)
    elif isinstance(method, Method):
        spec = ""
    else:
        raise TypeError(f"method must be a name or a Method, not {method!r}")
    if lsh is not None and not isinstance(lsh, LSHConfig):
        raise TypeError(f"lsh must be an LSHConfig or None, not {lsh!r}")
    if lsh is not None and isinstance(method, Lsh):
        if spec != "lsh":
            raise ValueError(
                f"method {method.spec!r} says which hash tables, and lsh does: leave one out"
            )
        method = Lsh(**asdict(lsh))
    if dense_layers is None:
        layers = range(num_layers) if full_layers is None else full_layers
        dense_layers = (layers[0], layers[len(layers) // 2]) if layers else ()
    if not isinstance(dense_layers, Collection) or isinstance(dense_layers, (str, Mapping)):
        raise TypeError(f"dense_layers must be a list of layers or None, not {dense_layers!r}")
    for layer in dense_layers:
        check_int("dense_layers", layer, 0, num_layers - 1)
    return Plan(method, frozenset(dense_layers))
