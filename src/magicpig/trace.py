"""Traces: what happened when, on the CPU's threads and on a GPU, for chrome://tracing or Perfetto.

    with trace.recording("steps.json"):
        llm.generate(...)

While nothing is recorded, a span costs a look at a variable. A recording that begins before CUDA
is in use has the CPU's side only.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from magicpig.attention.gpu import has_triton
from magicpig.files import check_file, write_whole

CPU, GPU = 1, 2  # "processes" of a trace


class Trace:
    """Spans so far. Threads may add to it at the same time."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._events: list[dict[str, Any]] = []
        self._on_device: list[tuple[str, torch.cuda.Event, torch.cuda.Event, int, dict[str, Any]]]
        self._on_device = []
        self._stamps: list[tuple[torch.Tensor, list[str | None], int]] = []
        self._origin: torch.cuda.Event | None = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._zero = _gpu_time()
            torch.cuda.synchronize()
            self._start = time.perf_counter()
            self._origin = _now()

    @property
    def is_empty(self) -> bool:
        return not (self._events or self._on_device or self._stamps)

    @contextmanager
    def span(self, name: str, arguments: dict[str, Any]) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.past_span(name, begin, time.perf_counter(), arguments)

    def past_span(self, name: str, begin: float, end: float, arguments: dict[str, Any]) -> None:
        thread = threading.get_native_id()
        self._add(name, CPU, thread, begin - self._start, end - begin, arguments)

    @contextmanager
    def device_span(self, name: str, arguments: dict[str, Any]) -> Iterator[None]:
        if self._origin is None:
            with self.span(name, arguments):
                yield
            return
        begin = _now()
        try:
            yield
        finally:
            stream = torch.cuda.current_stream().cuda_stream
            self._on_device.append((name, begin, _now(), stream, arguments))

    def device_stamps(self, stamps: torch.Tensor, spans: list[str | None]) -> None:
        if self._origin is None:
            return
        stream = torch.cuda.current_stream(stamps.device).cuda_stream
        self._stamps.append((stamps[: len(spans)].clone(), spans, stream))

    def _add(
        self,
        name: str,
        process: int,
        thread: int,
        begin: float,
        seconds: float,
        arguments: dict[str, Any],
    ) -> None:
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "pid": process,
                "tid": thread,
                "ts": round(1e6 * begin, 3),
                "dur": round(1e6 * seconds, 3),
                "args": arguments,
            }
        )

    def as_dict(self) -> dict[str, Any]:
        """In the format of trace viewers; times are microseconds."""
        if self._origin is not None:
            on_device, self._on_device = self._on_device, []  # to which other threads may add
            all_stamps, self._stamps = self._stamps, []
            torch.cuda.synchronize()
            for name, begin, end, stream, arguments in on_device:
                at, took = self._origin.elapsed_time(begin), begin.elapsed_time(end)
                self._add(name, GPU, stream, at / 1e3, took / 1e3, arguments)
            for stamps, spans, stream in all_stamps:
                times = [(stamp - self._zero) / 1e9 - self._start for stamp in stamps.tolist()]
                for done, begin, end in zip(spans[1:], times, times[1:], strict=False):
                    if done:
                        self._add(done, GPU, stream, begin, end - begin, {})
        there = {event["pid"] for event in self._events}
        names = [
            {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
            for pid, name in ((CPU, "CPU"), (GPU, "GPU"))
            if pid in there
        ]
        events = sorted(self._events, key=lambda event: float(event["ts"]))
        return {"displayTimeUnit": "ms", "traceEvents": names + events}


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _gpu_time() -> int:
    """What a GPU's clock shows more than perf_counter, in nanoseconds."""
    if not has_triton(torch.device("cuda")):
        return 0
    from magicpig.attention.exchange_on_gpu import write_stamp

    stamp = torch.zeros(1, dtype=torch.int64, device="cuda")
    for _ in range(2):  # the first may compile
        torch.cuda.synchronize()
        begin = time.perf_counter()
        write_stamp(stamp)
        torch.cuda.synchronize()
        middle = (begin + time.perf_counter()) / 2
    return int(stamp) - int(1e9 * middle)


_current: Trace | None = None


def span(name: str, **arguments: Any) -> AbstractContextManager[None]:
    """Something that the calling thread does."""
    return nullcontext() if _current is None else _current.span(name, arguments)


def past_span(name: str, begin: float, end: float, **arguments: Any) -> None:
    """What the calling thread has done, by perf_counter."""
    if _current is not None:
        _current.past_span(name, begin, end, arguments)


def device_span(name: str, **arguments: Any) -> AbstractContextManager[None]:
    """Something that the calling thread asks of the device, when the device does it."""
    return nullcontext() if _current is None else _current.device_span(name, arguments)


def device_stamps(stamps: torch.Tensor, spans: list[str | None]) -> None:
    """What the device did before each stamp, by the device's clock, int64 [spans] nanoseconds, that
    kernels write which were asked for by now. None: nothing."""
    if _current is not None:
        _current.device_stamps(stamps, spans)


@contextmanager
def recording(path: Path | str) -> Iterator[Trace]:
    """Writes what happens inside to a file, at the end, if anything did. One at a time."""
    global _current
    if _current is not None:
        raise RuntimeError("a trace is being recorded already")
    path = Path(path)
    check_file(path, "the trace")
    _current = Trace()
    try:
        yield _current
    finally:
        done, _current = _current, None
        if not done.is_empty:
            write_whole(path, json.dumps(done.as_dict()).encode())
