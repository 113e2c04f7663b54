"""Inputs: excerpts of a text, as tokens."""

from __future__ import annotations

import lzma
from importlib import resources
from typing import Any

START_TOKENS = 8  # of the short inputs


def default_text() -> str:
    """Real text that comes with the package."""
    file = resources.files("magicpig.evals") / "data" / "messages.txt.xz"
    return lzma.decompress(file.read_bytes()).decode("utf-8")


def excerpts(tokenizer: Any, text: str, tokens: int, count: int) -> list[list[int]]:
    """Token ids of `count` inputs that begin at different lines, evenly spread over the text.

    They do not overlap where the text is long enough; else each goes on at the text's beginning
    when it comes to its end, so that they are one text in different orders.
    """
    inputs = []
    for i in range(count):
        begin = line_start(text, i * len(text) // count)
        ids = list(tokenizer(text[begin:] + "\n" + text[:begin], verbose=False)["input_ids"])
        if len(ids) < tokens:
            raise ValueError(
                f"the text has only {len(ids):,} tokens, and inputs of {tokens:,} are asked for: "
                "give more text (--file) or ask for less (--tokens)"
            )
        inputs.append(ids[:tokens])
    return inputs


def starts(tokenizer: Any, text: str, count: int) -> list[list[int]]:
    """Up to `count` short inputs with different first tokens, without what a tokenizer puts first.

    No token is special there: what the model makes of a first token is to be seen.
    """
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    step = max(1, len(ids) // (8 * count))
    found: dict[int, list[int]] = {}
    for at in range(0, len(ids) - START_TOKENS, step):
        found.setdefault(ids[at], ids[at : at + START_TOKENS])
        if len(found) == count:
            break
    if len(found) < 2:
        raise ValueError("the text has fewer than two different tokens: give real text")
    return list(found.values())


def first_is_special(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a token before every text, such as a beginning-of-text token."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(tokenizer("a")["input_ids"][:1] != plain[:1])


def line_start(text: str, at: int) -> int:
    """Where the first line after `at` begins; `at` itself where no line follows."""
    if at == 0:
        return 0
    found = text.find("\n", at) + 1
    return found if 0 < found < len(text) else at
