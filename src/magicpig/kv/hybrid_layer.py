"""HybridLayer: the window where the model computes, the far context in CPU memory.

A step appends to the window and attends to it on the device, while the native core attends to the
far context; both parts merge on the device. Only queries and their hashes leave it, and partial
results come back.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from magicpig import _native, trace
from magicpig.attention.gpu import has_triton
from magicpig.attention.scoring import Scoring, attend_to_all
from magicpig.config import IndexConfig, LSHConfig, WindowConfig
from magicpig.kv.base import LayerShape
from magicpig.kv.device_window import DeviceWindow
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.seats import Seats, together
from magicpig.kv.tray import Tray, tray_for

_turn = threading.Lock()  # two halves of a batch do not share the cores, they take turns


class HybridLayer(NativeLayer):
    """As NativeLayer, for models on other devices than the CPU."""

    window: DeviceWindow  # type: ignore[assignment]

    def _new_window(self) -> DeviceWindow:
        return DeviceWindow(self.shape)

    def extend(self, keys: Tensor, values: Tensor, mass: Tensor | None = None) -> None:
        if isinstance(self.far.index, LSHConfig):  # the device hashes much faster
            keys, values = keys.to(self.shape.device), values.to(self.shape.device)
        super().extend(keys, values, mass)

    @classmethod
    def step(  # type: ignore[override]
        cls,
        layers: Sequence[HybridLayer],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        with torch.inference_mode():
            first = layers[0]
            tray = tray_for(len(layers), first.shape, first.far.index)
            queries = queries.contiguous()
            if first.span:
                _attend_near(layers, tray, queries, keys, values, Scoring(scale, softcap))
                out = tray.near[0]
            else:
                tray.ask(queries)
                cls.exchange(layers, tray, queries, keys, values, scale, softcap)
                out = tray.answer(queries)
        return torch.empty_like(queries, requires_grad=False).copy_(out)  # in the caller's mode

    @classmethod
    def exchange(
        cls,
        layers: Sequence[HybridLayer],
        tray: Tray,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        softcap: float | None,
    ) -> None:
        """What a step does between asking and the answer: near and far attention."""
        tray.sent()
        _attend_near(layers, tray, queries, keys, values, Scoring(scale, softcap))
        with trace.span("wait for queries"):
            tray.wait()
        _attend_far(layers, tray, scale, softcap)


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
    with trace.device_span("window", batch=len(layers)):
        if has_triton(queries):
            from magicpig.attention import window_on_gpu

            seats.make_room()
            window_on_gpu.step(
                queries,
                keys,
                values,
                seats.keys,
                seats.values,
                seats.there,
                scoring.scale,
                scoring.softcap,
                span,
                tray.near,
            )
            seats.advance()
        else:
            _attend_near_in_torch(seats, span, tray, queries, keys, values, scoring)
    if span:
        for layer in layers:
            layer.window.count(0, 0, 0)


def _attend_near_in_torch(
    seats: Seats,
    span: int | None,
    tray: Tray,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scoring: Scoring,
) -> None:
    seats.append(keys.to(seats.keys), values.to(seats.keys))
    all_keys, all_values, hidden = seats.tokens
    if span and max(seats.lengths) > span:
        old = torch.arange(all_keys.shape[2], device=keys.device) < seats.there[:, None] - span
        hidden = old[:, None] if hidden is None else hidden | old[:, None]
    found = attend_to_all(queries.float(), all_keys, all_values, scoring, hidden)
    for mine, part in zip(tray.near, found, strict=True):
        mine.copy_(part)


def _attend_far(
    layers: Sequence[HybridLayer], tray: Tray, scale: float, softcap: float | None
) -> None:
    """Output and log-sum-exp over the far contexts, of what was asked."""
    with _turn, trace.span("far context", batch=len(layers)):
        draw, drawn, whole, tokens = _native.attend(
            [layer.far._native for layer in layers],
            tray.asked,
            scale,
            softcap or 0.0,
            False,
            tray.out,
            tray.lse,
            tray.rows,
            tray.visited,
            tray.predicted,
            tray.signs,
        )
    layers[0].window.spend((draw, drawn, whole))
    rows, visited = tray.rows.sum(1).tolist(), tray.visited.sum(1).tolist()
    for layer, *count in zip(layers, rows, visited, tokens, strict=True):
        layer.window.count(*count)


def new_layer(
    shape: LayerShape, index: IndexConfig | None, window: WindowConfig, span: int | None = None
) -> NativeLayer:
    """A layer whose far context the native core keeps, for the device that the model is on."""
    kind = NativeLayer if shape.device.type == "cpu" else HybridLayer
    return kind(shape, index, window, span)
