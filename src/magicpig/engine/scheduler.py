"""Scheduler: which request's prompt is read next, and which sequences get a token.

Requests wait in the order they came. One is let in when its memory, as estimated, fits beside
what the others may come to need, and the batch has room for its sequences. One prompt is read at a
time: what only that takes counts once.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import reduce

from magicpig.engine.memory import Memory, Needed, size
from magicpig.engine.sequence import Request, Sequence
from magicpig.kv.places import give_back_pinned


class Scheduler:
    """budget: for keys, values and indexes of all requests that were let in."""

    def __init__(self, budget: Memory, max_sequences: int) -> None:
        self.budget = budget
        self.max_sequences = max_sequences
        self.waiting: deque[Request] = deque()
        self.running: list[Sequence] = []
        self._let_in: dict[int, Request] = {}
        self._blocks: Counter[int] = Counter()  # bytes of prompts, by the size of blocks
        self._pinned_before = 0  # of far contexts that are gone

    def add(self, request: Request) -> None:
        memory = _together([request]) + request.needed.reading
        for name, needed, there in (
            ("", memory.host, self.budget.host),
            ("of the GPU's memory ", memory.device, self.budget.device),
        ):
            if needed > there:
                raise MemoryError(
                    f"the request may need {size(needed)} {name}for keys, values and index "
                    f"({len(request.prompt_ids)} prompt tokens, {request.params.n} times up to "
                    f"{request.params.max_tokens} new ones); {size(there)} are there: "
                    "shorten the prompt, lower max_tokens or n, or take a smaller index"
                )
        if request.params.n > self.max_sequences:
            raise ValueError(
                f"n must be at most {self.max_sequences} (max_sequences), not {request.params.n}"
            )
        self.waiting.append(request)

    def next_prompt(self) -> Request | None:
        """The next request to be let in, if there is room for it."""
        if not self.waiting:
            return None
        request, let_in = self.waiting[0], self._let_in.values()
        needed = _together([*let_in, request])
        reading = reduce(Memory.most, (other.needed.reading for other in (*let_in, request)))
        sequences = sum(other.params.n for other in let_in) + request.params.n
        fits = (needed + reading).fits(self.budget) and sequences <= self.max_sequences
        if let_in and not fits:
            return None
        if self.budget.device:
            self._pin(request.needed, needed.host)
        self._let_in[request.id] = request
        return self.waiting.popleft()

    def _pin(self, own: Needed, needed: int) -> None:
        """Prompts are in pinned memory, which is kept for others with blocks of the same size; it
        is given back where there is no room for it beside what those need who were let in."""
        blocks = Counter(own.blocks)
        others = (self._blocks - blocks).total() + self._pinned_before
        if others and needed + own.reading.host + others > self.budget.host:
            give_back_pinned()
            self._blocks.clear()
            self._pinned_before = 0
        self._blocks |= blocks

    def start(self, request: Request) -> None:
        """The prompt is read: its sequences take part in decode steps."""
        self.running += request.sequences

    def drop(self, request: Request) -> None:
        """The request needs nothing any more."""
        self._let_go(request)
        if request in self.waiting:
            self.waiting.remove(request)
        self.sweep()

    def sweep(self) -> None:
        """Takes out finished sequences, and requests all of whose sequences are finished."""
        self.running = [s for s in self.running if s.finish is None]
        for request in list(self._let_in.values()):
            if request.sequences and all(s.finish for s in request.sequences):
                self._let_go(request)

    def _let_go(self, request: Request) -> None:
        if self._let_in.pop(request.id, None):
            self._pinned_before += request.needed.pinned


def _together(requests: list[Request]) -> Memory:
    """What requests need at the same time, when their prompts are read."""
    needed = sum((request.needed.own for request in requests), Memory())
    count = sum(request.params.n for request in requests)
    windows = reduce(Memory.most, (request.needed.windows for request in requests))
    beside = reduce(Memory.most, (request.needed.beside for request in requests))
    return needed + windows * count + (beside * count if count > 1 else Memory())
