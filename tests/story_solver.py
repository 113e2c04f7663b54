"""Solves problems of reasoning from their text alone: the truth that the generator is held to."""

from __future__ import annotations

import re
from dataclasses import dataclass

Quantity = tuple[str, str]  # place, thing

_PLACE = r"([A-Z]\w+ [A-Z]\w+)"
_FORMS = {
    "given": re.compile(rf"{_PLACE} has (\d+) (\w+)\."),
    "more": re.compile(rf"{_PLACE} has (\d+) more (\w+) than {_PLACE} has (\w+)\."),
    "fewer": re.compile(rf"{_PLACE} has (\d+) fewer (\w+) than {_PLACE} has (\w+)\."),
    "times": re.compile(rf"{_PLACE} has (\d+) times as many (\w+) as {_PLACE} has (\w+)\."),
    "together": re.compile(
        rf"{_PLACE} has as many (\w+) as {_PLACE} has (\w+) and {_PLACE} has (\w+) together\."
    ),
}
_ASKED = re.compile(rf"How many (\w+) does {_PLACE} have\?")


@dataclass(frozen=True)
class Solution:
    """answer: to the question. operations: what it takes. used, num_statements: the statements
    that are needed, and how many there are."""

    answer: int
    operations: int
    used: tuple[str, ...]
    num_statements: int


def solve(context: str, question: str) -> Solution:
    """The answer to a problem's question.

    ValueError for a statement that is not understood, for two about one quantity, and where the
    question cannot be answered.
    """
    asked = _ASKED.search(question)
    if asked is None:
        raise ValueError(f"no quantity is asked for in {question!r}")
    defined: dict[Quantity, tuple[str, str, list[str]]] = {}
    sentences = re.split(r"(?<=\.) ", context.rpartition("Statements:")[2].strip())
    for sentence in sentences:
        form, groups = _parsed(sentence)
        quantity = (groups[0], groups[1 if form == "together" else 2])
        if quantity in defined:
            raise ValueError(f"two statements about one quantity: {sentence!r}")
        defined[quantity] = (sentence, form, groups)

    used: list[str] = []
    values: dict[Quantity, int] = {}
    operations = 0

    def value(quantity: Quantity, above: tuple[Quantity, ...] = ()) -> int:
        nonlocal operations
        if quantity in values:
            return values[quantity]
        if quantity not in defined or quantity in above:
            raise ValueError(f"{quantity} is not defined, or by itself")
        sentence, form, groups = defined[quantity]
        used.append(sentence)
        above = (*above, quantity)
        if form == "given":
            result = int(groups[1])
        elif form == "together":
            one, two = (groups[2], groups[3]), (groups[4], groups[5])
            result = value(one, above) + value(two, above)
        else:
            number, base = int(groups[1]), value((groups[3], groups[4]), above)
            result = {"more": base + number, "fewer": base - number, "times": base * number}[form]
        operations += form != "given"
        values[quantity] = result
        return result

    answer = value((asked[2], asked[1]))
    return Solution(answer, operations, tuple(used), len(sentences))


def _parsed(sentence: str) -> tuple[str, list[str]]:
    for form, pattern in _FORMS.items():
        if match := pattern.fullmatch(sentence):
            return form, list(match.groups())
    raise ValueError(f"not understood: {sentence!r}")
