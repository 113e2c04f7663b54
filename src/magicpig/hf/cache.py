"""BatchLayer: a layer of a transformers cache whose rows are sequences of ours.

A prompt (several tokens at once) is gathered in plain tensors and attended to exactly. At the first
single token the rows become sequences, without their padding: a window and a far context each.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from magicpig.attention.exact import exact_attention
from magicpig.attention.gpu import has_triton
from magicpig.attention.mass import attention_mass
from magicpig.config import draws_on_gpus
from magicpig.hf.tagged import TaggedLayer
from magicpig.kv.base import LayerShape, SequenceLayer
from magicpig.kv.host_prompt import HostPrompt
from magicpig.kv.hybrid_layer import HybridLayer
from magicpig.kv.prompt import Prompt, padded, shown
from magicpig.kv.sequence import step
from magicpig.kv.tensor_layer import TensorLayer

if TYPE_CHECKING:
    from magicpig.kv.device_scan import LayerScan

NewRow = Callable[[LayerShape], SequenceLayer]


class BatchLayer(TaggedLayer):  # type: ignore[no-untyped-call]
    """Keys and values of a batch in one layer.

    new_row: makes an empty sequence of this layer.
    span: sliding attention over so many tokens, or None.
    watch: whether to sum up the attention that the prompt's tokens get.
    expected: tokens that a prompt is likely to have.
    check: called before every use; raises when the layer may not be used (any more).
    on_host: whether the prompt of a batch of one is kept in host memory while it is read, unless
        gradients are to come back from it.
    early: whether segments of such a prompt are made while it is read.
    draws_there: whether rows are drawn by the device, if it can.

    following: the next layer with its prompt there, which is told when to fetch it; behind the last
        one the first, for the next part.
    """

    is_croppable = True

    def __init__(
        self,
        new_row: NewRow,
        span: int | None = None,
        expected: int = 0,
        check: Callable[[], None] | None = None,
        watch: bool = False,
        on_host: bool = False,
        early: bool = False,
        draws_there: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.new_row, self.span, self.watch, self.on_host = new_row, span, watch, on_host
        self.builds_early, self.draws_there = early, draws_there
        self.following: ref[BatchLayer] | None = None
        self.expected, self.check = expected, check
        self.is_sliding = span is not None
        self.num_heads = 0
        self.reset()

    def reset(self) -> None:
        self.prompt: Prompt | HostPrompt | None = None  # tokens are here ...
        self.rows: list[SequenceLayer] = []  # ... or there
        self.known: list[SequenceLayer] = []  # the prompt's first tokens, where they were rows
        self.num_known = self.num_gathered = 0
        self.early: HybridLayer | None = None  # the row to be, part of which is being built
        self.scan: LayerScan | None = None  # where the device draws
        self.visible: Tensor | None = None  # bool [batch, tokens]: no padding; None: all are
        self.num_seen = 0  # tokens of a row, padding included
        self.mass: Tensor | None = None  # [batch, kv_heads, tokens] of the prompt, where watched

    @classmethod
    def of(
        cls, row: SequenceLayer, num_tokens: int, expected: int, on_host: bool = False
    ) -> BatchLayer:
        """A layer of a batch of one: a sequence that is left as it is, and goes on as another."""
        watch = isinstance(row, TensorLayer) and row.method.watches_prompts
        layer = cls(lambda _: row.empty(), row.span, expected, watch=watch, on_host=on_host)
        layer.rows, layer.num_seen = [row.fork()], num_tokens
        return layer

    def to_sequence(self) -> SequenceLayer:
        """The sequence of a batch of one."""
        if self.prompt:
            self.to_rows(self.prompt.like)
        return self.rows[0]

    def to_sequences(self, new_rows: Sequence[NewRow]) -> list[SequenceLayer]:
        """The prompt of a batch of one, once for each; they share what they can."""
        assert not self.known
        if self.prompt:
            shape = self._shape(self.prompt.like)
            keys, values = self.prompt.row(0, 0, None)
            mass = None if self.mass is None else self.mass[0]
        else:  # of one token, which saw itself
            shape = self.rows[0].shape
            keys, values = self.rows[0].read()
            mass = keys.new_full(keys.shape[:2], shape.num_heads // shape.num_kv_heads)
        rows: list[SequenceLayer] = []
        for new_row in new_rows:
            row = new_row(shape)
            row.extend(keys, values, mass)
            if isinstance(row, TensorLayer):
                row.share(rows)
            rows.append(row)
        return rows

    def _shape(self, like: Tensor) -> LayerShape:
        """like: keys of the batch, [batch, kv_heads, *, dim]."""
        _, kv_heads, _, dim = like.shape
        return LayerShape(self.num_heads, kv_heads, dim, like.dtype, like.device)

    @property
    def is_initialized(self) -> bool:
        return self.num_seen > 0

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        pass  # the base class sets it

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchLayer:
        """Far contexts are shared; what may use the layer stays the same."""
        other = copy.copy(self)
        other.prompt = copy.deepcopy(self.prompt, memo)
        other.rows = [row.fork() for row in self.rows]
        other.known = [row.fork() for row in self.known]
        other.following = other.early = other.scan = None
        return other

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if self.check:
            self.check()
        if not self.num_seen:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[2] > 1:
            key_states, value_states = self.fill(key_states, value_states)
        else:
            self.num_seen += 1
        return self.give(key_states, value_states)

    def fill(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds tokens [batch, kv_heads, tokens, dim] to the prompt; all of its keys and values."""
        self._gather(keys)
        assert self.prompt
        self.prompt.append(keys, values)
        self._fetch_following(keys.shape[2])
        self.num_seen = self.num_gathered = self.num_seen + keys.shape[2]
        return self.prompt.tensors

    def _fetch_following(self, tokens: int) -> None:
        """When a part of so many tokens has come here. The next part has no more of them, or what
        was fetched for it is fetched again."""
        layer = self.following() if self.following else None
        if not (self.prompt and layer and isinstance(layer.prompt, HostPrompt)):
            return
        there = self.prompt.num_tokens
        if layer.prompt.num_tokens < there:
            layer.prompt.fetch(there)
        elif there < self.expected:
            layer.prompt.fetch(min(there + tokens, self.expected))

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        self.num_heads = queries.shape[1]
        if queries.shape[2] > 1:
            if any(row.evicts for row in self.known):
                mask = None  # it has places of evicted tokens too; there is no padding
            seen = None if self.span else mask  # what slid away is in the mask, not in the keys
            out = exact_attention(queries, keys, values, seen, scale, softcap, self.span)
            if self.watch:
                mass = attention_mass(queries, keys, mask, scale, softcap)
                if self.mass is not None:
                    mass[:, :, : self.mass.shape[2]] += self.mass
                self.mass = mass
            if self.prompt:
                self._build_early()
                self.prompt.release()
            return out.transpose(1, 2)
        self.to_rows(keys, None if mask is None else _visible(mask))
        query, key, value = (tensor.squeeze(2) for tensor in (queries, keys, values))
        out = self._step(query, key, value, scale, softcap)
        for row in self.rows:
            row.settle()
        return out[:, None]

    def _step(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        rows: Sequence[Any] = self.rows
        first, index = rows[0], None
        if self.draws_there and isinstance(first, HybridLayer) and has_triton(first.shape.device):
            index = first.far.index
        if not draws_on_gpus(index):
            return step(rows, query, key, value, scale, softcap)
        from magicpig.kv.device_scan import LayerScan, scan_for  # which need Triton

        longest = max(row.far.num_tokens for row in rows)
        scan = scan_for(len(rows), first.shape, index, longest)
        if self.scan is None or self.scan.scan is not scan:
            self.scan = LayerScan(scan)
        return HybridLayer.step(rows, query, key, value, scale, softcap, self.scan)

    def _build_early(self) -> None:
        """Begins to index tokens that are certain to become far, while the rest is read."""
        if not (self.builds_early and isinstance(self.prompt, HostPrompt)) or self.num_known:
            return
        if self.early is None:
            row = self.new_row(self._shape(self.prompt.like))
            self.early = row if isinstance(row, HybridLayer) else None
        if self.early:
            self.early.build_early(self.prompt, self.expected)

    @property
    def has_much_left(self) -> bool:
        """Whether a prompt in host memory is made far all at the end."""
        return self.on_host and not (self.early and self.early.num_early)

    def to_rows(self, like: Tensor, visible: Tensor | None = None) -> None:
        """Turns a gathered prompt into sequences, if there is one.

        like: keys of the batch, [batch, kv_heads, *, dim].
        visible: bool [batch, tokens]; what is not is padding.
        """
        if self.rows:
            return self._check_visible(visible)
        rows = self.known
        if not rows and self.early:
            rows = [self.early]
        rows = rows or [self.new_row(self._shape(like)) for _ in range(len(like))]
        if self.prompt:
            if visible is not None:
                self.visible = visible[:, : self.num_gathered].cpu()
            first = max(0, self.prompt.num_tokens - (self.num_gathered - self.num_known))
            still = None if self.visible is None else self.visible[:, -self.prompt.num_tokens :]
            for i, row in enumerate(rows):
                visible_here = None if still is None else still[i]
                mass = None if self.mass is None else self.mass[i]
                if mass is not None and visible_here is not None:
                    mass = mass[:, visible_here.to(mass.device)]
                if row is self.early and isinstance(self.prompt, HostPrompt):
                    self.early.finish_early(self.prompt)
                else:
                    row.extend(*self._tokens_for(row, i, first, visible_here), mass)
        self.rows, self.known, self.prompt, self.mass = rows, [], None, None
        self.early = None

    def _tokens_for(
        self, row: SequenceLayer, i: int, first: int, visible: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the prompt's row i, where this sequence has use for them."""
        assert self.prompt
        if isinstance(self.prompt, HostPrompt) and isinstance(row, TensorLayer):
            keys, values = self.prompt.tensors
            return shown(keys[i, :, first:], values[i, :, first:], visible, first)
        return self.prompt.row(i, first, visible)

    def _check_visible(self, visible: Tensor | None) -> None:
        if visible is None:
            return
        seen = visible.sum(-1).tolist()
        there = [
            count if row.evicts else row.num_tokens + 1
            for count, row in zip(seen, self.rows, strict=True)
        ]
        if seen != there:
            raise ValueError(
                f"the attention mask shows {seen} tokens of the rows, the cache holds {there}: "
                "what was visible once must stay so"
            )

    def _gather(self, like: Tensor) -> None:
        """Turns sequences back into a prompt, at the places where they stood."""
        if self.prompt:
            if isinstance(self.prompt, HostPrompt) and len(like) != 1:
                self.prompt = self.prompt.on_device()
            return
        if not self.rows:
            self.prompt = self._new_prompt(len(like))
            return
        if self.visible is not None:
            if any(row.evicts for row in self.rows):
                raise ValueError(
                    "tokens of padded prompts were evicted: such a cache takes single tokens only; "
                    "begin a new one, or use a method that keeps all tokens"
                )
            new = self.num_seen - self.visible.shape[1]
            decoded = torch.ones(len(self.rows), new, dtype=torch.bool)
            self.visible = torch.cat([self.visible, decoded], 1)
        self.prompt = self._new_prompt(len(self.rows))
        keys, values = padded([row.read() for row in self.rows], self.visible)
        self.prompt.append(keys.to(like), values.to(like))
        self.known, self.rows = self.rows, []
        self.num_known = self.num_gathered = self.num_seen

    def _new_prompt(self, batch: int) -> Prompt | HostPrompt:
        if self.on_host and batch == 1 and not torch.is_grad_enabled():
            return HostPrompt(self.expected)
        return Prompt(self.span - 1 if self.span else None, self.expected)

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
                shape = self.rows[0].shape
                self._gather(torch.empty(0, dtype=shape.dtype, device=shape.device))
            assert self.prompt
            self.on_host = False  # whoever tries tokens will try more
            if isinstance(self.prompt, HostPrompt):
                self.prompt = self.prompt.on_device()
            self.prompt.crop(-tokens_to_remove)
            self.early = None
            if self.mass is not None:
                self.mass = self.mass[:, :, : self.prompt.num_tokens]
            self.num_seen = self.num_gathered = max(0, self.num_seen + tokens_to_remove)
            if self.num_seen < self.num_known:
                self.known, self.num_known = [], 0
            if self.visible is not None:
                self.visible = self.visible[:, : self.num_seen]

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.rows:
            self.rows = [self.rows[i].fork() for i in indices.tolist()]
        elif self.prompt:
            if isinstance(self.prompt, HostPrompt):
                self.prompt = self.prompt.on_device()
            self.prompt.select(indices)
            self.known = [self.known[i].fork() for i in indices.tolist()] if self.known else []
            if self.mass is not None:
                self.mass = self.mass[indices.to(self.mass.device)]
        if self.visible is not None:
            self.visible = self.visible[indices.cpu()]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        batch = len(self.rows) or (len(self.prompt.like) if self.prompt else 0)
        self.batch_select_indices(torch.arange(batch).repeat_interleave(repeats))


def link(layers: Sequence[Any]) -> None:
    """Layers with prompts in host memory: each fetches the next one's while it computes, the last
    one the first's, for the next part."""
    on_host = [layer for layer in layers if isinstance(layer, BatchLayer) and layer.on_host]
    for layer, following in itertools.pairwise(on_host + on_host[:1]):
        layer.following = ref(following)


def full_attention_layers(config: PreTrainedConfig) -> list[int]:
    """Layers that attend to all tokens: not sliding ones, nor those of other kinds."""
    layers = DynamicCache(config=config).layers
    return [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]


def _visible(mask: Tensor) -> Tensor:
    """bool [batch, tokens] from a mask [batch, 1, 1, tokens] of bools, or of 0 and -inf."""
    row = mask[:, 0, -1]
    return row if row.dtype == torch.bool else row == 0
