"""Courier: copies between a device and host memory that go on beside the device's work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial

import torch
from torch import Tensor

from magicpig import trace


class Courier:
    """For one device. On the CPU copies are made at once; there is nothing to go beside."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def stream_number(self) -> int:
        return self._stream.cuda_stream if self._stream else 0

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)

    def send(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Errand:
        """Begins to copy the first of each pair to the second, once what is asked of the device now
        is done, and behind what was sent before.

        All contiguous, one of each pair in `host_memory`. The device's are not to be let go before
        the errand's `before_device`; of copies that come to be asked for in part, before an error
        or an interrupt, they may be.
        """
        if self._stream is None:
            for source, target in copies:
                target.copy_(source)
            return Errand(None, self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._stream), trace.device_span("copies"):
                for source, target in copies:
                    target.copy_(source, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
        except BaseException:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
            raise
        return Errand(event, self.device)

    def wait(self) -> None:
        """For all that it was asked for."""
        if self._stream is not None:
            self._stream.synchronize()

    def mark(self) -> Errand:
        """That is done when the device has done what is asked of it by now."""
        event = None
        if self._stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return Errand(event, self.device)

    def fetch(self, tensors: Sequence[Tensor], host: Sequence[Tensor]) -> Errand:
        """Begins to copy tensors of the device, which the caller need not keep, to host memory."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)
        return self.send(zip(tensors, host, strict=True))


class Errand:
    """Copies on their way."""

    def __init__(self, event: torch.cuda.Event | None, device: torch.device) -> None:
        self._event, self._device = event, device

    def before_device(self) -> None:
        """What is asked of the device from now on waits for it; the caller does not."""
        if self._event:
            self._event.wait(torch.cuda.current_stream(self._device))

    @property
    def is_done(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def before_host(self) -> None:
        """Waits for it."""
        if self._event:
            self._event.synchronize()


def current(device: torch.device) -> AbstractContextManager[None]:
    """Kernels and events go to this device, whichever is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def beside(device: torch.device) -> AbstractContextManager[None]:
    """For work on the device that goes beside what other threads ask of it."""
    return nullcontext() if device.type != "cuda" else torch.cuda.stream(_beside(device))


@lru_cache(maxsize=16)
def _beside(device: torch.device) -> torch.cuda.Stream:
    """One for all: torch has few streams, and gives them out by turns, also to graphs."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


@lru_cache(maxsize=16)
def courier(device: torch.device) -> Courier:
    return Courier(device)


def here(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """For threads that work for this one: their work comes behind what it has asked for."""
    if device.type != "cuda":
        return nullcontext
    return partial(torch.cuda.stream, torch.cuda.current_stream(device))


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A new one, which work `beside` and couriers do not have: torch gives few out by turns."""
    taken = {_beside(device).cuda_stream, courier(device).stream_number}
    while True:
        stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if stream.cuda_stream not in taken:
            return stream


@lru_cache(maxsize=16)
def turns(device: torch.device) -> threading.Lock:
    """Held while the device waits for the CPU, as it does in recorded steps, and by other threads
    while they ask it for memory or for kernels that may be new to it: these may wait for all that
    it does, with locks that the CPU needs to go on."""
    return threading.Lock()
