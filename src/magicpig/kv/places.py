"""Places: room in host memory for what a device finds of keys before the native core has time for
it, a layer's in each."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from magicpig import trace
from magicpig.attention.gpu import empty_host_cache
from magicpig.kv.courier import Courier, Errand, courier
from magicpig.kv.segments import MOST_AHEAD

MOMENT = 1e-3  # seconds, after which it is looked again


class Place:
    """Keeps its memory, pinned, for the next one who takes it. From torch it could be had again
    only when all is done that the courier was asked for meanwhile; asking for more stops the GPU
    for tens of milliseconds."""

    _memory: Tensor | None = None
    _courier: Courier | None = None

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Not kept meanwhile, as copies may be under way there."""
        memory, self._memory, self._courier = self._memory, None, courier(device)
        if memory is None or len(memory) < nbytes:
            memory = None  # before there is another
            memory = self._courier.host_memory((nbytes,), torch.uint8)
        return memory

    def keep(self, memory: Tensor) -> None:
        """When copies to it are done."""
        self._memory = memory

    def give_back(self) -> None:
        """So that torch has it at once."""
        self._memory = None
        if self._courier:
            self._courier.wait()


free: SimpleQueue[Place] = SimpleQueue()  # to which they may come at any time, by collections too
for _ in range(MOST_AHEAD):
    free.put(Place())

last_asked: deque[Errand] = deque(maxlen=MOST_AHEAD)  # segments that could be hashed ahead


def place_or_empty() -> Place:
    """Waits for one while the device is behind: it would be asked for all layers of a prompt long
    before it comes to the first. Where the native core is behind there is none: queue.Empty."""
    with trace.span("wait for a place"):
        while True:
            underway = list(last_asked)
            is_behind = bool(underway) and not underway[len(underway) // 2].is_done
            try:
                return free.get(timeout=MOMENT) if is_behind else free.get_nowait()
            except Empty:
                if not is_behind:
                    raise


def give_back_pinned() -> None:
    """Host memory that is pinned, of places and whatever torch keeps, and that nobody uses."""
    for _ in range(free.qsize()):
        with suppress(Empty):
            place = free.get_nowait()
            try:
                place.give_back()
            finally:
                free.put(place)
    empty_host_cache()
