"""HostPrompt: keys and values of a prompt while it is read, in host memory.

For models on a GPU whose far context belongs to the CPU: of all tokens read so far, the device
holds those of the layer at hand and of the next one, which is fetched meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicpig.kv.courier import Errand, courier

State = tuple[Tensor, Tensor]  # keys and values [tokens, kv_heads, dim]


class HostPrompt:
    """As Prompt, of a batch of one. Tokens lie one after another, so that any range is one stretch.

    expected: tokens that are likely to come in all, to make room for at once.
    """

    def __init__(self, expected: int = 0) -> None:
        self.expected = expected
        self.num_tokens = 0
        self._host: State | None = None
        self._on_device: State | None = None
        self._arriving: list[Errand] = []
        self._leaving: list[Errand] = []

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Tokens [1, kv_heads, tokens, dim] on the device."""
        new = keys[0].transpose(0, 1), values[0].transpose(0, 1)
        last = self.num_tokens + len(new[0])
        self._make_room(last, new[0])
        if self._on_device is not None and len(self._on_device[0]) < last:
            self.release()
        self.fetch(last)
        part, self.num_tokens = slice(self.num_tokens, last), last
        assert self._host is not None
        for mine, tokens in zip(self._arrived(), new, strict=True):
            mine[part] = tokens
        self._leaving += [
            self._courier.send(mine[part], host[part])
            for mine, host in zip(self._arrived(), self._host, strict=True)
        ]

    def _make_room(self, tokens: int, like: Tensor) -> None:
        """In host memory."""
        if self._host is None:
            self._courier = courier(like.device)
        capacity = 0 if self._host is None else len(self._host[0])
        if tokens <= capacity:
            return
        shape = (max(tokens, capacity + capacity // 4, self.expected), *like.shape[1:])
        grown = [self._courier.host_memory(shape, like.dtype) for _ in range(2)]
        if self._host is not None:
            self._settle()
            for new, old in zip(grown, self._host, strict=True):
                new[: len(old)] = old
        self._host = grown[0], grown[1]

    def fetch(self, room: int) -> None:
        """Begins to bring the tokens to the device, to memory with room for so many in all."""
        if self._on_device is not None or self._host is None:
            return
        shape, dtype = (room, *self._host[0].shape[1:]), self._host[0].dtype
        device = self._courier.device
        keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        self._on_device = keys, values
        if self.num_tokens:  # what is still leaving arrives first: copies keep their order
            part = slice(0, self.num_tokens)
            self._arriving = [
                self._courier.send(host[part], mine[part])
                for host, mine in zip(self._host, self._on_device, strict=True)
            ]

    def release(self) -> None:
        """The device does not need the tokens for now; its next work may have their memory."""
        for errand in (*self._arriving, *self._leaving):
            errand.before_device()
        self._on_device, self._arriving = None, []

    def __del__(self) -> None:
        self.release()

    def _arrived(self) -> State:
        assert self._on_device is not None
        for errand in self._arriving:
            errand.before_device()
        self._arriving = []
        return self._on_device

    def _settle(self) -> None:
        for errand in self._leaving:
            errand.before_host()
        self._leaving = []

    @property
    def like(self) -> Tensor:
        """Of the kind of keys [1, kv_heads, 0, dim] that are appended."""
        assert self._host is not None
        _, kv_heads, dim = self._host[0].shape
        dtype, device = self._host[0].dtype, self._courier.device
        return torch.empty(1, kv_heads, 0, dim, dtype=dtype, device=device)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Views of keys and values [1, kv_heads, tokens, dim] on the device."""
        self.fetch(self.num_tokens)
        keys, values = (x[: self.num_tokens].transpose(0, 1)[None] for x in self._arrived())
        return keys, values

    def row(self, i: int, first: int, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, tokens, dim] from token `first` on, in host memory."""
        assert i == 0
        assert visible is None
        assert self._host is not None
        self._settle()
        keys, values = (x[first : self.num_tokens].transpose(0, 1) for x in self._host)
        return keys, values

    def part(self, first: int, last: int) -> tuple[Tensor, Tensor, list[Errand]]:
        """Keys and values [kv_heads, tokens, dim] in host memory, once copies are made that may be
        under way."""
        assert self._host is not None
        keys, values = (x[first:last].transpose(0, 1) for x in self._host)
        return keys, values, list(self._leaving)

    def keys_there(self, first: int, last: int) -> Tensor:
        """Keys [kv_heads, tokens, dim] on the device, before they are released."""
        return self._arrived()[0][first:last].transpose(0, 1)

    def select(self, indices: Tensor) -> None:
        """Keeps these rows: the one there is."""
        if indices.tolist() != [0]:
            raise ValueError(f"a prompt in host memory is a batch of one, not {indices.tolist()}")

    def crop(self, tokens: int) -> None:
        self.num_tokens = max(0, self.num_tokens - tokens)
