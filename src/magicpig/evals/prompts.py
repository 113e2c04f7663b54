"""A sample as the tokens of a prompt: what is read, and what is asked."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from magicpig.evals.sample import Sample
from magicpig.models.quiet import token_ids

PROTOCOLS = ("easy", "hard")


@dataclass(frozen=True)
class Prompt:
    """context: tokens that are read before the question is known. question: all tokens behind it,
    up to where the answer goes on."""

    context: list[int]
    question: list[int]

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.context + self.question)


def fingerprint(tokens: list[int]) -> str:
    """Of a text's tokens, to tell texts apart."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()


def prompt_of(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The sample in the model's chat template, if it has one; the answer is begun."""
    before, after = _around(tokenizer)
    text = before + sample.context + sample.question + after + sample.answer_prefix
    asked_at = len(before) + len(sample.context)
    if not tokenizer.is_fast:
        context = token_ids(tokenizer, text[:asked_at], special=not before)
        return Prompt(context, token_ids(tokenizer, text[asked_at:], special=False))
    encoded = tokenizer(
        text, add_special_tokens=not before, return_offsets_mapping=True, verbose=False
    )
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    split = next(i for i, (_, end) in enumerate(offsets) if end > asked_at)
    return Prompt(ids[:split], ids[split:])


def count_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    return len(token_ids(tokenizer, text, special=False))


def template_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens that the chat template adds to a prompt."""
    return count_tokens("".join(_around(tokenizer)), tokenizer) + 1


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The chat template before and after the user's text; nothing where there is none."""
    if tokenizer.chat_template is None:
        return "", ""
    mark = "\u2063text\u2063"
    messages = [{"role": "user", "content": mark}]
    text: Any = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, _, after = str(text).partition(mark)
    return before, after
