"""A sample before its length is known, and the search for the length."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

PROBE = 16  # units that are tried first; how many tokens they take tells how to go on


@dataclass(frozen=True)
class Draft:
    """A sample whose context has yet to get as many units (sentences, needles, words) as fit.

    context: of a number of units, from `least` to `most`; a function of that number alone.
    """

    context: Callable[[int], str]
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_tokens: int
    least: int
    most: int | None = None
    match: str = "all"


def most_units(tokens: Callable[[int], int], length: int, least: int, most: int | None) -> int:
    """The number of units whose `tokens` are at most `length` while those of one more are not.

    Counting is what takes time, so every count is used to guess how many units fit: four to ten
    counts are enough. `most` is returned if even that fits.
    """
    fits, fits_tokens = least, tokens(least)
    if fits_tokens > length:
        raise ValueError(f"its shortest form has {fits_tokens}")
    exceeds = None if most is None else most + 1
    guess, per_unit = least + PROBE, 1.0
    while exceeds is None or exceeds - fits > 1:
        guess = max(guess, fits + 1)
        if exceeds is not None:
            guess = min(guess, exceeds - 1)
        guess_tokens = tokens(guess)
        per_unit = (guess_tokens - fits_tokens) / (guess - fits) or per_unit
        if guess_tokens <= length:
            fits, fits_tokens = guess, guess_tokens
        else:
            exceeds = guess
        guess = fits + int((length - fits_tokens) / per_unit)
    return fits


def spread(rng: random.Random, count: int) -> list[float]:
    """Places for `count` things in a text of any length, in order, as shares of its length."""
    return sorted(rng.random() for _ in range(count))


def insert(lines: list[str], things: list[str], places: list[float]) -> list[str]:
    """`lines` with `things` between them: each before the line at its place (see `spread`)."""
    result, start = [], 0
    for thing, place in zip(things, places, strict=True):
        stop = int(place * len(lines))
        result += [*lines[start:stop], thing]
        start = stop
    return result + lines[start:]
