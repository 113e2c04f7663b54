"""Prompt: keys and values of a batch of prompts while they are read, in plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor


class Prompt:
    """Tensors [batch, kv_heads, tokens, dim] that grow at their end, on the model's device.

    keep: before tokens are added, all but this many of the last are dropped; None: none are.
    expected: tokens that are likely to come in all, to make room for at once.
    """

    def __init__(self, keep: int | None = None, expected: int = 0) -> None:
        self.keep = keep
        self.expected = 0 if keep is not None else expected
        self.num_tokens = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> None:
        if self.keep is not None and self.num_tokens > self.keep:
            old_keys, old_values = self.tensors
            self._keys = old_keys[:, :, -self.keep :].contiguous()
            self._values = old_values[:, :, -self.keep :].contiguous()
            self.num_tokens = self.keep
        first, self.num_tokens = self.num_tokens, self.num_tokens + keys.shape[2]
        self._keys = self._put(self._keys, first, keys)
        self._values = self._put(self._values, first, values)

    def _put(self, old: Tensor | None, first: int, new: Tensor) -> Tensor:
        capacity = 0 if old is None else old.shape[2]
        if self.num_tokens > capacity:
            capacity = max(self.num_tokens, capacity + capacity // 4, self.expected)
            grown = new.new_empty(*new.shape[:2], capacity, new.shape[3])
            if old is not None:
                grown[:, :, :first] = old[:, :, :first]
            old = grown
        assert old is not None
        old[:, :, first : self.num_tokens] = new
        return old

    def fetch(self, room: int) -> None:
        """Before the tokens are used: they are where they should be."""

    def release(self) -> None:
        """After they were used for now: they stay."""

    @property
    def like(self) -> Tensor:
        """Of the kind of keys [batch, kv_heads, 0, dim] that are appended."""
        return self.tensors[0][:, :, :0]

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Views of keys and values [batch, kv_heads, tokens, dim]."""
        assert self._keys is not None
        assert self._values is not None
        return self._keys[:, :, : self.num_tokens], self._values[:, :, : self.num_tokens]

    def row(self, i: int, first: int, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, tokens, dim] of row i from token `first` on.

        visible: bool [tokens], which of all the row's tokens to take; None: all.
        """
        keys, values = self.tensors
        return shown(keys[i, :, first:], values[i, :, first:], visible, first)

    def select(self, indices: Tensor) -> None:
        """Keeps these rows, in this order."""
        keys, values = self.tensors
        self._keys, self._values = keys[indices.to(keys.device)], values[indices.to(keys.device)]

    def crop(self, tokens: int) -> None:
        self.num_tokens = max(0, self.num_tokens - tokens)


def shown(
    keys: Tensor, values: Tensor, visible: Tensor | None, first: int
) -> tuple[Tensor, Tensor]:
    """Those that are visible of keys and values [kv_heads, tokens, dim] from token `first` on."""
    if visible is None:
        return keys, values
    here = visible[first:].to(keys.device)
    return keys[:, here], values[:, here]


def padded(rows: list[tuple[Tensor, Tensor]], visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows [kv_heads, tokens, dim] as a batch, where `visible` [batch, tokens] says they stand."""
    if len(rows) == 1 and visible is None:
        keys, values = rows[0]
        return keys[None], values[None]
    if visible is None:
        keys, values = (torch.stack(tensors) for tensors in zip(*rows, strict=True))
        return keys, values
    shape = (len(rows), rows[0][0].shape[0], visible.shape[1], rows[0][0].shape[2])
    keys, values = rows[0][0].new_zeros(2, *shape)
    visible = visible.to(keys.device)
    for i, (row_keys, row_values) in enumerate(rows):
        keys[i, :, visible[i]], values[i, :, visible[i]] = row_keys, row_values
    return keys, values
