"""LLM: a model that answers, in a few lines of Python."""

from __future__ import annotations

import operator
import reprlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from magicpig.attention.base import Method
from magicpig.attention.plan import make_plan
from magicpig.config import LSHConfig, WindowConfig, check_int
from magicpig.engine.engine import Engine
from magicpig.engine.memory import largest_batch, there_is
from magicpig.engine.params import SamplingParams
from magicpig.engine.runner import Runner, needs_of
from magicpig.engine.sampler import Choice
from magicpig.engine.scheduler import Scheduler
from magicpig.engine.sequence import NO_USAGE, Event, Finish, Request, Usage
from magicpig.hf.cache import full_attention_layers
from magicpig.kv.sequence import SequenceKV
from magicpig.models import LoadedModel, load
from magicpig.models.identity import identity
from magicpig.models.quiet import token_ids

MOST_SEQUENCES = 65_536
Prompt = str | Sequence[int]
Message = Mapping[str, str]


@dataclass(frozen=True)
class Completion:
    """A text, its tokens, why it ended, and (if asked for) what the model gave each token."""

    text: str
    token_ids: list[int]
    finish: Finish
    choices: list[Choice]
    usage: Usage


@dataclass(frozen=True)
class Generation:
    """The completions of one prompt, and how long they took."""

    prompt_tokens: int
    known_tokens: int
    completions: list[Completion]
    prefill_seconds: float
    decode_seconds: float

    @property
    def text(self) -> str:
        """Of the first completion."""
        return self.completions[0].text

    @property
    def read_tokens(self) -> int:
        """Tokens of the prompt that were not known before."""
        return self.prompt_tokens - self.known_tokens

    @property
    def new_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def decode_tokens(self) -> int:
        """Of decode steps: all new tokens but the first ones, which the prompt gave."""
        return self.new_tokens - len(self.completions)


