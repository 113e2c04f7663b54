"""Engine: requests in, events out. Requests of any length join and leave at any step."""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Sequence as List

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from magicpig.attention.gpu import is_out_of_memory
from magicpig.engine.params import SamplingParams
from magicpig.engine.prefill import Prefill
from magicpig.engine.runner import Runner
from magicpig.engine.sampler import BadLogits, Choice, Sampler, sample
from magicpig.engine.scheduler import Scheduler
from magicpig.engine.sequence import Event, Finish, Request, Sequence
from magicpig.engine.text import Detokenizer
from magicpig.kv.sequence import SequenceKV


class Engine:
    """Runs requests together, a step at a time. One thread at a time.

    end_token_ids: tokens that end a completion.
    max_length: the most tokens of a prompt and a completion together.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: PreTrainedTokenizerBase,
        scheduler: Scheduler,
        end_token_ids: frozenset[int],
        max_length: int,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.end_token_ids = end_token_ids
        self.max_length = max_length
        self._ids = itertools.count()
        self._requests: dict[int, Request] = {}
        self._reading: tuple[Request, Prefill] | None = None
        self._late: list[Event] = []  # of what ended outside a step

    def add(
        self,
        prompt_ids: List[int],
        params: SamplingParams,
        known: SequenceKV | None = None,
        keep_prompt: bool = False,
    ) -> Request:
        """Takes a request in; ValueError or MemoryError when it cannot be done.

        known: the first tokens of the prompt, read before; it is not changed.
        keep_prompt: keep the prompt's keys and values in request.prompt once it is read.
        """
        self._check(prompt_ids, known)
        new_tokens = self._new_tokens(prompt_ids, params)
        self.runner.rope.is_long(len(prompt_ids), new_tokens, known)  # raises where it cannot be
        needs, length = self.runner.needs, len(prompt_ids)
        needed = needs.request(length, new_tokens, params.n, known is not None)
        request = Request(next(self._ids), list(prompt_ids), params, needed, known, keep_prompt)
        self.scheduler.add(request)
        self._requests[request.id] = request
        return request

    def _check(self, prompt_ids: List[int], known: SequenceKV | None) -> None:
        if not prompt_ids:
            raise ValueError("the prompt is empty: it has no tokens")
        if len(prompt_ids) >= self.max_length:
            raise ValueError(
                f"the prompt has {len(prompt_ids)} tokens; the model's context holds "
                f"{self.max_length}, one of them new at least: shorten the prompt"
            )
        vocabulary = self.runner.model.config.get_text_config(decoder=True).vocab_size
        for token in prompt_ids:
            if not 0 <= token < vocabulary:
                raise ValueError(f"prompt token {token} is not from 0 to {vocabulary - 1}")
        if known is not None and known.num_tokens >= len(prompt_ids):
            raise ValueError(
                f"the prompt has {len(prompt_ids)} tokens, {known.num_tokens} of them known: "
                "one at least must be new"
            )

    def abort(self, request_id: int) -> None:
        """Ends a request's completions as they are, if they have not ended; the next step tells."""
        request = self._requests.get(request_id)
        if request is not None:
            self._late += self._end(request, Finish.ABORT)

    @property
    def has_work(self) -> bool:
        """Whether a step would bring news."""
        return bool(self._requests or self._late)

    def news(self) -> list[Event]:
        """What the next step would tell before it does anything."""
        events, self._late = self._late, []
        _empty_frames(events)
        return events

    def step(self) -> list[Event]:
        """Reads a part of the next prompt and gives every running sequence a token."""
        events = self.news()
        try:
            with self.runner.threads():
                events += self._read_part()
                _empty_frames(events)  # what failed may have the memory that the others need
                events += self._decode()
        except BaseException:  # an interrupt: what there is to tell, the next step tells
            self._late = events + self._late
            raise
        _empty_frames(events)
        self.scheduler.sweep()
        if not self.scheduler.running:
            self.runner.idle()
        for request in [r for r in self._requests.values() if r.finished]:
            del self._requests[request.id]
        return events

    def _read_part(self) -> list[Event]:
        request = self._reading[0] if self._reading else self.scheduler.next_prompt()
        if request is None:
            return []
        events: list[Event] = []
        try:
            if self._reading is None:
                request.started = time.perf_counter()
                self._reading = request, self._begin(request)
            prefill = self._reading[1]
            logits = self.runner.prefill(prefill)
            events.append(Event(request.id, prefilled=prefill.done))
            if prefill.done < len(request.prompt_ids):
                return events
            kv = self.runner.finish(prefill)
            if request.keep_prompt:
                request.prompt = kv.fork()
            self._start(request, kv)
            self._reading = None
            request.prefilled = time.perf_counter()
            self.scheduler.start(request)
            self._choose(request.sequences, logits.expand(request.params.n, -1), events)
        except BaseException as error:  # whatever it is, other requests go on
            try:
                if self._reads_again(request, error):
                    return events
            except BaseException as other:
                error = other
            events += self._end(request, Finish.ERROR, error)
            self._raise_interrupt(error, events)
        return events

    def _begin(self, request: Request) -> Prefill:
        new_tokens = self._new_tokens(request.prompt_ids, request.params)
        return self.runner.begin(request.prompt_ids, request.known, new_tokens=new_tokens)

    def _new_tokens(self, prompt_ids: List[int], params: SamplingParams) -> int:
        """That may follow."""
        return min(params.max_tokens, self.max_length - len(prompt_ids))

    def _reads_again(self, request: Request, error: BaseException) -> bool:
        """Once, where recorded steps had memory that was too little for the prompt."""
        if request.read_again or request.sequences or not is_out_of_memory(error):
            return False
        request.read_again = self.runner.drop_graphs()
        if request.read_again:
            self._reading = request, self._begin(request)
        return request.read_again

    def _start(self, request: Request, kv: SequenceKV) -> None:
        sampler = Sampler(request.params, request.prompt_ids)
        kvs = [kv, *(kv.fork() for _ in range(1, request.params.n))]
        for i, own in enumerate(kvs):
            text = Detokenizer(self.tokenizer, request.params.stop)
            request.sequences.append(Sequence(request, i, own, sampler.fork(i), text))

    def _decode(self) -> list[Event]:
        running = [s for s in self.scheduler.running if s.finish is None]
        if not running:
            return []
        events: list[Event] = []
        try:
            logits = self.runner.decode([s.kv for s in running], [s.token_ids[-1] for s in running])
            self._choose(running, logits, events)
        except BaseException as error:  # layers may have gone different ways: none can go on
            left = [s for s in running if s.finish is None]
            events += [self._finished(s, Finish.ERROR, error=error) for s in left]
            self._raise_interrupt(error, events)
        return events

    def _raise_interrupt(self, error: BaseException, events: list[Event]) -> None:
        """Unless the error is one that others go on after. What it ended, the next step tells."""
        if not isinstance(error, Exception):
            self._late += events
            raise error

    def _choose(self, sequences: List[Sequence], logits: Tensor, events: list[Event]) -> None:
        """A token for each of them; what came of it becomes events one by one."""
        choices = sample(logits, [s.sampler for s in sequences])
        for sequence, choice in zip(sequences, choices, strict=True):
            events.append(self._take(sequence, choice))

    def _take(self, sequence: Sequence, choice: Choice | BadLogits) -> Event:
        """A sequence's new token: its text, and whether it is the last."""
        if isinstance(choice, BadLogits):
            return self._finished(sequence, Finish.ERROR, error=choice)
        params = sequence.request.params
        sequence.token_ids.append(choice.token)
        ends = choice.token in params.stop_token_ids or (
            choice.token in self.end_token_ids and not params.ignore_eos
        )
        try:
            text = "" if ends else sequence.detokenizer.push(choice.token)
        except Exception as error:
            return self._finished(sequence, Finish.ERROR, choice, error=error)
        if ends or sequence.detokenizer.stopped:
            return self._finished(sequence, Finish.STOP, choice, text)
        if len(sequence.token_ids) >= params.max_tokens or sequence.length >= self.max_length:
            return self._finished(sequence, Finish.LENGTH, choice, text)
        try:
            sequence.kv.settle()
        except Exception as error:
            return self._finished(sequence, Finish.ERROR, choice, text, error)
        return Event(sequence.request.id, sequence.index, choice=choice, text=text)

    def _finished(
        self,
        sequence: Sequence,
        finish: Finish,
        choice: Choice | None = None,
        text: str = "",
        error: BaseException | None = None,
    ) -> Event:
        if not error:
            text += sequence.detokenizer.finish()
        sequence.end(finish)
        return Event(
            sequence.request.id,
            sequence.index,
            choice=choice,
            text=text,
            finish=finish,
            error=error,
        )

    def _end(
        self, request: Request, finish: Finish, error: BaseException | None = None
    ) -> list[Event]:
        """Ends all completions that have not ended; before there are any, each by an event."""
        self._requests.pop(request.id, None)
        if self._reading and self._reading[0] is request:
            self._reading = None
        left = [s for s in request.sequences if s.finish is None]
        ended = [self._finished(s, finish, error=error) for s in left]
        self.scheduler.drop(request)
        if request.sequences:
            return ended
        return [Event(request.id, i, finish=finish, error=error) for i in range(request.params.n)]


def _empty_frames(events: List[Event]) -> None:
    """Of errors: where they were raised stays known, what functions had at hand there is let go of.

    It may be the keys and values of many sequences, whose memory counts as free.
    """
    errors, seen = [event.error for event in events], set[int]()
    while errors:
        error = errors.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            errors += [error.__cause__, error.__context__]
