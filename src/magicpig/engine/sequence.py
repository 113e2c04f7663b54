"""Sequence: one completion on its way, and what its requester hears of it."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from magicpig.engine.memory import Needed
from magicpig.engine.params import SamplingParams
from magicpig.engine.sampler import Choice, Sampler
from magicpig.engine.text import Detokenizer
from magicpig.kv.base import SequenceBytes
from magicpig.kv.cost import Cost
from magicpig.kv.sequence import SequenceKV


class Finish(str, Enum):
    """Why a completion ended."""

    STOP = "stop"  # the model's end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the model's context
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class Event:
    """News of a request: a part of its prompt was read, a token came, or a completion ended.

    index: which of the request's n completions.
    prefilled: tokens of the prompt that are read by now.
    text: new text, which may be of several tokens, or empty while one is not complete.
    """

    request_id: int
    index: int = 0
    prefilled: int = 0
    choice: Choice | None = None
    text: str = ""
    finish: Finish | None = None
    error: BaseException | None = None


@dataclass
class Request:
    """A prompt and what is wanted of it.

    known: keys and values of the prompt's first tokens, read before.
    keep_prompt: whether `prompt` is to hold the prompt's keys and values once it is read.
    read_again: whether reading began anew, after there was too little memory for it.
    """

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    needed: Needed = field(default_factory=Needed)
    known: SequenceKV | None = None
    keep_prompt: bool = False
    read_again: bool = False
    prompt: SequenceKV | None = None
    sequences: list[Sequence] = field(default_factory=list)
    # By time.perf_counter: reading the prompt began, it was done, the last completion ended.
    started: float = 0.0
    prefilled: float = 0.0
    ended: float = 0.0

    @property
    def finished(self) -> bool:
        return bool(self.sequences) and all(s.finish for s in self.sequences)


@dataclass(frozen=True)
class Usage:
    """What a completion came to need.

    share_read: of all rows, windows and dense layers included, those that its steps read.
    cost: of the far context, in the layers that the method is for.
    """

    nbytes: SequenceBytes
    share_read: float
    cost: Cost


NO_USAGE = Usage(SequenceBytes(0, 0, 0), 1.0, Cost())


class Sequence:
    """One completion of a request."""

    def __init__(
        self,
        request: Request,
        index: int,
        kv: SequenceKV,
        sampler: Sampler,
        detokenizer: Detokenizer,
    ) -> None:
        self.request = request
        self.index = index
        self.sampler = sampler
        self.detokenizer = detokenizer
        self.token_ids: list[int] = []
        self.finish: Finish | None = None
        self._kv: SequenceKV | None = kv
        self._usage: Usage | None = None

    @property
    def kv(self) -> SequenceKV:
        if self._kv is None:
            raise RuntimeError("the completion has ended; its keys and values are gone")
        return self._kv

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def usage(self) -> Usage:
        return self._usage or _usage_of(self.kv)

    def end(self, finish: Finish) -> None:
        """Lets the keys and values go."""
        self.finish = finish
        self.request.ended = time.perf_counter()
        kv, self._kv, self._usage = self.kv, None, NO_USAGE
        with suppress(Exception):  # of a device that has no answers any more
            self._usage = _usage_of(kv)
        kv.end()


def _usage_of(kv: SequenceKV) -> Usage:
    return Usage(kv.nbytes, kv.share_read, kv.cost)
