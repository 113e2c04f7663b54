"""SequenceLayer: the seam between a sequence and how its keys and values are kept in a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from magicpig.config import WindowConfig
from magicpig.kv.cost import Cost

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class LayerShape:
    """What a model's layer is like: query heads, the KV heads they share, and where it computes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    @property
    def row_bytes(self) -> int:
        """Of a token's key and value in one KV head."""
        return 2 * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes of a sequence: rows and index of the far context, and the windows."""

    rows: int
    index: int
    window: int


class SequenceLayer(ABC):
    """One sequence in one layer: a window, which is always read, and the far context behind it.

    One thread at a time.

    config: which tokens are the window's.
    span: for layers with sliding attention: only this many of the newest tokens are kept and seen.
    dense: read whole although the method is not; its cost is not the method's.
    evicts: some tokens may be gone for good.
    """

    shape: LayerShape
    config: WindowConfig
    span: int | None = None
    dense: bool = False
    evicts: bool = False

    @abstractmethod
    def extend(self, keys: Tensor, values: Tensor, mass: Tensor | None = None) -> None:
        """Adds tokens [num_kv_heads, tokens, head_dim], on any device.

        mass: [num_kv_heads, tokens of the sequence], the attention that each token of the prompt
            got from all its queries; for layers that ask for it.
        """

    @abstractmethod
    def settle(self, wait: bool = False) -> None:
        """After a step: moves what outgrew the window to the far context. wait: all that can go."""

    @abstractmethod
    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values [num_kv_heads, tokens, head_dim] of all tokens kept, in order, copied."""

    @abstractmethod
    def fork(self) -> Self:
        """A sequence that goes its own way from here. The far context is shared."""

    @abstractmethod
    def empty(self) -> Self:
        """A layer like this one, without tokens."""

    def end(self) -> None:  # noqa: B027
        """The sequence has ended: nothing is to be kept for its next step, of others neither."""

    @classmethod
    @abstractmethod
    def step(
        cls,
        layers: Sequence[Self],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """A new token of each sequence, and attention to all of its own: [batch, heads, dim].

        layers: alike in `kind`. queries: [batch, num_heads, head_dim]. keys, values: [batch,
        num_kv_heads, head_dim].
        """

    @property
    @abstractmethod
    def kind(self) -> object:
        """Layers of equal kind step together."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens that can be seen."""

    @property
    @abstractmethod
    def nbytes(self) -> SequenceBytes: ...

    @property
    @abstractmethod
    def cost(self) -> Cost: ...

    @property
    @abstractmethod
    def reads(self) -> tuple[int, int]:
        """Rows that steps read, window included, over all query heads; and those there were."""
