"""A document and a question as the tokens of a prompt, in two parts: the document's part comes
first and does not depend on the question, so that it can be read once for many questions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from magicpig.models.quiet import token_ids

_QUESTION = "\u2063magicpig question\u2063"  # stands for the question while the template is cut


@dataclass(frozen=True)
class Document:
    """What a prompt says before its question.

    system: the system message; None: the model's own, if its template has one.
    raw: no chat template: the text is to be continued, not answered.
    """

    text: str = ""
    system: str | None = None
    raw: bool = False

    def __post_init__(self) -> None:
        for name, text in (("text", self.text), ("system", self.system or "")):
            if not isinstance(text, str):
                raise TypeError(f"{name} must be a str, not {text!r}")
        if self.raw and self.system is not None:
            raise ValueError("system is a message of the chat template, which raw leaves out")

    def parts(
        self, tokenizer: PreTrainedTokenizerBase, question: str
    ) -> tuple[list[int], list[int]]:
        """Tokens of the document's part, and of the rest of the prompt."""
        before, after = self._around_question(tokenizer)
        first = token_ids(tokenizer, before, special=self.raw)
        rest = token_ids(tokenizer, question + after, special=False)
        return first, rest

    def _around_question(self, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
        document = f"{self.text}\n\n" if self.text else ""
        if self.raw:
            return document, ""
        if tokenizer.chat_template is None:
            raise ValueError("the model has no chat template: continue raw text with --raw")
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages.append({"role": "user", "content": document + _QUESTION})
        text: Any = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        before, _, after = str(text).partition(_QUESTION)
        return before, after

    def cut_left(
        self, tokenizer: PreTrainedTokenizerBase, question: str, max_tokens: int
    ) -> Document:
        """The document without its beginning, so that the prompt has max_tokens tokens at most."""
        tokens = token_ids(tokenizer, self.text, special=False)
        document = self
        while (over := sum(map(len, document.parts(tokenizer, question))) - max_tokens) > 0:
            if not tokens:
                raise ValueError(
                    f"the prompt has {over} tokens too many without any of the document: "
                    "shorten the question or the system message, or ask for fewer new tokens"
                )
            tokens = tokens[over:]
            document = Document(str(tokenizer.decode(tokens)), self.system, self.raw)
        return document
