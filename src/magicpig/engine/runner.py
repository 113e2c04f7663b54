"""Runner: forward passes of the model, over a part of a prompt or one token of each sequence."""

from __future__ import annotations

import copy
import gc
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from magicpig import _native, trace
from magicpig.attention.exact import torch_has_tiles
from magicpig.attention.gpu import has_triton, is_out_of_memory
from magicpig.attention.plan import Plan
from magicpig.config import WindowConfig
from magicpig.engine.halves import Halves
from magicpig.engine.longrope import LongRope
from magicpig.engine.memory import FINISHED_AT_ONCE, Needs
from magicpig.engine.pace import Pace
from magicpig.engine.prefill import Prefill, part_tokens_on
from magicpig.engine.support import (
    ROTARY_BY_LENGTH,
    check_supported,
    check_weights,
    rotary_kinds,
    take_attention,
    takes_positions,
)
from magicpig.hf.attention import ENGINE
from magicpig.hf.cache import BatchLayer, link
from magicpig.hf.tagged import DecodeLayer, forget_pass
from magicpig.kv.base import LayerShape, SequenceLayer
from magicpig.kv.courier import current, here, turns
from magicpig.kv.layer import DTYPES
from magicpig.kv.sequence import SequenceKV, step
from magicpig.models.quiet import without_collections
from magicpig.nn import pack

if TYPE_CHECKING:
    from magicpig.engine.graphs import Graphs, StepGraphs

STEPS_WITHOUT = 100  # graphs, after there was no memory for one


def _decode_layer(rows: Sequence[SequenceLayer]) -> DecodeLayer:
    longest = max(row.num_tokens for row in rows)
    return DecodeLayer(partial(step, rows), longest, rows[0].span)


