"""Graphs: decode steps as CUDA graphs.

Launched one by one, the kernels of a step cost the CPU more time than the GPU. A graph launches a
whole step of any model at once, as it ran when it was recorded; recorded.py has the attention.
Where the CPU attends to far contexts, the GPU waits for it in the graph. Attention of other kinds,
whose kernels cannot be recorded, cuts the step into several graphs.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from magicpig import trace
from magicpig.attention.exchange_on_gpu import write_stamp
from magicpig.attention.gpu import is_out_of_memory, leave_pool
from magicpig.config import draws_on_gpus
from magicpig.engine.recorded import Attention, attention_of
from magicpig.hf.tagged import DecodeLayer, forget_pass
from magicpig.kv.courier import own_stream
from magicpig.kv.device_scan import DeviceScan, with_room
from magicpig.kv.hybrid_layer import HybridLayer
from magicpig.kv.sequence import SequenceKV
from magicpig.kv.tray import Tray
from magicpig.models.quiet import without_collections

MOST_KEPT = 8  # sizes of batches with graphs
FIRST_STEPS = 1  # of a batch's size that are not recorded: most sizes are not seen again


class StepGraphs:
    """A step of so many sequences, whose layers are like those of the given ones."""

    def __init__(
        self,
        model: PreTrainedModel,
        kvs: Sequence[SequenceKV],
        stream: torch.cuda.Stream,
        pool: Any,
    ) -> None:
        device, self.batch = model.device, len(kvs)
        self._stretches: list[tuple[torch.cuda.CUDAGraph, list[Attention]]] = []
        self._recording: torch.cuda.CUDAGraph | None = None
        self._served: list[Attention] = []  # while the graph runs that is being recorded
        self._stamps = torch.zeros(4 * len(kvs[0].layers) + 2, dtype=torch.int64, device=device)
        self._spans: list[str | None] = []  # what the GPU does before each stamp
        self._trays: dict[object, Tray] = {}
        self._scans: dict[object, DeviceScan] = {}
        self.tokens = with_room(max(kv.num_tokens for kv in kvs))
        self._pool = pool
        self._sent = torch.zeros(2, self.batch, 1, dtype=torch.int64, pin_memory=True)
        self._ids = torch.zeros(2, self.batch, 1, dtype=torch.int64, device=device)
        lines = len(kvs[0].layers), 4 + 3 * self.batch
        self._host_table = torch.zeros(lines, dtype=torch.int64, pin_memory=True)
        self._table = torch.zeros(lines, dtype=torch.int64, device=device)
        self.has_news = False  # in the host's table
        self._copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._runs = False
        self._columns: list[Any] = []  # of a step's sequences, their layers
        self.cpu_share: float | None = None  # of the last step; None: the CPU had none
        self.attentions = [attention_of(self, i, like) for i, like in enumerate(kvs[0].layers)]
        layers: list[Any] = [
            DecodeLayer(attention.record_dense, like.num_tokens, like.span)
            for attention, like in zip(self.attentions, kvs[0].layers, strict=True)
        ]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            try:
                self._begin()
                forget_pass()
                out = model(
                    input_ids=self._ids[0],
                    position_ids=self._ids[1],
                    past_key_values=Cache(layers),
                    use_cache=True,
                    logits_to_keep=1,
                )
                self._logits: Tensor = out.logits[:, -1].contiguous()
                self._close()
            except BaseException:
                forget_pass()
                if self._recording is not None:
                    try:
                        self._end()
                    except RuntimeError:  # the first error tells
                        leave_pool(device, pool)
                raise
        torch.cuda.current_stream(device).wait_stream(stream)

    def _begin(self) -> None:
        self._recording = torch.cuda.CUDAGraph()
        self._recording.capture_begin(self._pool, capture_error_mode="thread_local")
        write_stamp(self.stamps(None))

    def _end(self) -> torch.cuda.CUDAGraph:
        graph, self._recording = self._recording, None
        assert graph
        graph.capture_end()
        return graph

    def _close(self) -> None:
        write_stamp(self.stamps("model"))
        self._stretches.append((self._end(), self._served))
        self._served = []

    def cut(self, attention: Attention) -> None:
        """Ends a graph and begins the next; it is the attention's turn in between."""
        self.serve(attention)
        self._close()
        self._begin()

    def serve(self, attention: Attention) -> None:
        """It is the attention's turn while this graph runs, after those before it."""
        self._served.append(attention)

    def stamps(self, *spans: str | None) -> Tensor:
        """Where the next kernel is to write when it runs, [spans], for traces.

        spans: what the GPU has been doing since the stamp before; None: nothing.
        """
        first = len(self._spans)
        self._spans += spans
        return self._stamps[first : len(self._spans)]

    def line(self, number: int) -> tuple[Tensor, Any]:
        """A layer's line of the table: on the device, and the host's as an array."""
        return self._table[number], self._host_table[number].numpy()

    def tray_for(self, like: HybridLayer) -> Tray:
        """Layers of a kind share one."""
        if like.kind not in self._trays:
            self._trays[like.kind] = Tray(self.batch, like.shape, like.far.index)
        return self._trays[like.kind]

    def scan_for(self, like: HybridLayer) -> DeviceScan:
        """Layers of a kind share one."""
        index = like.far.index
        if like.kind not in self._scans and draws_on_gpus(index):
            self._scans[like.kind] = DeviceScan(self.batch, like.shape, index, self.tokens)
        return self._scans[like.kind]

    def prepare(self, kvs: Sequence[SequenceKV], token_ids: Sequence[int]) -> None:
        """What the next step needs on the device, in the current stream."""
        if self._runs:  # the last one did not come to its end
            for tray in self._trays.values():
                tray.forget()
        self._runs = True
        self._copied.synchronize()  # of the last step, whose memory is written now
        self._columns = list(zip(*(kv.layers for kv in kvs), strict=True))
        for attention, layers in zip(self.attentions, self._columns, strict=True):
            attention.prepare(layers)
        if self.has_news:
            self._table.copy_(self._host_table, non_blocking=True)
            self.has_news = False
        self._sent[0, :, 0] = torch.tensor(token_ids)
        self._sent[1, :, 0] = torch.tensor([kv.num_tokens for kv in kvs])
        self._ids.copy_(self._sent, non_blocking=True)
        self._copied.record()

    def run(self) -> Tensor:
        """The step that was prepared; logits [batch, vocab]."""
        begin, awaited = time.perf_counter(), list[float | None]()
        try:
            for graph, served in self._stretches:
                graph.replay()
                awaited += [each.between(self._columns[each.number]) for each in served]
        except BaseException:
            for tray in self._trays.values():
                tray.give_up()
            self.let_go()
            raise
        seconds = [each for each in awaited if each is not None]
        took = time.perf_counter() - begin
        self.cpu_share = sum(seconds) / took if seconds else None
        trace.device_stamps(self._stamps, self._spans)
        for attention, layers in zip(self.attentions, self._columns, strict=True):
            attention.finish(layers)
        self._columns, self._runs = [], False
        return self._logits.clone()

    def let_go(self) -> None:
        """Of the sequences of a step that did not come to its end: so do they."""
        self._columns = []
        for attention in self.attentions:
            attention.let_go()


