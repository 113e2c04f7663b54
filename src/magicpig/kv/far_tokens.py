"""FarTokens: far contexts in one layer as plain tensors, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Derive = Callable[[Tensor], tuple[Tensor, ...]]


class FarTokens:
    """Keys and values of one sequence or of a batch; never changed.

    keys, values: [batch, num_kv_heads, tokens, head_dim], the shorter ones padded at their end.
    lengths: tokens of each.
    """

    def __init__(self, keys: Tensor, values: Tensor, lengths: Sequence[int] | None = None) -> None:
        self.keys = keys
        self.values = values
        self.lengths = [keys.shape[2]] * len(keys) if lengths is None else list(lengths)
        self._parts: Sequence[FarTokens] = ()
        self._derived: dict[str, tuple[Tensor, ...]] = {}

    @classmethod
    def stack(cls, parts: Sequence[FarTokens]) -> FarTokens:
        """Sequences as a batch, made once for all who ask for the same ones.

        On a GPU, once for each stream: what another one makes may not be there yet.
        """
        if len(parts) == 1:
            return parts[0]
        where = parts[0].keys.device
        stream = torch.cuda.current_stream(where).cuda_stream if where.type == "cuda" else 0
        name = (stream, *map(id, parts))
        stacked = _stacks.get(name)
        if stacked is None:
            keys, values = (
                _padded([getattr(part, side)[0] for part in parts]) for side in ("keys", "values")
            )
            stacked = cls(keys, values, [part.lengths[0] for part in parts])
            stacked._parts = parts  # keeps them, and so their ids, alive
            _stacks[name] = stacked
        return stacked

    @property
    def num_tokens(self) -> int:
        """Of the longest."""
        return self.keys.shape[2]

    @property
    def place(self) -> tuple[int, int, int]:
        """Of one sequence, for kernels: addresses of keys and of values, and the tokens."""
        return self.keys.data_ptr(), self.values.data_ptr(), self.num_tokens

    @cached_property
    def hidden(self) -> Tensor | None:
        """bool [batch, 1, tokens], True at padding; None where there is none."""
        if min(self.lengths) == self.num_tokens:
            return None
        lengths = torch.tensor(self.lengths, device=self.keys.device)
        return (torch.arange(self.num_tokens, device=self.keys.device) >= lengths[:, None])[:, None]

    @cached_property
    def first_rows(self) -> Tensor:
        """int64 [batch, num_kv_heads, 1]: where each head's rows begin, with all rows in a line."""
        heads = torch.arange(len(self.keys) * self.keys.shape[1], device=self.keys.device)
        return (heads * self.num_tokens).view(len(self.keys), -1, 1)

    def derived(self, name: str, derive: Derive) -> tuple[Tensor, ...]:
        """What `derive` makes of the keys [num_kv_heads, tokens, head_dim] of each sequence.

        A batch of tensors [num_kv_heads, *, ...] for each that it gives, padded by zeros where the
        second dimension differs. Made once.
        """
        if name not in self._derived:
            if self._parts:
                each = [part.derived(name, derive) for part in self._parts]
                self._derived[name] = tuple(
                    _padded([tensor[0] for tensor in tensors])
                    for tensors in zip(*each, strict=True)
                )
            else:
                self._derived[name] = tuple(tensor[None] for tensor in derive(self.keys[0]))
        return self._derived[name]

    @property
    def nbytes(self) -> int:
        """Of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def derived_nbytes(self) -> int:
        return sum(tensor.nbytes for tensors in self._derived.values() for tensor in tensors)


_stacks: WeakValueDictionary[tuple[int, ...], FarTokens] = WeakValueDictionary()


def _padded(tensors: list[Tensor]) -> Tensor:
    """Tensors [heads, *, ...] as a batch, padded by zeros in the second dimension."""
    longest = max(tensor.shape[1] for tensor in tensors)
    first = tensors[0]
    if all(tensor.shape[1] == longest for tensor in tensors):
        return torch.stack(tensors)
    batch = first.new_zeros(len(tensors), first.shape[0], longest, *first.shape[2:])
    for i, tensor in enumerate(tensors):
        batch[i, :, : tensor.shape[1]] = tensor
    return batch
