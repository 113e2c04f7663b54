"""Needles in a haystack: find the values of one or more keys among text, noise or other needles."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from magicpig.evals.ruler.draft import Draft, insert, spread
from magicpig.evals.ruler.texts import NOISE, adjectives, nouns, sentences

HEAD = (
    "{some} special magic {values} {are} hidden within the following text. Make sure to memorize "
    "it. I will quiz you about the {values} afterwards.\n"
)
QUESTION = "What {are_all} the special magic {values} for {keys} mentioned in the provided text?"
PREFIX = " The special magic {values} for {keys} mentioned in the provided text {are}"
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
SINGULAR = {"some": "A", "are": "is", "are_all": "is"}
PLURAL = {"some": "Some", "are": "are", "are_all": "are all"}
DEPTHS = [round(100 * i / 39) / 100 for i in range(40)]  # of needles in a text


@dataclass(frozen=True)
class NeedleTask:
    """haystack: "noise", "essay" or "needle"; keys, values: "words", "numbers" or "uuids"."""

    haystack: str
    keys: str
    values: str
    num_keys: int = 1
    values_per_key: int = 1
    num_queries: int = 1


NEEDLE_TASKS = {
    "niah_single_1": NeedleTask("noise", "words", "numbers"),
    "niah_single_2": NeedleTask("essay", "words", "numbers"),
    "niah_single_3": NeedleTask("essay", "words", "uuids"),
    "niah_multikey_1": NeedleTask("essay", "words", "numbers", num_keys=4),
    "niah_multikey_2": NeedleTask("needle", "words", "numbers"),
    "niah_multikey_3": NeedleTask("needle", "uuids", "uuids"),
    "niah_multivalue": NeedleTask("essay", "words", "numbers", values_per_key=4),
    "niah_multiquery": NeedleTask("essay", "words", "numbers", num_keys=4, num_queries=4),
}


def needles(task: NeedleTask, rng: random.Random) -> Draft:
    """A unit is a sentence of the text, a line of the noise or another needle."""
    new_key, new_value = _distinct(task.keys, rng), _distinct(task.values, rng)

    def needle(key: str, value: str) -> str:
        return NEEDLE.format(kind=task.values, key=key, value=value)

    hidden = {
        next(new_key): [next(new_value) for _ in range(task.values_per_key)]
        for _ in range(task.num_keys)
    }
    lines = [needle(key, value) for key, values in hidden.items() for value in values]
    rng.shuffle(lines)
    queries = rng.sample(list(hidden), task.num_queries)
    answers = tuple(value for key in queries for value in hidden[key])
    words = (SINGULAR if len(answers) == 1 else PLURAL) | {
        "values": task.values[:-1] if len(answers) == 1 else task.values,
        "keys": ", ".join(queries[:-1]) + ", and " + queries[-1] if queries[1:] else queries[0],
    }
    if task.haystack == "essay":
        places = sorted(rng.sample(DEPTHS, len(lines)))
        hay, separator = _essay(rng.randrange(len(sentences()))), " "
    else:
        places = spread(rng, len(lines))
        separator = "\n"
        if task.haystack == "noise":
            hay = _noise
        else:
            hay = _growing(needle(*pair) for pair in zip(new_key, new_value, strict=True))
    head = HEAD.format(**words)

    def context(units: int) -> str:
        return head + separator.join(insert(hay(units), lines, places)) + "\n"

    return Draft(
        context=context,
        question=QUESTION.format(**words),
        answer_prefix=PREFIX.format(**words),
        answers=answers,
        max_tokens=128,
        least=len(lines),
    )


def _noise(count: int) -> list[str]:
    return [NOISE] * count


def _essay(start: int) -> Callable[[int], list[str]]:
    """The shipped text from its sentence `start`, over and over."""
    text = [*sentences()[start:], *sentences()[:start]]
    return lambda count: (text * -(-count // len(text)))[:count]


def _growing(lines: Iterator[str]) -> Callable[[int], list[str]]:
    """The first of `lines`, which are made once, when they are needed."""
    made: list[str] = []

    def first(count: int) -> list[str]:
        while len(made) < count:
            made.append(next(lines))
        return made[:count]

    return first


def _distinct(kind: str, rng: random.Random) -> Iterator[str]:
    """Random words, numbers or UUIDs without end, none of them twice."""
    draws: dict[str, Callable[[], str]] = {
        "words": lambda: f"{rng.choice(adjectives())}-{rng.choice(nouns())}",
        "numbers": lambda: str(rng.randrange(1_000_000, 10_000_000)),
        "uuids": lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
    }
    draw, seen = draws[kind], set[str]()
    while True:
        if (value := draw()) not in seen:
            seen.add(value)
            yield value
