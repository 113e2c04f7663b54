"""Harness: one model, several methods: a prompt is read once, and each method goes on from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from magicpig.attention.plan import make_plan
from magicpig.config import WindowConfig
from magicpig.engine.runner import Runner
from magicpig.hf.cache import full_attention_layers
from magicpig.kv.sequence import SequenceKV
from magicpig.models import LoadedModel, load
from magicpig.models.identity import identity


@dataclass(frozen=True)
class Read:
    """A prompt as each method keeps it, and the logits [vocab] after its last token."""

    kvs: list[SequenceKV]
    logits: Tensor


class Harness:
    """model: as magicpig.LLM takes it. methods: specs, see magicpig.attention.registry.

    Tokens are chosen by whoever calls `step`: this is for measuring, not for serving.
    """

    def __init__(
        self,
        model: str | LoadedModel,
        methods: Sequence[str],
        *,
        dense_layers: Sequence[int] | None = None,
        window: WindowConfig | None = None,
        device: str = "auto",
        dtype: str = "auto",
    ) -> None:
        if not methods:
            raise ValueError("methods is empty: name one at least, like full or lsh:10:150")
        for method in methods:
            make_plan(method, 1, dense_layers=())  # before a model is loaded for nothing
        loaded = load(model, device, dtype) if isinstance(model, str) else model
        config = loaded.model.config.get_text_config(decoder=True)
        self.plans = [
            make_plan(
                method,
                config.num_hidden_layers,
                dense_layers=dense_layers,
                full_layers=full_attention_layers(loaded.model.config),
            )
            for method in methods
        ]
        self.methods = [plan.method.spec for plan in self.plans]
        if len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods must differ from each other: {', '.join(self.methods)}")
        self.dense_layers = sorted(
            frozenset[int]().union(*(plan.dense_layers for plan in self.plans))
        )
        self.tokenizer = loaded.tokenizer
        self.identity = identity(loaded.model)
        self.max_length, self.end_token_ids = loaded.max_length, loaded.end_token_ids
        self.window = WindowConfig.given(window)
        self.runner = Runner(loaded.model, self.plans[0], self.window)
        self.dtype = str(self.runner.dtype).removeprefix("torch.")

    def read(
        self,
        prompt_ids: list[int],
        new_tokens: int,
        on_part: Callable[[int], None] | None = None,
    ) -> Read:
        """Reads a prompt exactly.

        new_tokens: that may follow. on_part: told how many tokens are read.
        """
        return self.read_parts([prompt_ids], new_tokens, on_part=on_part)[0]

    def read_parts(
        self,
        parts: Sequence[list[int]],
        new_tokens: int,
        methods: Sequence[str] | None = None,
        on_part: Callable[[int], None] | None = None,
    ) -> list[Read]:
        """Reads a prompt, and gives it as it is after each of its parts.

        new_tokens: that may follow after all of them. methods: some of the harness's; None: all.
        """
        prompt_ids = [token for part in parts for token in part]
        self._check(parts, len(prompt_ids))
        plans = [self.plans[self.methods.index(method)] for method in methods or self.methods]
        watch = any(plan.method.watches_prompts for plan in plans)
        reads = []
        with self.runner.threads():
            prefill = self.runner.begin(prompt_ids, watch=watch, early=False, new_tokens=new_tokens)
            for part in parts:
                prefill.prompt_ids = prompt_ids[: prefill.done + len(part)]
                while prefill.done < len(prefill.prompt_ids):
                    logits = self.runner.prefill(prefill)
                    if on_part:
                        on_part(prefill.done)
                reads.append(Read(self.runner.finish_under(prefill, plans), logits.float()))
        return reads

    def _check(self, parts: Sequence[list[int]], tokens: int) -> None:
        if not parts or not all(parts):
            raise ValueError("the prompt is empty: it has no tokens")
        if len(parts) > 1 and any(len(part) == 1 for part in parts):
            raise ValueError("parts of a prompt must have two tokens at least, not one")
        if tokens > self.max_length:
            raise ValueError(
                f"the prompt has {tokens} tokens, the model's context holds {self.max_length}"
            )

    def step(self, kvs: list[SequenceKV], token_ids: list[int]) -> Tensor:
        """One token of each sequence; logits [batch, vocab] after it, in float32."""
        with self.runner.threads():
            logits = self.runner.decode(kvs, token_ids)
            for kv in kvs:
                kv.settle()
        return logits.float()
