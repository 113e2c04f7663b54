"""Attention in recorded steps: what of it is in the graphs, and what every step does beside them.

Graphs hold addresses, and those of windows and far contexts change from step to step. Kernels in
graphs therefore look them up in a table on the device, which has a line for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from magicpig import trace
from magicpig.attention import exchange_on_gpu, whole_on_gpu, window_on_gpu
from magicpig.attention.full import Full
from magicpig.attention.tensor_method import spend_on_step
from magicpig.attention.whole import spend_on_all
from magicpig.config import draws_on_gpus
from magicpig.kv.base import SequenceLayer
from magicpig.kv.device_scan import LayerScan
from magicpig.kv.hybrid_layer import HybridLayer, attend_far, count_windows
from magicpig.kv.seats import Seats, Sitter, together
from magicpig.kv.sequence import step
from magicpig.kv.tensor_layer import TensorLayer
from magicpig.kv.tray import Drawn

if TYPE_CHECKING:
    from magicpig.engine.graphs import StepGraphs


class Attention:
    """Of one layer: done as it is in other steps, between graphs."""

    def __init__(self, graphs: StepGraphs, number: int, like: SequenceLayer) -> None:
        self.graphs, self.number = graphs, number

    def record_dense(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """`record`, of tensors as models give them."""
        tensors = queries.contiguous(), keys.contiguous(), values.contiguous()
        return self.record(*tensors, scale, softcap)

    def record(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """Its part in the graphs; called once, while the model is recorded.

        queries: [batch, heads, dim]; keys, values: [batch, kv_heads, dim]; all contiguous. Returns
        the output.
        """
        self._tensors, self._scoring = (queries, keys, values), (scale, softcap)
        self.graphs.cut(self)
        self._out = torch.empty_like(queries)
        return self._out

    def prepare(self, layers: Sequence[Any]) -> None:
        """Before a step: what its kernels will look up."""

    def between(self, layers: Sequence[Any]) -> float | None:
        """In a step: what the CPU does where `record` cut the graphs, or asked to be served.

        Returns the seconds that the device has to wait for it; None: it is asked of the device.
        """
        with trace.device_span("attention", batch=len(layers)):
            self._out.copy_(step(layers, *self._tensors, *self._scoring))
        return None

    def finish(self, layers: Sequence[Any]) -> None:
        """After a step."""

    def let_go(self) -> None:
        """After a step that failed, of what belongs to its sequences."""


class SeatedAttention(Attention):
    """Over windows where they are, by the table's line; none of it between graphs."""

    span: int | None = None

    def __init__(self, graphs: StepGraphs, number: int, like: SequenceLayer) -> None:
        super().__init__(graphs, number, like)
        self.span, self.shape = like.span, like.shape
        self.line, self._host_line = graphs.line(number)
        self._known: tuple[int, ...] = ()
        self._seats: Seats | None = None

    def sitters(self, layers: Sequence[Any]) -> list[Sitter]:
        return [layer.window for layer in layers]

    def far_places(self, layers: Sequence[Any]) -> tuple[int, ...]:
        """For the table: where far contexts are that the kernels read."""
        return ()

    def prepare(self, layers: Sequence[Any]) -> None:
        seats: Seats = together(self.sitters(layers))
        seats.make_room()
        known = seats.place + self.far_places(layers)
        if known != self._known:
            self._known = known
            self._host_line[: len(known)] = known
            self.graphs.has_news = True
        self._seats = seats

    def _near(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Records attention to windows."""
        near = (
            torch.empty_like(queries, dtype=torch.float32),
            torch.empty(queries.shape[:2], device=queries.device),
        )
        new = keys.to(self.shape.dtype), values.to(self.shape.dtype)
        window_on_gpu.step(queries, *new, self.line, scale, softcap, self.span, near)
        return near

    def record(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        near = self._near(queries, keys, values, scale, softcap)
        return exchange_on_gpu.answer(queries, near, None, self.line)

    def advance(self) -> None:
        """The step's token is in the windows, which are not needed any more."""
        if self._seats is not None:
            self._seats.advance(there=True)
        self._seats = None

    def finish(self, layers: Sequence[Any]) -> None:
        self.advance()
        count_windows(layers)

    def let_go(self) -> None:
        self._seats = None


class WholeAttention(SeatedAttention):
    """Over all rows, on the device."""

    def sitters(self, layers: Sequence[TensorLayer]) -> list[Sitter]:
        return list(layers)

    def far_places(self, layers: Sequence[TensorLayer]) -> tuple[int, ...]:
        return tuple(number for layer in layers for number in layer.far.place)

    def record(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        near = self._near(queries, keys, values, scale, softcap)
        contexts = self.line[4:].view(-1, 3)
        rows = self.shape.num_kv_heads, self.shape.dtype
        far = whole_on_gpu.attend(queries, contexts, *rows, scale, softcap)
        return exchange_on_gpu.answer(queries, near, far, self.line)

    def finish(self, layers: Sequence[TensorLayer]) -> None:
        self.advance()
        spend_on_step(layers)
        spend_on_all(layers, [layer.far.num_tokens for layer in layers])
        for layer in layers:
            layer.see_window()


class ExchangedAttention(SeatedAttention):
    """Windows on the device; the far context on the CPU, in the meantime.

    The graph goes on past it: a kernel waits for the CPU's word.
    """

    def __init__(self, graphs: StepGraphs, number: int, like: HybridLayer) -> None:
        super().__init__(graphs, number, like)
        self.tray = graphs.tray_for(like)

    def record(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        self._scoring = scale, softcap
        self.tray.ask(queries)
        self._draw(queries, scale)
        self.tray.sent(self.graphs.stamps("model"))
        self.graphs.serve(self)
        self.tray.near = self._near(queries, keys, values, scale, softcap)
        self.tray.await_answer(self.graphs.stamps("window", None))
        return self.tray.answer(queries, self.line)

    def between(self, layers: Sequence[HybridLayer]) -> float:
        self.advance()  # by the time that it is told
        return attend_far(layers, self.tray, *self._scoring, self._drawn())

    def _draw(self, queries: Tensor, scale: float) -> None:
        """Records the drawing of rows, where the device does that."""

    def _drawn(self) -> Drawn | None:
        return None

    def finish(self, layers: Sequence[HybridLayer]) -> None:
        pass


class ScannedAttention(ExchangedAttention):
    """The same, with codes on the device, which draws by them."""

    def __init__(self, graphs: StepGraphs, number: int, like: HybridLayer) -> None:
        super().__init__(graphs, number, like)
        self.scan = LayerScan(graphs.scan_for(like))

    def prepare(self, layers: Sequence[HybridLayer]) -> None:
        super().prepare(layers)
        self.scan.prepare([layer.codes_there for layer in layers])

    def _draw(self, queries: Tensor, scale: float) -> None:
        self.scan.draw(queries, scale)

    def _drawn(self) -> Drawn | None:
        return self.scan.drawn


def attention_of(graphs: StepGraphs, number: int, like: SequenceLayer) -> Attention:
    if isinstance(like, HybridLayer):
        if like.span:
            return SeatedAttention(graphs, number, like)
        kind = ScannedAttention if draws_on_gpus(like.far.index) else ExchangedAttention
        return kind(graphs, number, like)
    if isinstance(like, TensorLayer) and isinstance(like.method, Full):
        return WholeAttention(graphs, number, like)
    return Attention(graphs, number, like)