def _launches_block() -> bool:
    """Whether the caller of a kernel waits for its end: graphs wait for the caller."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")


def _let_go(graphs: Sequence[StepGraphs]) -> None:
    """Of the sequences of a step that did not come to its end."""
    for each in graphs:
        each.let_go()


def needs_of(model: PreTrainedModel, plan: Plan, window: WindowConfig) -> Needs:
    """What requests of a model need; raises for models that a runner cannot take."""
    if model.config._attn_implementation == ENGINE:
        raise ValueError("this model belongs to another LLM: load it once more")
    check_weights(model)
    check_supported(model.config.get_text_config(decoder=True))
    if model.dtype not in DTYPES:
        raise ValueError(f"the model's dtype must be one of {list(DTYPES)}, not {model.dtype}")
    part_tokens = part_tokens_on(model.device.type)
    return Needs(model.config, plan, window, model.dtype, model.device, part_tokens)


class Runner:
    """model: used by this runner alone from now on; its attention is ours."""

    def __init__(self, model: PreTrainedModel, plan: Plan, window: WindowConfig) -> None:
        self.needs = needs_of(model, plan, window)
        # A packed model has no parameters that would tell.
        self.device, self.dtype = self.needs.device, self.needs.dtype
        self.part_tokens = self.needs.part_tokens
        self.rope = LongRope(model)
        model.train(False)
        take_attention(model)
        self.model = model
        with self._there():
            pack(model)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # of weights that were exchanged
        self.is_native = (
            self.device.type == "cpu" and self.dtype == torch.bfloat16 and not torch_has_tiles()
        )
        self.plan = plan
        on_cpu = self.device.type == "cpu"
        self.prompts_on_host = not on_cpu  # where the CPU keeps the far context
        self.halves = None if on_cpu or not plan.method.on_host else Halves(self.device)
        self.window = window
        config = model.config.get_text_config(decoder=True)
        kinds = [type(layer) for layer in DynamicCache(config=model.config).layers]
        # Layers of other kinds keep the model's own state, which cannot be batched afterwards; and
        # some positions and rotary embeddings depend on the longest sequence of a batch.
        self.batches = (
            takes_positions(model)
            and not ROTARY_BY_LENGTH & rotary_kinds(config)
            and all(kind in (DynamicLayer, DynamicSlidingWindowLayer) for kind in kinds)
        )
        self._paces: defaultdict[object, Pace] = defaultdict(Pace)
        self._without = 0  # steps, before graphs are tried again for which there was no memory
        self.graphs: list[Graphs] = []  # of each half; the first's serve whole batches too
        if has_triton(self.device) and self.batches and not _launches_block():
            from magicpig.engine.graphs import Graphs  # which needs Triton

            self.graphs = [Graphs(model), Graphs(model)]

    @contextmanager
    def threads(self) -> Iterator[None]:
        """For steps to be done in: torch has one thread, where all that is large runs on ours.

        Its own would spin beside them after every small operation.
        """
        before = torch.get_num_threads()
        if self.is_native:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def begin(
        self,
        prompt_ids: list[int],
        known: SequenceKV | None = None,
        watch: bool | None = None,
        early: bool = True,
        new_tokens: int = 1,
    ) -> Prefill:
        """A prompt to be read. known: its first tokens, as a sequence that is read already.

        watch: whether to sum up the attention that its tokens get; None: if the plan asks for it.
        early: whether to make far what can be while it is read; `finish_under` has no use for it.
        new_tokens: that may follow.
        """
        long_rope = self.rope.is_long(len(prompt_ids), new_tokens, known)
        if known is not None:
            layers = [
                BatchLayer.of(
                    layer, known.num_tokens, len(prompt_ids), self._on_host(i) and not layer.span
                )
                if isinstance(layer, SequenceLayer)
                else copy.deepcopy(layer)
                for i, layer in enumerate(known.layers)
            ]
            link(layers)
            return Prefill(prompt_ids, Cache(layers), known.num_tokens, self.part_tokens, long_rope)
        layers = list(DynamicCache(config=self.model.config).layers)
        for i, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                new_row = partial(self._new_row, self.plan, i, None)
                watched = self.plan.of(i).watches_prompts if watch is None else watch
                layers[i] = BatchLayer(
                    new_row,
                    expected=len(prompt_ids),
                    watch=watched,
                    on_host=self._on_host(i),
                    early=early,
                )
            elif type(layer) is DynamicSlidingWindowLayer:
                span = layer.sliding_window
                layers[i] = BatchLayer(partial(self._new_row, self.plan, i, span), span)
        link(layers)
        return Prefill(prompt_ids, Cache(layers), 0, self.part_tokens, long_rope)

    def _there(self) -> AbstractContextManager[None]:
        return current(self.device)

    def _on_host(self, layer: int) -> bool:
        return self.prompts_on_host and self.plan.of(layer).on_host

    def _new_row(self, plan: Plan, i: int, span: int | None, shape: LayerShape) -> SequenceLayer:
        return plan.new_layer(i, shape, self.window, span)

    @torch.inference_mode()
    def prefill(self, prefill: Prefill) -> Tensor:
        """Reads the next part of the prompt; logits [vocab] after its last token."""
        part = prefill.next_part
        positions = range(prefill.done, prefill.done + len(part))
        with self._there(), trace.span("prompt", tokens=len(part), done=prefill.done):
            self.rope.choose(prefill.long_rope)
            logits = self._forward([part], [list(positions)], prefill.cache)
        prefill.done += len(part)
        return logits[0]

    def finish(self, prefill: Prefill) -> SequenceKV:
        """The prompt as a sequence; few layers at a time, since they are there twice meanwhile."""
        where = here(self.device)

        def finished(layer: Any) -> Any:
            with self._there(), where(), torch.inference_mode():
                return layer.to_sequence() if isinstance(layer, BatchLayer) else layer

        layers = prefill.cache.layers
        with trace.span("make far", tokens=prefill.done):
            if any(isinstance(layer, BatchLayer) and layer.has_much_left for layer in layers):
                # A GPU hashes one layer's keys while the CPU makes tables of another's.
                with ThreadPoolExecutor(FINISHED_AT_ONCE) as pool:
                    layers = list(pool.map(finished, layers))
            else:
                layers = list(map(finished, layers))
            return SequenceKV(layers, prefill.done, prefill.long_rope)

    @torch.inference_mode()
    def finish_under(self, prefill: Prefill, plans: Sequence[Plan]) -> list[SequenceKV]:
        """The prompt as a sequence of each plan."""
        columns: list[list[Any]] = []
        with self._there():
            for i, layer in enumerate(prefill.cache.layers):
                if isinstance(layer, BatchLayer):
                    new_rows = [partial(self._new_row, plan, i, layer.span) for plan in plans]
                    columns.append(list(layer.to_sequences(new_rows)))
                else:
                    columns.append([copy.deepcopy(layer) for _ in plans])
        long_rope = prefill.long_rope
        return [
            SequenceKV(layers, prefill.done, long_rope) for layers in zip(*columns, strict=True)
        ]

    @torch.inference_mode()
    def decode(self, kvs: list[SequenceKV], token_ids: list[int]) -> Tensor:
        """One token of each sequence; logits [batch, vocab]."""
        if not self.batches and len(kvs) > 1:
            pairs = zip(kvs, token_ids, strict=True)
            return torch.cat([self.decode([kv], [token]) for kv, token in pairs])

        with self._there(), trace.span("decode", batch=len(kvs)):
            parts = self._parts(kvs)
            _native.rest_threads(self._resting(len(parts) > 1))
            recorded = self._recorded(kvs, token_ids, parts)
            if recorded is None:
                return self._run(
                    [partial(self._decode, kvs[part], token_ids[part]) for part in parts]
                )
            start = time.perf_counter()
            try:
                # Threads that serve graphs are to free none of the GPU's memory, which may wait.
                with without_collections(), turns(self.device):
                    logits = self._run([each.run for each in recorded])
            except BaseException:
                _let_go(recorded)
                raise
            took = time.perf_counter() - start
            self._pace(kvs).took(took, recorded[0].cpu_share)
            for kv in kvs:
                kv.num_tokens += 1
            return logits

    def _recorded(
        self, kvs: list[SequenceKV], token_ids: list[int], parts: list[slice]
    ) -> list[StepGraphs] | None:
        """Graphs for the parts of a batch, prepared for them; None: do without."""
        if self._without:
            self._without -= 1
            return None
        try:
            return self._prepared(kvs, token_ids, parts)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self.drop_graphs()
        self._without = STEPS_WITHOUT
        return None

    def drop_graphs(self) -> bool:
        """Recorded steps give their memory back, and are not recorded again for a while; whether
        there were any."""
        dropped = any([each.drop() for each in self.graphs])
        if dropped:
            self._without = STEPS_WITHOUT
        gc.collect()
        torch.cuda.empty_cache()
        return dropped

    def _prepared(
        self, kvs: list[SequenceKV], token_ids: list[int], parts: list[slice]
    ) -> list[StepGraphs] | None:
        """All or none: what is new to the GPU may have to wait for a graph that runs."""
        found: list[StepGraphs] = []
        try:
            for each, part in zip(self.graphs, parts, strict=False):
                one = each.prepared(kvs[part])
                found += [one] if one else []
                if each.broken:
                    self.graphs = []
                    return None
            if len(found) < len(parts):
                return None
            for one, part in zip(found, parts, strict=True):
                one.prepare(kvs[part], token_ids[part])
        except BaseException:
            _let_go(found)
            raise
        return found

    def _run(self, works: Sequence[Callable[[], Tensor]]) -> Tensor:
        return self.halves.run(*works) if self.halves and len(works) > 1 else works[0]()

    def _parts(self, kvs: list[SequenceKV]) -> list[slice]:
        """Of the batch: all of it, or two halves."""
        middle = -(-len(kvs) // 2)
        halves = [slice(0, middle), slice(middle, None)]
        if self.halves is None or len(kvs) < 2 or not self._halving_pays(kvs, halves):
            return [slice(0, None)]
        return halves

    def _halving_pays(self, kvs: list[SequenceKV], halves: list[slice]) -> bool:
        """As far as is known: steps that are recorded are timed."""
        if self._without or not self.graphs or not self.graphs[0].possible(kvs):
            return True
        pairs = zip(self.graphs, halves, strict=True)
        if not all([each.possible(kvs[half]) for each, half in pairs]):
            return False
        return self._pace(kvs).halved

    def _pace(self, kvs: list[SequenceKV]) -> Pace:
        return self._paces[len(kvs), kvs[0].kinds]

    def idle(self) -> None:
        """No sequence is left: all threads of the native core are whoever's asks for them."""
        _native.rest_threads(0)

    def _resting(self, halved: bool) -> int:
        """Threads of the native core whose cores two halves need, one of which waits for a GPU."""
        threads = 0 if self.device.type == "cpu" or not halved else _native.num_threads()
        return min(2, threads // 4)

    def _decode(self, kvs: list[SequenceKV], token_ids: list[int]) -> Tensor:
        layers: list[Any] = [
            _decode_layer(rows) if isinstance(rows[0], SequenceLayer) else rows[0]
            for rows in zip(*(kv.layers for kv in kvs), strict=True)
        ]
        self.rope.choose_for(kvs[0])  # models that ask are run one sequence at a time
        positions = [[kv.num_tokens] for kv in kvs]
        logits = self._forward([[token] for token in token_ids], positions, Cache(layers))
        for kv in kvs:
            kv.num_tokens += 1
        return logits

    def _forward(
        self, token_ids: list[list[int]], positions: list[list[int]], cache: Cache
    ) -> Tensor:
        """Logits [batch, vocab] after the last token of each row."""
        forget_pass()
        try:
            out = self.model(
                input_ids=torch.tensor(token_ids, device=self.device),
                position_ids=torch.tensor(positions, device=self.device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        except BaseException:
            forget_pass()
            raise
        return out.logits[:, -1]  # type: ignore[no-any-return]
