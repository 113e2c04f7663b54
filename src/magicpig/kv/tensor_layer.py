"""TensorLayer: a sequence in one layer, kept in plain tensors; a method in torch attends to it.

For methods that are not the native core's. Windows and far context are as NativeLayer has them: the
same tokens are near and far at the same lengths.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from magicpig.config import WindowConfig
from magicpig.kv.base import LayerShape, SequenceBytes, SequenceLayer
from magicpig.kv.cost import Cost
from magicpig.kv.seats import Seats, Sitter, together

if TYPE_CHECKING:
    from magicpig.attention.tensor_method import TensorMethod


class TensorLayer(SequenceLayer, Sitter):
    """method: attends, and says what is kept of the far context. layer: its place in the model.

    far: a batch of one. far_seen: tokens that became far, whatever was kept of them.
    state: the method's own.
    """

    def __init__(
        self, method: TensorMethod, shape: LayerShape, window: WindowConfig, layer: int
    ) -> None:
        self.method = method
        self.shape = shape
        self.config = window
        self.layer = layer
        self.evicts = not method.keeps_all
        empty = torch.empty(
            shape.num_kv_heads, 0, shape.head_dim, dtype=shape.dtype, device=shape.device
        )
        self.far = method.store(shape, empty, empty)
        self.far_seen = 0
        self.state: Any = method.new_state(self)
        self.sit(Seats([(empty, empty)]), 0)
        self._spent: Counter[str] = Counter()
        self._near_rows = 0

    @classmethod
    def step(
        cls,
        layers: Sequence[TensorLayer],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        with torch.inference_mode():
            seats = together(layers)
            method = layers[0].method
            out = method.step(layers, seats, queries, keys, values, scale, softcap)
            for layer in layers:
                layer.see_window()
        return torch.empty_like(queries, requires_grad=False).copy_(out)  # in the caller's mode

    def see_window(self) -> None:
        """A step has read it."""
        self._near_rows += self.shape.num_heads * self.seats.lengths[self.seat]

    @torch.inference_mode()
    def leave(self) -> None:
        """Takes over what the steps left with the seats: their cost, and the method's sums."""
        self.spend_rows(int(self.seats.drawn[self.seat]))
        self.seats.drawn[self.seat] = 0
        self.method.collect(self)

    def spend(self, counts: Mapping[str, int]) -> None:
        """Adds to the cost, by the names of its fields."""
        self._spent.update(counts)

    def spend_rows(self, count: int) -> None:
        """So many rows, each read for one query head."""
        self._spent.update(rows=count, row_bytes=count * self.shape.row_bytes)

    @property
    def kind(self) -> object:
        return TensorLayer, self.method, self.layer

    @property
    def num_tokens(self) -> int:
        return self.far.num_tokens + self.seats.lengths[self.seat]

    @torch.inference_mode()
    def extend(self, keys: Tensor, values: Tensor, mass: Tensor | None = None) -> None:
        self.leave()
        keys, values = keys.to(self.seats.keys), values.to(self.seats.keys)
        in_window = self.seats.lengths[self.seat]
        if in_window:
            window = self.seats.window(self.seat)
            keys, values = torch.cat([window[0], keys], 1), torch.cat([window[1], values], 1)
        self.method.watch(self, keys.shape[1], mass)
        sinks, local, block = self.config.sinks, self.config.local, self.config.block
        far = sinks
        if in_window >= sinks + local + block:  # a block that was full before goes by itself
            far = self._add_far(keys, values, far, block)
        if keys.shape[1] - far - local >= block:
            far = self._add_far(keys, values, far, keys.shape[1] - far - local)
        self._sit_alone(*(torch.cat([x[:, :sinks], x[:, far:]], 1) for x in (keys, values)))

    def _add_far(self, keys: Tensor, values: Tensor, first: int, count: int) -> int:
        """Tokens from `first` on become far; the end of them."""
        part = slice(first, first + count)
        self.far_seen += count
        self.far = self.method.grown(self, keys[:, part], values[:, part])
        return part.stop

    def _sit_alone(self, keys: Tensor, values: Tensor) -> None:
        self.sit(Seats([(keys, values)]), 0)

    @torch.inference_mode()
    def settle(self, wait: bool = False) -> None:
        recent = self.seats.lengths[self.seat] - self.config.sinks
        if recent >= self.config.local + self.config.block * (1 if wait else 2):
            self._move(self.config.block)

    def _move(self, count: int) -> None:
        """The oldest tokens behind the sinks become far."""
        self.leave()
        self._add_far(*self.read_window(), self.config.sinks, count)
        self.seats.drop(self.seat, self.config.sinks, count)

    def read_window(self) -> tuple[Tensor, Tensor]:
        keys, values = self.seats.window(self.seat)
        return keys.clone(), values.clone()

    def read(self) -> tuple[Tensor, Tensor]:
        keys, values = self.read_window()
        sinks = self.config.sinks
        far_keys, far_values = (x[0].to(keys.device) for x in (self.far.keys, self.far.values))
        return (
            torch.cat([keys[:, :sinks], far_keys, keys[:, sinks:]], 1),
            torch.cat([values[:, :sinks], far_values, values[:, sinks:]], 1),
        )

    def share(self, others: Sequence[SequenceLayer]) -> None:
        """Uses another's far context of the same tokens in place of its own, if there is one."""
        for other in others:
            if isinstance(other, TensorLayer) and not (self.evicts or other.evicts):
                mine, theirs = self.far.keys, other.far.keys
                if (mine.shape, mine.device) == (theirs.shape, theirs.device):
                    self.far = other.far
                    return

    @torch.inference_mode()
    def fork(self) -> TensorLayer:
        self.leave()
        other = copy.copy(self)
        other.state = copy.deepcopy(self.state)
        other.sit(Seats([self.seats.window(self.seat)]), 0)
        other._spent, other._near_rows = Counter(), 0
        return other

    def empty(self) -> TensorLayer:
        return TensorLayer(self.method, self.shape, self.config, self.layer)

    def end(self) -> None:
        self.seats.far = None  # a batch that does not come again

    @property
    def nbytes(self) -> SequenceBytes:
        keys, _ = self.seats.window(self.seat)
        return SequenceBytes(self.far.nbytes, self.far.derived_nbytes, 2 * keys.nbytes)

    @property
    def cost(self) -> Cost:
        self.leave()
        return Cost(**self._spent)

    @property
    def reads(self) -> tuple[int, int]:
        cost = self.cost
        return cost.rows + self._near_rows, cost.tokens + self._near_rows
