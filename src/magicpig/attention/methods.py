"""Methods: how attention over the far context is done, by name.

A method is a small class that says how the far context of each layer is indexed. To add one, write
the class and put it into METHODS.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from magicpig.config import LSHConfig, check_int


class Method(ABC):
    """How the layers of a model attend to the far context."""

    name: str

    @abstractmethod
    def index(self, layer: int) -> LSHConfig | None:
        """How rows of a layer's far context are drawn; None: all of them are read."""


class Full(Method):
    """Every row is read: exact attention."""

    name = "full"

    def __init__(self, lsh: LSHConfig, dense_layers: frozenset[int]) -> None:
        pass

    def index(self, layer: int) -> None:
        return None


class Lsh(Method):
    """Rows are drawn by hash tables, but in the dense layers."""

    name = "lsh"

    def __init__(self, lsh: LSHConfig, dense_layers: frozenset[int]) -> None:
        self.lsh = lsh
        self.dense_layers = dense_layers

    def index(self, layer: int) -> LSHConfig | None:
        return None if layer in self.dense_layers else self.lsh


METHODS: dict[str, type[Full] | type[Lsh]] = {method.name: method for method in (Full, Lsh)}


def check_method(name: str) -> None:
    """Raises for an unknown method."""
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, not {name!r}")


def make_method(
    name: str,
    num_layers: int,
    lsh: LSHConfig | None = None,
    dense_layers: Sequence[int] | None = None,
) -> Method:
    """The named method for a model of so many layers.

    dense_layers: layers that always read every row; None: the first and the middle one.
    """
    check_method(name)
    if lsh is not None and not isinstance(lsh, LSHConfig):
        raise TypeError(f"lsh must be an LSHConfig or None, not {lsh!r}")
    if dense_layers is None:
        dense_layers = (0, num_layers // 2)
    for layer in dense_layers:
        check_int("dense_layers", layer, 0, num_layers - 1)
    return METHODS[name](lsh or LSHConfig(), frozenset(dense_layers))
