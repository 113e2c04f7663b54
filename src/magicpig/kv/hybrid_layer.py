"""HybridLayer: the window where the model computes, the far context in CPU memory.

A step appends to the window and attends to it on the device, while the native core attends to the
far context; both parts merge on the device. Queries and their hashes leave it, or rows that
it has drawn, and partial results come back.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from magicpig import trace
from magicpig.attention.gpu import has_triton
from magicpig.attention.scoring import Scoring, attend_to_all
from magicpig.config import IndexConfig, WindowConfig
from magicpig.kv.base import LayerShape
from magicpig.kv.courier import Errand, beside
from magicpig.kv.device_index import GrowingSegment, append_from
from magicpig.kv.device_window import DeviceWindow
from magicpig.kv.host_prompt import HostPrompt, State
from magicpig.kv.layer import LayerKV
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.seats import together
from magicpig.kv.segments import BUILT_AT_ONCE, early_segment
from magicpig.kv.tray import Drawn, Tray, tray_for

if TYPE_CHECKING:
    from magicpig.kv.device_scan import DeviceCodes, LayerScan


class HybridLayer(NativeLayer):
    """As NativeLayer, for models on other devices than the CPU."""

    window: DeviceWindow  # type: ignore[assignment]
    _codes: DeviceCodes | None = None
    _growing: GrowingSegment | None = None
    num_early = 0  # tokens of the prompt that is read, which were made far early, or will be
    _early: Sequence[Future[None]] = ()  # what makes them so, and has not ended as far as is known

    @property
    def codes_there(self) -> DeviceCodes:
        """The far context's, on the device."""
        from magicpig.kv.device_scan import DeviceCodes  # which needs Triton

        if self._codes is None or self._codes.far is not self.far:
            self._codes = DeviceCodes(self.far, self.shape.device)
        return self._codes

    def _new_window(self) -> DeviceWindow:
        return DeviceWindow(self.shape)

    def build_early(self, prompt: HostPrompt, expected: int) -> None:
        """Begins to make tokens far of a prompt that is being read, those that have come.
        `finish_early` waits for it. What went wrong before is told.

        expected: tokens that the prompt will have.
        """
        self._hear(wait=False)
        sinks, far = self.config.sinks, expected - self.config.sinks - self.config.local
        there = min(prompt.num_tokens - sinks, far)
        while self.num_early < there:
            segment = early_segment(self.num_early, far, self.far.index)
            if segment is None:
                return
            first, last = segment
            if self.num_early == first:
                self._growing = GrowingSegment(self.far, last - first)
            assert self._growing
            end = min(there, last)
            if end == last:
                self._growing.hash_ahead(prompt.keys_there(sinks + first, sinks + end))
            tokens = prompt.part(sinks + self.num_early, sinks + end)
            before = self._early[-1] if self._early else None
            work = partial(_build, weakref.ref(self), self._growing, tokens, end == last, before)
            self._early = [*self._early, _builder(os.getpid()).submit(work)]
            self.num_early = end

    def _hear(self, wait: bool) -> None:
        """Of what was begun early, and has ended by now: raises what went wrong. wait: of all."""
        jobs, self._early = list(self._early), ()
        try:
            while jobs and (wait or jobs[0].done()):
                jobs.pop(0).result()
            self._early = jobs
        finally:
            jobs = []  # what they may raise holds this frame

    def finish_early(self, prompt: HostPrompt) -> None:
        """When all of it is read: with the tokens that were not made far early."""
        self._hear(wait=True)
        self.num_early, self._growing = 0, None
        sinks, far, end = self.config.sinks, self.far.num_tokens, prompt.num_tokens
        if not far:
            return self.extend(*prompt.here(0, end))
        first = sinks + far
        last = min(first + self.config.local, end)
        parts = [prompt.there(*part) for part in ((0, sinks), (first, last)) if part[0] < part[1]]
        if parts:  # to a new window, once
            self._append(*(torch.cat(tensors, 1) for tensors in zip(*parts, strict=True)))
        if last < end:
            self.extend(*prompt.here(last, end))

    def _append_far(self, far: LayerKV, keys: Tensor, values: Tensor) -> None:
        append_from(self.shape.device, far, keys, values)

    @classmethod
    def step(  # type: ignore[override]
        cls,
        layers: Sequence[HybridLayer],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        softcap: float | None,
        scan: LayerScan | None = None,
    ) -> Tensor:
        """scan: by which the device draws; None: the native core does."""
        with torch.inference_mode():
            first, queries = layers[0], queries.contiguous()
            tray = tray_for(len(layers), first.shape, first.far.index)
            if not first.span:
                tray.begin()
                tray.ask(queries)
                if scan:
                    scan.prepare([layer.codes_there for layer in layers])
                    scan.draw(queries, scale)
                tray.sent()
            _attend_near(layers, tray, queries, keys, values, Scoring(scale, softcap))
            if first.span:
                out = tray.near[0]
                count_windows(layers)
            else:
                attend_far(layers, tray, scale, softcap, scan.drawn if scan else None)
                out = tray.answer(queries)
        return torch.empty_like(queries, requires_grad=False).copy_(out)  # in the caller's mode


