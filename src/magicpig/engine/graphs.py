"""Graphs: decode steps as CUDA graphs, one for each stretch of the model between attention calls.

Launched one by one, the kernels of a step cost the CPU more time than the GPU. A graph launches a
stretch at once. Attention stays outside: it is over other tensors in every step, and in part on
the CPU. Whatever lies between two calls of it, of any model, is recorded as it runs.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from magicpig import trace
from magicpig.hf.cache import TaggedLayer, begin_pass
from magicpig.kv.base import SequenceLayer
from magicpig.kv.hybrid_layer import HybridLayer
from magicpig.kv.sequence import SequenceKV, step
from magicpig.kv.tray import Tray

MOST_KEPT = 8  # sizes of batches with graphs
FIRST_STEPS = 1  # of a batch's size that are not recorded: most sizes are not seen again


@dataclass
class Call:
    """One call of attention in a step, and the tensors that it is over in every step.

    tray: of layers whose queries go to the CPU.
    out: where the next graph expects the result, of other layers.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    softcap: float | None
    tray: Tray | None = None
    out: Tensor | None = None

    def attend(self, rows: list[Any]) -> None:
        tensors = self.queries, self.keys, self.values
        if self.tray is not None:
            HybridLayer.exchange(rows, self.tray, *tensors, self.scale, self.softcap)
        elif self.out is not None:
            self.out.copy_(step(rows, *tensors, self.scale, self.softcap))


class StepGraphs:
    """A step of so many sequences, whose layers are like those of the given ones."""

    def __init__(
        self, model: PreTrainedModel, kvs: Sequence[SequenceKV], stream: torch.cuda.Stream
    ) -> None:
        device, batch = model.device, len(kvs)
        self.calls: list[Call] = []
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._trays: dict[object, Tray] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._sent = torch.zeros(2, batch, 1, dtype=torch.int64, pin_memory=True)
        self._ids = torch.zeros(2, batch, 1, dtype=torch.int64, device=device)  # and positions
        layers: list[Any] = [
            _RecordedLayer(self, i, layer) for i, layer in enumerate(kvs[0].layers)
        ]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._begin()
            try:
                begin_pass()
                out = model(
                    input_ids=self._ids[0],
                    position_ids=self._ids[1],
                    past_key_values=Cache(layers),
                    use_cache=True,
                    logits_to_keep=1,
                )
                self._logits: Tensor = out.logits[:, -1].contiguous()
            finally:
                self._graphs[-1].capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        self._graphs.append(graph)

    def cut(self, call: Call, like: SequenceLayer) -> Tensor:
        """Ends a graph at a call of attention and begins the next with its result."""
        if isinstance(like, HybridLayer) and not like.span:
            call.tray = self._tray_for(like)
            call.tray.ask(call.queries)
        self.calls.append(call)
        self._graphs[-1].capture_end()
        self._begin()
        if call.tray is not None:
            return call.tray.answer(call.queries)
        call.out = torch.empty_like(call.queries)
        return call.out

    def _tray_for(self, like: HybridLayer) -> Tray:
        if like.kind not in self._trays:
            self._trays[like.kind] = Tray(len(self._ids[0]), like.shape, like.far.index)
        return self._trays[like.kind]

    def run(self, kvs: Sequence[SequenceKV], token_ids: Sequence[int]) -> Tensor:
        """Logits [batch, vocab]."""
        for i, (kv, token) in enumerate(zip(kvs, token_ids, strict=True)):
            self._sent[0, i, 0], self._sent[1, i, 0] = token, kv.num_tokens
        self._ids.copy_(self._sent, non_blocking=True)
        for graph, call in zip(self._graphs, self.calls, strict=False):
            with trace.device_span("model"):
                graph.replay()
            call.attend([kv.layers[call.layer] for kv in kvs])
        with trace.device_span("model"):
            self._graphs[-1].replay()
        return self._logits.clone()


class _RecordedLayer(TaggedLayer):
    """Stands for a layer of a batch while a step is recorded."""

    def __init__(self, graphs: StepGraphs, number: int, like: SequenceLayer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graphs, self.number, self.like = graphs, number, like
        self.is_sliding = like.span is not None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self.give(key_states, value_states)

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        query, key, value = (x.squeeze(2).contiguous() for x in (queries, keys, values))
        call = Call(self.number, query, key, value, scale, softcap)
        return self.graphs.cut(call, self.like).unsqueeze(1)

    def get_seq_length(self) -> int:
        return self.like.num_tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class Graphs:
    """Of the sizes of batches that come again, for one stream of steps at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._stream: Any = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
        self._seen: dict[object, int] = {}
        self._kept: dict[object, StepGraphs] = {}
        self._possible = True

    @torch.inference_mode()
    def prepared(self, kvs: Sequence[SequenceKV]) -> StepGraphs | None:
        """The graphs for such a batch, recorded now if it is time; None: do without."""
        kinds = tuple(layer.kind for layer in kvs[0].layers if isinstance(layer, SequenceLayer))
        if not self._possible or any(_kinds(kv) != kinds for kv in kvs):
            return None
        key = len(kvs), kinds
        if key in self._kept:
            return self._kept[key]
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= FIRST_STEPS:
            return None
        while len(self._kept) >= MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        gc.collect()  # what is freed while graphs are recorded may break them
        try:
            self._kept[key] = StepGraphs(self.model, kvs, self._stream)
        except RuntimeError as error:
            self._possible = False
            warnings.warn(
                f"decode steps of {type(self.model).__name__} cannot be recorded as CUDA graphs "
                f"({str(error).splitlines()[0]}): their kernels are launched one by one, which is "
                "slower",
                stacklevel=2,
            )
            return None
        return self._kept[key]


def _kinds(kv: SequenceKV) -> tuple[object, ...]:
    return tuple(layer.kind for layer in kv.layers if isinstance(layer, SequenceLayer))
