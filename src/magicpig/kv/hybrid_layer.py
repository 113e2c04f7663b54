"""HybridLayer: the window where the model computes, the far context in CPU memory.

A step appends to the window and attends to it on the device, while the native core attends to the
far context; both parts merge on the device. Only queries leave it, and partial results come back.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from magicpig import _native, trace
from magicpig.attention.gpu import has_triton
from magicpig.attention.merge import merge
from magicpig.attention.scoring import Scoring, attend_to_all
from magicpig.config import IndexConfig, LSHConfig, WindowConfig
from magicpig.kv.base import LayerShape
from magicpig.kv.device_index import MAX_NORM
from magicpig.kv.device_window import DeviceWindow
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.seats import Seats, together

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
            asked = _Sent(queries)
            seats = together([layer.window for layer in layers])
            with trace.device_span("window", batch=len(layers)):
                scoring = Scoring(scale, softcap)
                near = _windows(seats, queries, keys, values, scoring, layers[0].span)
            far = _attend_far(layers, asked, scale, softcap)
            out = near[0] if far is None else _merged(near, far, queries.dtype)
        return torch.empty_like(queries, requires_grad=False).copy_(out)  # in the caller's mode


class _Sent:
    """A tensor on its way to the CPU; the device works on meanwhile."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._tensor = tensor.cpu().contiguous()

    def arrived(self) -> Tensor:
        if self._event:
            self._event.synchronize()
        return self._tensor


State = tuple[Tensor, Tensor]  # output [batch, heads, dim] and log-sum-exp [batch, heads]


def _windows(
    seats: Seats,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scoring: Scoring,
    span: int | None,
) -> State:
    """A token more in each window, and attention to them, or to the newest `span` of each."""
    if has_triton(queries):
        from magicpig.attention import window_on_gpu

        seats.make_room()
        windows = seats.keys, seats.values, seats.there
        scale, softcap = scoring.scale, scoring.softcap
        near = window_on_gpu.step(queries, keys, values, *windows, scale, softcap, span)
        seats.advance()
        return near
    seats.append(keys.to(seats.keys), values.to(seats.keys))
    all_keys, all_values, hidden = seats.tokens
    if span and max(seats.lengths) > span:
        old = torch.arange(all_keys.shape[2], device=keys.device) < seats.there[:, None] - span
        hidden = old[:, None] if hidden is None else hidden | old[:, None]
    return attend_to_all(queries.float(), all_keys, all_values, scoring, hidden)


def _merged(near: State, far: State, dtype: torch.dtype) -> Tensor:
    if not has_triton(near[0]):
        return merge(*near, *far)[0]
    from magicpig.attention import window_on_gpu

    return window_on_gpu.merge_into(near, far, dtype)


def _attend_far(
    layers: Sequence[HybridLayer], asked: _Sent, scale: float, softcap: float | None
) -> State | None:
    """Output and log-sum-exp over the far contexts, on the device; None where there are none."""
    device = layers[0].shape.device
    if not any(layer.far.num_tokens for layer in layers):
        for layer in layers:
            layer.window.count(0, 0, 0)
        return None
    with trace.span("wait for queries"):
        queries = asked.arrived()
    bad = ~(queries.float().norm(dim=-1) <= MAX_NORM).all(1)  # the others go on without it
    if bad.any():
        queries = queries.masked_fill(bad[:, None, None], 0.0)
    pinned = device.type == "cuda"
    out = torch.empty(queries.shape, dtype=torch.float32, pin_memory=pinned)
    lse = torch.empty(queries.shape[:2], dtype=torch.float32, pin_memory=pinned)
    rows, visited = torch.zeros(2, *queries.shape[:2], dtype=torch.int64)
    far = [layer.far._native for layer in layers]
    with _turn, trace.span("far context", batch=len(layers)):
        draw, drawn, whole, tokens = _native.attend(
            far, queries, scale, softcap or 0.0, False, out, lse, rows, visited, lse.clone()
        )
    out[bad] = torch.nan
    layers[0].window.spend((draw, drawn, whole))
    counts = zip(layers, rows.sum(1).tolist(), visited.sum(1).tolist(), tokens, strict=True)
    for layer, *count in counts:
        layer.window.count(*count)
    return out.to(device, non_blocking=True), lse.to(device, non_blocking=True)


def new_layer(
    shape: LayerShape, index: IndexConfig | None, window: WindowConfig, span: int | None = None
) -> NativeLayer:
    """A layer whose far context the native core keeps, for the device that the model is on."""
    kind = NativeLayer if shape.device.type == "cpu" else HybridLayer
    return kind(shape, index, window, span)