class LLM:
    """A model, ready to generate.

    model: a built-in name ("smollm2"), a local folder, a name on the Hugging Face hub, or a model
        that magicpig.models.load gave; the LLM then has it for itself.
    method: how decode steps attend to the far context: "scan" and "lsh" sample it, "full" reads all
        of it; parameters may follow, as in "lsh:10:150" or "quest:16:4%" (docs/methods.md has all).
        None: "scan", or "lsh" where lsh is given.
    lsh, dense_layers, window: see LSHConfig, WindowConfig; dense layers read every row, None means
        the first and the middle one.
    device, dtype: see magicpig.models.load.
    max_sequences: completions that run at the same time; more wait.
    cpu_memory: bytes, or a text like 64GiB, for keys, values and indexes of all of them; None: most
        of what is free, which a limit does not exceed. Contexts that were read or loaded and are
        kept do not count, as they are the caller's; nor do they in gpu_memory. memory_bytes: the
        same, in bytes.
    gpu_memory: of a model on a GPU, all that it may use of it: weights, windows, dense layers, work
        space; None: most of what is free. It holds for all of a process: one model to a GPU.
    """

    def __init__(
        self,
        model: str | LoadedModel = "smollm2",
        *,
        method: str | Method | None = None,
        lsh: LSHConfig | None = None,
        dense_layers: Sequence[int] | None = None,
        window: WindowConfig | None = None,
        device: str = "auto",
        dtype: str = "auto",
        max_sequences: int = 64,
        memory_bytes: int | None = None,
        cpu_memory: int | str | None = None,
        gpu_memory: int | str | None = None,
    ) -> None:
        make_plan(method, 1, lsh, ())  # before a model is loaded for nothing
        check_int("max_sequences", max_sequences, 1, MOST_SEQUENCES)
        window = WindowConfig.given(window)
        if not isinstance(model, (str, LoadedModel)):
            raise TypeError(
                "model must be a name or what magicpig.models.load gave, "
                f"not a {type(model).__name__}"
            )
        loaded = load(model, device, dtype) if isinstance(model, str) else model
        self.name = loaded.name
        self._lock = threading.RLock()  # over the engine and the inboxes
        self._inboxes: dict[int, deque[Event]] = {}
        self.tokenizer = loaded.tokenizer
        self.identity = identity(loaded.model)
        config = loaded.model.config.get_text_config(decoder=True)
        full_layers = full_attention_layers(loaded.model.config)
        plan = make_plan(method, config.num_hidden_layers, lsh, dense_layers, full_layers)
        self.settings: dict[str, Any] = {
            "model": loaded.name,
            "method": plan.method.spec,
            "dense_layers": None if dense_layers is None else list(dense_layers),
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
        }
        if memory_bytes is not None and cpu_memory is not None:
            raise ValueError("cpu_memory and memory_bytes are the same: give one of them")
        weights = sum(p.nbytes for p in loaded.model.parameters())
        self.max_length = loaded.max_length
        limit = memory_bytes if cpu_memory is None else cpu_memory
        limits = weights, limit, gpu_memory
        # Before the model is the runner's: what is refused here may be asked for once more.
        there_is(needs_of(loaded.model, plan, window), *limits)
        runner = Runner(loaded.model, plan, window)  # which takes memory for the weights it packs
        self.engine = Engine(
            runner,
            loaded.tokenizer,
            Scheduler(there_is(runner.needs, *limits), max_sequences),
            loaded.end_token_ids,
            self.max_length,
        )

    def largest_batch(self, prompt_tokens: int, new_tokens: int) -> int:
        """Sequences with prompts of their own that run together, by the memory that they may come
        to need, and by max_sequences; 0: not even one.

        new_tokens: of each, as far as the model's context holds them.
        """
        needs, scheduler = self.engine.runner.needs, self.engine.scheduler
        check_int("new_tokens", new_tokens, 1, 2**31 - 1)
        check_int("prompt_tokens", prompt_tokens, 1, 2**31 - 1)
        if prompt_tokens >= self.max_length:
            raise ValueError(
                f"prompt_tokens must be from 1 to {self.max_length - 1}, as the model's context "
                f"holds {self.max_length}, not {prompt_tokens}"
            )
        new_tokens = min(new_tokens, self.max_length - prompt_tokens)
        fitting = largest_batch(needs, scheduler.budget, prompt_tokens, new_tokens)
        return min(fitting, scheduler.max_sequences)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> list[Generation]:
        """Completes a prompt, or several together. A prompt is text or a list of token ids.

        on_event: told of everything that happens, as it happens.
        An error in one prompt is raised when all others are done.
        """
        params = params or SamplingParams()
        requests: list[Request] = []
        try:
            for prompt in _as_list(prompts):
                requests.append(self._add(self.encode(prompt), params))
        except BaseException:
            self._end(requests)
            raise
        return self._collect(requests, on_event)

    def generate_from(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        known: SequenceKV | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> Generation:
        """Completes one prompt, the first tokens of which may be known (`read` gives them)."""
        return self._collect([self._add(prompt_ids, params, known)], on_event)[0]

    def read(
        self, prompt_ids: Sequence[int], on_event: Callable[[Event], None] | None = None
    ) -> SequenceKV:
        """Reads a text, to be gone on from any number of times by generate_from."""
        request = self._add(prompt_ids, SamplingParams(max_tokens=1), keep_prompt=True)
        self._collect([request], on_event)
        assert request.prompt
        return request.prompt

    def _collect(
        self, requests: list[Request], on_event: Callable[[Event], None] | None
    ) -> list[Generation]:
        collected = [_Collected(request) for request in requests]
        by_id = {each.request.id: each for each in collected}
        with closing(self.run(requests)) as events:
            for event in events:
                by_id[event.request_id].take(event)
                if on_event:
                    on_event(event)
        return [each.generation() for each in collected]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion, piece by piece. Closing the iterator ends the request."""
        params = params or SamplingParams()
        if getattr(params, "n", 1) != 1:
            raise ValueError(f"a stream is of one completion: n must be 1, not {params.n}")
        request = self._add(self.encode(prompt), params)
        with closing(self.run([request])) as events:
            for event in events:
                if event.error:
                    raise event.error
                if event.text:
                    yield event.text

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Generation:
        """The answer to a conversation: messages with role ("system", "user", ...) and content."""
        return self.generate([self.encode_chat(messages)], params)[0]

    def run(self, requests: Sequence[Request]) -> Generator[Event, None, None]:
        """Steps the engine until these requests are done; ends them when the caller leaves.

        Several threads may run requests of their own at once: whoever steps brings news for all.
        """
        inbox: deque[Event] = deque()
        left = {request.id: request.params.n for request in requests}
        with self._lock:
            for each in left:  # others may have brought news already
                inbox.extend(self._inboxes.get(each, ()))
                self._inboxes[each] = inbox
        try:
            while any(left.values()):
                with self._lock:
                    if not inbox and not self.engine.has_work:
                        return
                    if not inbox:
                        self._deliver(self.engine.step())
                while inbox:
                    event = inbox.popleft()
                    left[event.request_id] -= event.finish is not None
                    yield event
        finally:
            self._end(requests)

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.request_id in self._inboxes:
                self._inboxes[event.request_id].append(event)

    def _add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        known: SequenceKV | None = None,
        keep_prompt: bool = False,
    ) -> Request:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {reprlib.repr(params)}")
        if known is not None and not isinstance(known, SequenceKV):
            raise TypeError(f"known must be what read gives, or a Context's kv, not {known!r:.80}")
        prompt_ids = _token_list(prompt_ids, "prompt_ids must be a list of token ids")
        with self._lock:
            request = self.engine.add(prompt_ids, params, known, keep_prompt)
            self._inboxes[request.id] = deque()
            return request

    def _end(self, requests: Sequence[Request]) -> None:
        with self._lock:
            for request in requests:
                self.engine.abort(request.id)
                self._inboxes.pop(request.id, None)
            self._deliver(self.engine.news())  # not to those who left

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt."""
        if isinstance(prompt, str):
            return token_ids(self.tokenizer, prompt)
        return _token_list(prompt, "a prompt is a text or a list of token ids")

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins."""
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise TypeError(f"messages must be a list of messages, not {reprlib.repr(messages)}")
        if not messages:
            raise ValueError("messages is empty: a conversation has one message at least")
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise ValueError(f"a message has a role and a content, not {reprlib.repr(message)}")
        if self.tokenizer.chat_template is None:
            raise ValueError(f"the model {self.name!r} has no chat template; use generate")
        told = [dict(message) for message in messages]
        try:
            text: Any = self.tokenizer.apply_chat_template(
                told, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs
            raise ValueError(
                f"the chat template of {self.name!r} cannot take these messages: {error}"
            ) from error
        return token_ids(self.tokenizer, text, special=False)


class _Collected:
    """What a request's events add up to."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.texts = [""] * request.params.n
        self.choices: list[list[Choice]] = [[] for _ in range(request.params.n)]
        self.error: BaseException | None = None

    def take(self, event: Event) -> None:
        self.texts[event.index] += event.text
        if event.choice:
            self.choices[event.index].append(event.choice)
        self.error = self.error or event.error

    def generation(self) -> Generation:
        if self.error:
            raise self.error
        request = self.request
        nothing = Completion("", [], Finish.ABORT, [], NO_USAGE)
        completions = [
            Completion(text, s.token_ids, s.finish or Finish.ABORT, choices, s.usage)
            for text, s, choices in zip(self.texts, request.sequences, self.choices, strict=False)
        ] or [nothing] * request.params.n  # ended before its prompt was read
        return Generation(
            len(request.prompt_ids),
            request.known.num_tokens if request.known else 0,
            completions,
            request.prefilled - request.started,
            request.ended - request.prefilled,
        )


def _token_list(tokens: object, wanted: str) -> list[int]:
    """wanted: what is said where they are none."""
    try:
        if not isinstance(tokens, (str, bytes, bytearray)):
            return [operator.index(token) for token in tokens]  # type: ignore[attr-defined]
    except TypeError:
        pass
    raise TypeError(f"{wanted}, not {reprlib.repr(tokens)}")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    is_list = hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__")
    if isinstance(prompts, Mapping) or not is_list:
        raise TypeError(f"a prompt is a text or a list of token ids, not {reprlib.repr(prompts)}")
    if isinstance(prompts, (str, bytes, bytearray)) or (
        len(prompts) and hasattr(prompts[0], "__index__")
    ):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