class Graphs:
    """Of the sizes of batches that come again, for one stream of steps at a time.

    broken: steps of the model cannot be recorded.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.broken = False
        self._stream = own_stream(model.device)
        self._pool: Any = None  # of memory for all, as one runs at a time
        self._seen: dict[object, int] = {}
        self._kept: dict[object, StepGraphs] = {}

    def possible(self, kvs: Sequence[SequenceKV]) -> bool:
        """Whether such a batch has a graph, or may get one."""
        return not self.broken and all(kv.kinds == kvs[0].kinds for kv in kvs)

    def drop(self) -> bool:
        """All of them, for the memory that they take; whether there were any."""
        any_kept = bool(self._kept)
        self._kept.clear()
        return any_kept

    @torch.inference_mode()
    def prepared(self, kvs: Sequence[SequenceKV]) -> StepGraphs | None:
        """The graphs for such a batch, recorded now if it is time; None: do without.

        Errors that are out of memory are the caller's to mend.
        """
        key = len(kvs), kvs[0].kinds
        if not self.possible(kvs):
            return None
        kept = self._kept.pop(key, None)
        if kept and max(kv.num_tokens for kv in kvs) <= kept.tokens:
            self._kept[key] = kept  # behind those that were not used since
            return kept
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= FIRST_STEPS:
            return None
        kept = None
        while len(self._kept) >= MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        if not self._kept:  # torch does not go back to a pool that was in use before
            self._pool = torch.cuda.graph_pool_handle()
        gc.collect()  # what is freed while graphs are recorded may break them
        torch.cuda.empty_cache()  # which is not done meanwhile, however little there is
        try:
            with without_collections():
                self._kept[key] = StepGraphs(self.model, kvs, self._stream, self._pool)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.broken = True
            self._kept.clear()
            warnings.warn(
                f"decode steps of {type(self.model).__name__} cannot be recorded as CUDA graphs "
                f"({str(error).splitlines()[0]}): their kernels are launched one by one, which is "
                "slower",
                stacklevel=2,
            )
            return None
        return self._kept[key]