@cache
def _builder(process_id: int) -> ThreadPoolExecutor:
    """A device hashes keys of one layer while the native core makes tables of another's."""
    return ThreadPoolExecutor(BUILT_AT_ONCE, thread_name_prefix="magicpig-early")


def _build(
    known: weakref.ref[HybridLayer],
    growing: GrowingSegment,
    tokens: tuple[Sequence[State], Errand | None],
    is_last: bool,
    before: Future[None] | None,
) -> None:
    """Adds tokens to a layer's segment, if that is still wanted.

    is_last: whether it is full then. before: what has to be done first.
    """
    layer = None
    try:
        if before:
            before.result()
        layer = known()
        if layer is None:
            return
        stretches, copies = tokens
        if copies:
            copies.before_host()
        device, count = layer.shape.device, sum(keys.shape[1] for keys, _ in stretches)
        with torch.inference_mode(), beside(device), trace.span("segment", tokens=count):
            for keys, values in stretches:
                growing.add(keys, values)
            if is_last:
                growing.finish_from(device)
    finally:
        layer = before = None  # what may be raised holds this frame, and they what is raised


def _attend_near(
    layers: Sequence[HybridLayer],
    tray: Tray,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scoring: Scoring,
) -> None:
    """A token more in each window, and attention to them, or to the newest `span` of each."""
    seats, span = together([layer.window for layer in layers]), layers[0].span
    new = keys.to(seats.keys), values.to(seats.keys)
    with trace.device_span("window", batch=len(layers)):
        if has_triton(queries):
            from magicpig.attention import window_on_gpu

            seats.make_room()
            place, scale, softcap = seats.place_there, scoring.scale, scoring.softcap
            window_on_gpu.step(queries, *new, place, scale, softcap, span, tray.near)
            seats.advance()
            return
        seats.append(*new)
        all_keys, all_values, hidden = seats.tokens
        if span and max(seats.lengths) > span:
            old = torch.arange(all_keys.shape[2], device=keys.device) < seats.there[:, None] - span
            hidden = old[:, None] if hidden is None else hidden | old[:, None]
        found = attend_to_all(queries.float(), all_keys, all_values, scoring, hidden)
        for mine, part in zip(tray.near, found, strict=True):
            mine.copy_(part)


def attend_far(
    layers: Sequence[HybridLayer],
    tray: Tray,
    scale: float,
    softcap: float | None,
    drawn: Drawn | None = None,
) -> float:
    """Attention over the far contexts, of what was asked, as soon as it is: fills the tray.

    drawn: rows that the device has drawn; None: the native core draws.
    Returns the seconds that it took, once it was asked.
    """
    begin = time.perf_counter()
    contexts = [layer.far._native for layer in layers]
    served = tray.serve(contexts, scale, softcap, drawn)
    end = time.perf_counter()
    trace.past_span("wait for queries", begin, end - served.took)
    trace.past_span("far context", end - served.took, end, batch=len(layers))
    layers[0].window.spend(served.spent)
    counts = tray.rows.sum(1).tolist(), tray.visited.sum(1).tolist(), served.tokens
    for layer, *own in zip(layers, *counts, strict=True):
        layer.window.count(*own)
    return served.took


def count_windows(layers: Sequence[HybridLayer]) -> None:
    """A step that read nothing but windows."""
    for layer in layers:
        layer.window.count(0, 0, 0)


def new_layer(
    shape: LayerShape, index: IndexConfig | None, window: WindowConfig, span: int | None = None
) -> NativeLayer:
    """A layer whose far context the native core keeps, for the device that the model is on."""
    kind = NativeLayer if shape.device.type == "cpu" else HybridLayer
    return kind(shape, index, window, span)
