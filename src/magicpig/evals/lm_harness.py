"""The model `magicpig` of the lm-evaluation-harness (the package lm_eval).

    lm_eval --model magicpig --model_args pretrained=smollm2,method=lsh:10:150 --tasks ...

The harness finds it by its entry point in the group lm_eval.models, as its plug-in guide says (its
pull request 4013). Releases up to 0.4.13 know their own models only: for these
`python -m magicpig.evals.lm_harness` is `lm_eval` with this model known to it.

Contexts are read densely and continuations are decoded token by token, so that the method counts:
in all tokens of a text whose likelihood is asked for, in all but the first of an answer.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

try:
    from lm_eval.api.model import TemplateLM  # type: ignore[import-untyped]
    from lm_eval.api.registry import (  # type: ignore[import-untyped]
        MODEL_REGISTRY,
        register_model,
    )
    from lm_eval.models.utils import normalize_gen_kwargs  # type: ignore[import-untyped]
    from lm_eval.utils import (  # type: ignore[import-untyped]
        get_rolling_token_windows,
        make_disjoint_window,
        simple_parse_args_string,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: the lm-evaluation-harness comes with pip install 'magicpig[lm-eval]'"
    ) from error

from magicpig.attention.plan import DEFAULT_METHOD
from magicpig.config import Strict, check_int
from magicpig.engine.params import SamplingParams
from magicpig.engine.sequence import Request
from magicpig.evals.forced import force
from magicpig.kv.sequence import SequenceKV
from magicpig.llm import LLM
from magicpig.models import LoadedModel, ModelError

NAME = "magicpig"
AUTO_BATCH = 16  # contexts at once where the harness says "auto"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelArgs(Strict):
    """What --model_args may hold.

    pretrained, method, dense_layers, device, dtype: see magicpig.LLM. dense_layers is a number or
        a list, [0,15]. A CUDA device, the harness's default, is the CPU where there is no GPU.
    max_length: tokens of a context and what follows it; None: as many as the model's context
        holds. Contexts that are too long lose their beginning.
    max_gen_toks: length of a generated text where the task does not say.
    batch_size: contexts that are worked on at once; what follows one context is one batch anyway.
    max_batch_size: the harness's own, of no effect.
    """

    pretrained: str | LoadedModel = "smollm2"
    method: str = DEFAULT_METHOD
    dense_layers: int | Sequence[int] | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_length: int | None = None
    max_gen_toks: int = 256
    batch_size: int | str = 1
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        check_int("max_gen_toks", self.max_gen_toks, 1, 2**31 - 1)
        if isinstance(self.dense_layers, int):
            object.__setattr__(self, "dense_layers", [self.dense_layers])
        elif not isinstance(self.dense_layers, list | tuple | None):
            raise ValueError(
                f"dense_layers must be a layer or a list like [0,15], not {self.dense_layers!r}"
            )
        if str(self.batch_size).startswith("auto"):
            object.__setattr__(self, "batch_size", AUTO_BATCH)
        elif str(self.batch_size).isdigit():
            object.__setattr__(self, "batch_size", int(self.batch_size))
        check_int("batch_size", self.batch_size, 1, 4096)
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            log.info("device %s: torch sees no GPU; the CPU is used", self.device)
            object.__setattr__(self, "device", "cpu")


@dataclass(frozen=True)
class _Asked:
    """A context and the continuations whose likelihoods are asked for, by number of request."""

    context: list[int]
    continuations: dict[int, list[int]] = field(default_factory=dict)


class MagicPigLM(TemplateLM):  # type: ignore[misc]
    """A model whose decode steps attend to long contexts by one of magicpig's methods."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.args = ModelArgs(**arguments)
        assert isinstance(self.args.batch_size, int)
        self.llm = LLM(
            self.args.pretrained,
            method=self.args.method,
            dense_layers=self.args.dense_layers,  # type: ignore[arg-type]
            device=self.args.device,
            dtype=self.args.dtype,
            max_sequences=self.args.batch_size,
        )
        if self.args.max_length is not None:
            check_int("max_length", self.args.max_length, 2, self.llm.max_length)
        self.max_length = self.args.max_length or self.llm.max_length
        self.max_gen_toks = self.args.max_gen_toks
        self.tokenizer = self.llm.tokenizer
        self._device = self.llm.engine.runner.device

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> MagicPigLM:
        """From --model_args and options of the harness; where both are given, the former count."""
        options = {k: v for k, v in (additional_config or {}).items() if v is not None}
        return cls(**{**options, **arg_dict})

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> MagicPigLM:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context is taken to follow."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """For the harness to tell caches of prompts apart."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids. None: with the tokenizer's special tokens, unless the text begins with one."""
        if add_special_tokens is None:
            first = self.tokenizer.bos_token
            add_special_tokens = not (first and string.startswith(first))
        ids = self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)
        return list(ids["input_ids"])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text, up to where the answer begins, or goes on if it has begun."""
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"the model {self.llm.name!r} has no chat template: leave --apply_chat_template out"
            )
        text: Any = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def get_model_info(self) -> dict[str, Any]:
        """What results say about the model."""
        return {f"magicpig_{name}": value for name, value in self.llm.settings.items()}

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Of whole texts; those that exceed the model's context in windows that fill it."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, cut):
                windows.append((None, context, continuation))
                owners.append(i)
        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens(windows, disable_tqdm)
        for i, (logprob, _) in zip(owners, found, strict=True):
            totals[i] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Of continuations; requests that share a context read it once."""
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(
            total=len(requests), desc="Running loglikelihood requests", disable=disable_tqdm
        ) as bar:
            for batch in self._batches(self._by_context(requests)):
                numbers: list[int] = []
                kvs: list[SequenceKV] = []
                logits: list[Tensor] = []
                continuations: list[list[int]] = []
                for asked in batch:
                    longest = max(1, *map(len, asked.continuations.values()))
                    kv, after = self._read(asked.context, longest)
                    for i, continuation in asked.continuations.items():
                        numbers.append(i)
                        kvs.append(kv.fork())
                        logits.append(after)
                        continuations.append(continuation)
                forced = force(self._step, kvs, logits, continuations)
                for i, each in zip(numbers, forced, strict=True):
                    found[i] = float(each.logprobs.sum()), each.greedy
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
                bar.update(len(numbers))
        return [found[i] for i in range(len(requests))]

    def _by_context(self, requests: Sequence[tuple[Any, list[int], list[int]]]) -> list[_Asked]:
        """Requests by their contexts, as much of each as the model's context holds."""
        asked: dict[tuple[int, ...], _Asked] = {}
        for i, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens, and max_length is "
                    f"{self.max_length}"
                )
            room = self.max_length + 1 - len(continuation)  # the last token is never fed
            context = (context or [self.prefix_token_id])[-room:]
            same = asked.setdefault(tuple(context), _Asked(context))
            same.continuations[i] = continuation
        return list(asked.values())

    def _batches(self, asked: list[_Asked]) -> Iterator[list[_Asked]]:
        assert isinstance(self.args.batch_size, int)
        for first in range(0, len(asked), self.args.batch_size):
            yield asked[first : first + self.args.batch_size]

    def _read(self, ids: list[int], new_tokens: int) -> tuple[SequenceKV, Tensor]:
        """A context as a sequence, and logits [vocab] after it. new_tokens: that may follow."""
        runner = self.llm.engine.runner
        with runner.threads():
            prefill = runner.begin(ids, new_tokens=new_tokens)
            logits = runner.prefill(prefill)
            while prefill.done < len(ids):
                logits = runner.prefill(prefill)
            return runner.finish(prefill), logits

    def _step(self, kvs: list[SequenceKV], token_ids: list[int]) -> Tensor:
        runner = self.llm.engine.runner
        with runner.threads():
            logits = runner.decode(kvs, token_ids)
            for kv in kvs:
                kv.settle()
        return logits

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Texts that follow contexts, up to a stop string."""
        wanted = [self._prompt_and_params(*request.args) for request in requests]
        added: list[Request] = []
        try:
            for prompt_ids, params in wanted:
                added.append(self.llm.engine.add(prompt_ids, params))
        except BaseException:
            for request in added:
                self.llm.engine.abort(request.id)
            self.llm.engine.news()  # of what was aborted just now
            raise
        numbers = {request.id: i for i, request in enumerate(added)}
        texts = [""] * len(added)
        with (
            tqdm(
                total=len(added), desc="Running generate_until requests", disable=disable_tqdm
            ) as bar,
            closing(self.llm.run(added)) as events,
        ):
            for event in events:
                if event.error:
                    raise event.error
                i = numbers[event.request_id]
                texts[i] += event.text
                if event.finish:
                    self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
                    bar.update()
        return texts

    def _prompt_and_params(
        self, context: str, gen_kwargs: Mapping[str, Any]
    ) -> tuple[list[int], SamplingParams]:
        """A prompt, cut where it and its answer exceed the model's context, and how it goes on.

        Where nothing else is said, seeds come from torch's generator, which the harness has seeded.
        """
        options: dict[str, Any] = dict(normalize_gen_kwargs(dict(gen_kwargs), self.max_gen_toks))
        max_tokens = options.pop("max_gen_toks")
        sampled = options.pop("do_sample")
        options.setdefault("temperature", 1.0 if sampled else 0.0)
        options["stop"] = tuple(text for text in options.pop("until") if text)
        if sampled and options.get("seed") is None:
            options["seed"] = int(torch.randint(2**62, ()))
        room = self.max_length - max_tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks must be below max_length, {self.max_length}, not {max_tokens}"
            )
        known = {each.name for each in fields(SamplingParams)} - {"n", "logprobs"}
        for name in options.keys() - known:
            raise ValueError(
                f"unknown generation argument {name}={options[name]!r}; known: "
                f"{', '.join(sorted({'until', 'max_gen_toks', 'do_sample', *known}))}"
            )
        prompt_ids = (self.tok_encode(context) or [self.prefix_token_id])[-room:]
        return prompt_ids, SamplingParams(max_tokens=max_tokens, **options)


if NAME not in MODEL_REGISTRY:  # an entry point that is being loaded is there already
    register_model(NAME)(MagicPigLM)


def main() -> None:
    """The harness's own command line; errors of ours in a line."""
    from lm_eval.__main__ import cli_evaluate  # type: ignore[import-untyped]

    try:
        cli_evaluate()
    except (ValueError, ModelError) as error:
        sys.exit(f"magicpig: error: {error}")


if __name__ == "__main__":
    main()
