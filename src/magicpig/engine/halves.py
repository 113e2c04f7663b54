"""Halves: two halves of a batch that go through the model by turns.

Where the far context is the CPU's and the model is a GPU's, each waits for the other in every
layer. With two halves one is on the GPU while the other is on the CPU. Each has a thread, and on a
GPU a stream; whoever attends to far contexts takes its turn on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from magicpig import trace
from magicpig.kv.courier import own_stream

Work = Callable[[], Tensor]


class Halves:
    """For one model, on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = own_stream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="magicpig-half")

    def run(self, one: Work, other: Work) -> Tensor:
        """Results [sequences, ...] of both halves' work, end to end."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        second: Future[Tensor] | None = None
        try:
            second = self._thread.submit(self._second, other)
            with trace.span("half", number=0):
                first = one()
        finally:
            try:
                if second is not None:
                    _outlast(second)  # whatever became of this half, that one ends before we go on
            finally:
                if self._stream is not None:
                    torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return torch.cat([first, second.result()])

    def _second(self, work: Work) -> Tensor:
        where = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(), where, trace.span("half", number=1):
            return work()


def _outlast(work: Future[Tensor]) -> None:
    """Waits until it has ended, one way or the other; an interrupt comes after that."""
    interrupt: BaseException | None = None
    while not work.done():
        try:
            work.exception()
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
