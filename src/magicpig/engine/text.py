"""From tokens to text, a token at a time: what is shown is final, and stops before a stop string.

The text is that of `tokenizer.decode` over all tokens of the completion without special tokens
and without its clean-up of spaces, which would take back text that was already shown.
"""

from __future__ import annotations

from typing import Any, Protocol

REPLACEMENT = "\ufffd"  # what bytes that are no character (or not yet one) decode to

# A character has four bytes at most. Tokens beyond that are held only for the odd one without text.
MAX_HELD_TOKENS = 8


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    def decode(
        self, token_ids: list[int], skip_special_tokens: bool = ..., **kwargs: Any
    ) -> str | list[str]: ...


class Detokenizer:
    """The text of one completion, streamed.

    Held back until later tokens decide: the bytes of an unfinished character, and text that may
    be the beginning of a string of `stop`. `stopped` says that one of them has appeared; the text
    then ends before it, and whatever follows is dropped. Where several appear, the one that is
    complete first counts, so how the text was cut into tokens makes no difference.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        # The tokens shown last. Pending ones are decoded behind them because a tokenizer may
        # treat the first token of a text differently (it drops its leading space).
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._text = ""  # of context and pending
        self._held = ""  # shown once it cannot become a stop string

    def push(self, token_id: int) -> str:
        """The text that is final now, often empty."""
        return "" if self.stopped else self._before_stop(self._add(token_id))

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        if self.stopped:
            return ""
        text = self._before_stop(self._settle(len(self._pending))) + self._held
        self._held = ""
        return text

    def _add(self, token_id: int) -> str:
        tokens = [*self._context, *self._pending, token_id]
        text = self._decode(tokens)
        if text == self._text and self._never_shows(token_id):
            return ""
        self._pending.append(token_id)
        self._text = text
        if not text.endswith(REPLACEMENT):
            return self._settle(len(self._pending))
        if len(self._pending) > MAX_HELD_TOKENS:
            return self._settle(self._end_of_certain())
        return ""

    def _settle(self, count: int) -> str:
        """Shows the first `count` pending tokens."""
        shown, self._pending = self._pending[:count], self._pending[count:]
        text = self._decode(self._context + shown) if self._pending else self._text
        new = text[len(self._context_text) :]
        self._context_text = self._decode(shown)
        if self._context_text:
            self._context = shown
        else:  # what shows nothing cannot stand in for the beginning of a text
            self._context, self._context_text = self._context + shown, text
        self._text = self._context_text
        if self._pending:
            self._text = self._decode(self._context + self._pending)
        return new

    def _end_of_certain(self) -> int:
        """How many pending tokens no later token can change, where none of them ends cleanly."""
        for count in range(len(self._pending) - 1, 0, -1):
            head = self._decode(self._context + self._pending[:count])
            if head + self._decode(self._pending[count:]) == self._text:
                return count
        return len(self._pending)

    def _never_shows(self, token_id: int) -> bool:
        if self._decode([token_id]):
            return False
        # A mark for a space shows nothing as the first token, but makes the next one second.
        return bool(self._text) or bool(self._decode([token_id], skip_special_tokens=False))

    def _decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return str(
            self._tokenizer.decode(
                tokens,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def _before_stop(self, text: str) -> str:
        text = self._held + text
        found = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        keep = max((_overlap(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
