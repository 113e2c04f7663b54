"""HostPrompt: keys and values of a prompt while it is read, in host memory.

For models on a GPU whose far context belongs to the CPU: of all tokens read so far, the device
holds those of the layer at hand and of the next one, which is fetched meanwhile. Host memory is
pinned, which takes as long as reading a prompt does: it comes in blocks, when they are needed, so
that the GPU works meanwhile. Blocks are of few sizes, so that other prompts can have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from magicpig.kv.courier import Errand, courier
from magicpig.kv.prompt import Prompt, shown

State = tuple[Tensor, Tensor]  # keys and values
BLOCK, SMALL_BLOCK = 8 << 20, 1 << 20  # bytes of keys, or of values


def block_of(nbytes: int) -> int:
    """Bytes of a block, for keys of a prompt that take so many."""
    return BLOCK if nbytes >= BLOCK else SMALL_BLOCK


def tokens_of(block: int, token_bytes: int) -> int:
    return max(1, block // token_bytes)


class HostPrompt:
    """As Prompt, of a batch of one. Tokens lie one after another, so that any range is one stretch
    in each block.

    expected: tokens that are likely to come in all.
    """

    def __init__(self, expected: int = 0) -> None:
        self.expected = expected
        self.num_tokens = 0
        self._block_tokens = 0
        self._blocks: list[State] = []  # [block_tokens, kv_heads, dim]
        self._on_device: State | None = None  # [tokens and room, kv_heads, dim]
        self._arriving: Errand | None = None
        self._leaving: Errand | None = None  # behind which all that left before is there

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Tokens [1, kv_heads, tokens, dim] on the device."""
        new = keys[0].transpose(0, 1), values[0].transpose(0, 1)
        first, last = self.num_tokens, self.num_tokens + len(new[0])
        self._make_room(last, new[0])
        if self._on_device is not None and len(self._on_device[0]) < last:
            self.release()
        self.fetch(last)
        there, self.num_tokens = self._arrived(), last
        for mine, tokens in zip(there, new, strict=True):
            mine[first:last] = tokens
        self._leaving = self._courier.send(
            (mine[here], block)
            for here, blocks in self._stretches(first, last)
            for mine, block in zip(there, blocks, strict=True)
        )

    def _make_room(self, tokens: int, like: Tensor) -> None:
        """In host memory."""
        if not self._blocks:
            token_bytes = like[0].nbytes
            size = block_of(max(tokens, self.expected) * token_bytes)
            self._courier, self._block_tokens = courier(like.device), tokens_of(size, token_bytes)
        shape = (self._block_tokens, *like.shape[1:])
        while len(self._blocks) * self._block_tokens < tokens:
            with torch.inference_mode(False):  # other tokens may come outside of it
                keys, values = (self._courier.host_memory(shape, like.dtype) for _ in range(2))
            self._blocks.append((keys, values))

    def _stretches(self, first: int, last: int) -> Iterator[tuple[slice, State]]:
        """Where tokens are in host memory: some of them, and what holds these."""
        while first < last:
            block, place = divmod(first, self._block_tokens)
            end = min(last, (block + 1) * self._block_tokens)
            keys, values = self._blocks[block]
            held = slice(place, place + end - first)
            yield slice(first, end), (keys[held], values[held])
            first = end

    def fetch(self, room: int) -> None:
        """Begins to bring the tokens to the device, to memory with room for so many in all."""
        if self._on_device is not None or not self._blocks:
            return
        like = self._blocks[0][0]
        keys, values = (
            torch.empty(room, *like.shape[1:], dtype=like.dtype, device=self._courier.device)
            for _ in range(2)
        )
        self._on_device = keys, values
        if self.num_tokens:  # what is still leaving arrives first: copies keep their order
            self._arriving = self._courier.send(
                (block, mine[there])
                for there, blocks in self._stretches(0, self.num_tokens)
                for block, mine in zip(blocks, (keys, values), strict=True)
            )

    def release(self) -> None:
        """The device does not need the tokens for now; its next work may have their memory."""
        for errand in (self._arriving, self._leaving):
            if errand:
                errand.before_device()
        self._on_device = self._arriving = None

    def __del__(self) -> None:
        self.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> HostPrompt:
        other = HostPrompt(self.expected)
        if self._blocks:
            other.append(*self.tensors)
            for each in (self, other):
                each.release()
        return other

    def _arrived(self) -> State:
        assert self._on_device is not None
        if self._arriving:
            self._arriving.before_device()
            self._arriving = None
        return self._on_device

    @property
    def like(self) -> Tensor:
        """Of the kind of keys [1, kv_heads, 0, dim] that are appended."""
        _, kv_heads, dim = self._blocks[0][0].shape
        dtype, device = self._blocks[0][0].dtype, self._courier.device
        return torch.empty(1, kv_heads, 0, dim, dtype=dtype, device=device)

    @property
    def tensors(self) -> State:
        """Views of keys and values [1, kv_heads, tokens, dim] on the device."""
        self.fetch(self.num_tokens)
        keys, values = (x[: self.num_tokens].transpose(0, 1)[None] for x in self._arrived())
        return keys, values

    def on_device(self) -> Prompt:
        """All of it, for good."""
        prompt = Prompt()
        prompt.append(*self.tensors)
        self.release()
        return prompt

    def row(self, i: int, first: int, visible: Tensor | None) -> State:
        """Keys and values [kv_heads, tokens, dim] from token `first` on, in host memory.

        visible: as of Prompt.
        """
        assert i == 0
        return shown(*self.here(first, self.num_tokens), visible, first)

    def here(self, first: int, last: int) -> State:
        """Keys and values [kv_heads, tokens, dim] in host memory, copied if they are in several
        blocks; as in these, any range of tokens is one stretch."""
        stretches, copies = self.part(first, last)
        if copies:
            copies.before_host()
        if not stretches:
            return self.like[0].cpu(), self.like[0].cpu()
        if len(stretches) == 1:
            return stretches[0]
        keys, values = (
            torch.cat([tensor.transpose(0, 1) for tensor in tensors]).transpose(0, 1)
            for tensors in zip(*stretches, strict=True)
        )
        return keys, values

    def part(self, first: int, last: int) -> tuple[list[State], Errand | None]:
        """Keys and values [kv_heads, tokens, dim] in host memory, block by block, once copies are
        made that may be under way."""
        stretches = [
            (keys.transpose(0, 1), values.transpose(0, 1))
            for _, (keys, values) in self._stretches(first, last)
        ]
        return stretches, self._leaving

    def there(self, first: int, last: int) -> State:
        """Keys and values [kv_heads, tokens, dim] on the device, copied there once more. The host
        leaves them as they are: torch's threads take long beside those of the native core."""
        blocks = [tensors for _, tensors in self._stretches(first, last)]
        if self._leaving:
            self._leaving.before_device()
        keys, values = (
            torch.cat([x.to(self._courier.device, non_blocking=True) for x in tensors])
            for tensors in zip(*blocks, strict=True)
        )
        return keys.transpose(0, 1), values.transpose(0, 1)

    def keys_there(self, first: int, last: int) -> Tensor:
        """Keys [kv_heads, tokens, dim] on the device, before they are released."""
        return self._arrived()[0][first:last].transpose(0, 1)
