"""BatchLayer: a layer of a transformers cache whose rows are sequences of ours.

A prompt (several tokens at once) is gathered in plain tensors and attended to exactly. At the first
single token the rows become sequences, without their padding: a window and a far context each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from magicpig.attention.exact import exact_attention
from magicpig.config import LSHConfig, WindowConfig
from magicpig.kv.prompt import Prompt, padded
from magicpig.kv.sequence import SequenceLayer, step

TAG = "_magicpig_layer"  # on the keys that `update` returns: the attention function finds us there


class BatchLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of a batch in one layer.

    index: how rows of the far context are drawn; None: all are read.
    span: sliding attention over so many tokens, or None.
    check: called before every use; raises when the layer may not be used (any more).
    """

    supports_early_init = False
    is_croppable = True

    def __init__(
        self,
        index: LSHConfig | None,
        window: WindowConfig,
        span: int | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.index, self.window, self.span, self.check = index, window, span, check
        self.is_sliding = span is not None
        self.num_heads = 0
        self.reset()

    def reset(self) -> None:
        self.prompt: Prompt | None = None  # tokens are here ...
        self.rows: list[SequenceLayer] = []  # ... or there
        self.known: list[SequenceLayer] = []  # the prompt's first tokens, where they were rows
        self.num_known = self.num_gathered = 0
        self.visible: Tensor | None = None  # bool [batch, tokens]: no padding; None: all are
        self.num_seen = 0  # tokens of a row, padding included

    @classmethod
    def of(cls, row: SequenceLayer, num_tokens: int) -> BatchLayer:
        """A layer of a batch of one: a sequence that is left as it is, and goes on as another."""
        layer = cls(row.far.index, row.config, row.span)
        layer.rows, layer.num_seen = [row.fork()], num_tokens
        return layer

    def to_sequence(self) -> SequenceLayer:
        """The sequence of a batch of one."""
        if self.prompt:
            self.to_rows(self.prompt.tensors[0])
        return self.rows[0]

    @property
    def is_initialized(self) -> bool:
        return self.num_seen > 0

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        pass  # the base class sets it

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.shape != value_states.shape:
            raise ValueError(
                f"keys {list(key_states.shape)} and values {list(value_states.shape)} must agree "
                "in shape; this model's attention is of a kind that magicpig cannot do"
            )

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if self.check:
            self.check()
        if not self.num_seen:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[2] > 1:
            self._gather(key_states)
            assert self.prompt
            self.prompt.append(key_states, value_states)
            self.num_seen = self.num_gathered = self.num_seen + key_states.shape[2]
            key_states, value_states = self.prompt.tensors
        else:
            self.num_seen += 1
        setattr(key_states, TAG, self)
        return key_states, value_states

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        """Output [batch, tokens, heads, dim] for queries [batch, heads, tokens, dim].

        keys, values: as `update` returned them, of a whole prompt or of one new token.
        """
        self.num_heads = queries.shape[1]
        if queries.shape[2] > 1:
            seen = None if self.span else mask  # what slid away is in the mask, not in the keys
            out = exact_attention(queries, keys, values, seen, scale, softcap, self.span)
            return out.transpose(1, 2)
        self.to_rows(keys, None if mask is None else _visible(mask))
        query, key, value = (tensor.squeeze(2).cpu() for tensor in (queries, keys, values))
        out = step(self.rows, query, key, value, scale, softcap)
        for row in self.rows:
            row.settle()
        return out[:, None].to(queries.device)

    def to_rows(self, like: Tensor, visible: Tensor | None = None) -> None:
        """Turns a gathered prompt into sequences, if there is one.

        like: keys of the batch, [batch, kv_heads, *, dim].
        visible: bool [batch, tokens]; what is not is padding.
        """
        if self.rows:
            return self._check_visible(visible)
        batch, kv_heads, _, dim = like.shape
        shape = (self.num_heads, kv_heads, dim, like.dtype, self.index, self.window, self.span)
        rows = self.known or [SequenceLayer(*shape) for _ in range(batch)]
        if self.prompt:
            if visible is not None:
                self.visible = visible[:, : self.num_gathered].cpu()
            first = max(0, self.prompt.num_tokens - (self.num_gathered - self.num_known))
            shown = None if self.visible is None else self.visible[:, -self.prompt.num_tokens :]
            for i, row in enumerate(rows):
                row.extend(*self.prompt.row(i, first, None if shown is None else shown[i]))
        self.rows, self.known, self.prompt = rows, [], None

    def _check_visible(self, visible: Tensor | None) -> None:
        if visible is None:
            return
        seen, there = visible.sum(-1).tolist(), [row.num_tokens + 1 for row in self.rows]
        if seen != there:
            raise ValueError(
                f"the attention mask shows {seen} tokens of the rows, the cache holds {there}: "
                "what was visible once must stay so"
            )

    def _gather(self, like: Tensor) -> None:
        """Turns sequences back into a prompt, at the places where they stood."""
        if self.prompt:
            return
        keep = self.span - 1 if self.span else None
        if not self.rows:
            self.prompt = Prompt(keep)
            return
        if self.visible is not None:
            new = self.num_seen - self.visible.shape[1]
            decoded = torch.ones(len(self.rows), new, dtype=torch.bool)
            self.visible = torch.cat([self.visible, decoded], 1)
        self.prompt = padded([row.read() for row in self.rows], self.visible, like, keep)
        self.known, self.rows = self.rows, []
        self.num_known = self.num_gathered = self.num_seen

    def get_seq_length(self) -> int:
        return self.num_seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_seen + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens, not {tokens_to_remove}")
        if tokens_to_remove and self.num_seen:
            if self.rows:
                self._gather(torch.empty(0, dtype=self.rows[0].far.dtype))
            assert self.prompt
            self.prompt.crop(-tokens_to_remove)
            self.num_seen = self.num_gathered = max(0, self.num_seen + tokens_to_remove)
            if self.num_seen < self.num_known:
                self.known, self.num_known = [], 0
            if self.visible is not None:
                self.visible = self.visible[:, : self.num_seen]

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.rows:
            self.rows = [self.rows[i].fork() for i in indices.tolist()]
        elif self.prompt:
            self.prompt.select(indices)
            self.known = [self.known[i].fork() for i in indices.tolist()] if self.known else []
        if self.visible is not None:
            self.visible = self.visible[indices.cpu()]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        batch = len(self.rows) or (len(self.prompt.tensors[0]) if self.prompt else 0)
        self.batch_select_indices(torch.arange(batch).repeat_interleave(repeats))


def _visible(mask: Tensor) -> Tensor:
    """bool [batch, tokens] from a mask [batch, 1, 1, tokens] of bools, or of 0 and -inf."""
    row = mask[:, 0, -1]
    return row if row.dtype == torch.bool else row == 0
