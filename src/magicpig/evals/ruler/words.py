"""Counting words: the common words of a numbered list, and the frequent ones of a coded text."""

from __future__ import annotations

import math
import random
import string
from itertools import chain, repeat

from magicpig.evals.ruler.draft import Draft
from magicpig.evals.ruler.texts import more_words, short_words

COMMON_HEAD = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
COMMON_QUESTION = "Question: What are the 10 most common words in the above list?"
COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
NUM_COMMON = 10
LONG = 4096  # tokens from which on the list has the published counts; below, smaller ones

FREQUENT_HEAD = (
    "Read the following coded text and track the frequency of each coded word. Find the three "
    "most frequently appeared coded words. "
)
FREQUENT_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?"
)
FREQUENT_PREFIX = (
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)
DOTS = "..."
LETTERS = 6
ZETA_2 = math.pi**2 / 6
LEAST_CODED = 100  # words: enough for the third coded word to be more frequent than the fourth


def common_words(rng: random.Random, length: int) -> Draft:
    """Ten words that occur often among many that occur rarely, after a solved example.

    A unit is a word of the list, however often it occurs.
    """
    short = length < LONG
    often, rarely = (6, 1) if short else (30, 3)
    example = rng.sample(short_words(), 20 if short else 40)
    solved = _numbered_list(example, *((3, 1) if short else (10, 3)), rng)
    start = (
        f"{COMMON_HEAD}{solved}\n{COMMON_QUESTION}{COMMON_PREFIX} "
        f"{_numbered(example[:NUM_COMMON])}\n{COMMON_HEAD}"
    )
    pool = [
        *rng.sample(short_words(), len(short_words())),
        *rng.sample(more_words(), len(more_words())),
    ]
    shuffle = rng.random()

    def context(units: int) -> str:
        order = random.Random(f"{shuffle} {units}")
        return start + _numbered_list(pool[:units], often, rarely, order) + "\n"

    return Draft(
        context=context,
        question=COMMON_QUESTION,
        answer_prefix=COMMON_PREFIX,
        answers=tuple(pool[:NUM_COMMON]),
        max_tokens=120,
        least=2 * NUM_COMMON,
        most=len(pool),
    )


def frequent_words(rng: random.Random, length: int) -> Draft:
    """Words of random letters, the k-th of them 1 / k**2 as often as the first, which are dots.

    A unit is a word of the text.
    """
    vocabulary: dict[str, None] = {DOTS: None}
    while len(vocabulary) < max(5, length // 50):
        vocabulary["".join(rng.choices(string.ascii_lowercase, k=LETTERS))] = None
    shuffle = rng.random()

    def context(units: int) -> str:
        words = list(
            chain.from_iterable(
                repeat(word, int(units / (ZETA_2 * rank**2)))
                for rank, word in enumerate(vocabulary, start=1)
            )
        )
        random.Random(f"{shuffle} {units}").shuffle(words)
        return FREQUENT_HEAD + " ".join(words) + "\n"

    return Draft(
        context=context,
        question=FREQUENT_QUESTION,
        answer_prefix=FREQUENT_PREFIX,
        answers=tuple(vocabulary)[1:4],
        max_tokens=50,
        least=LEAST_CODED,
    )


def _numbered_list(words: list[str], often: int, rarely: int, rng: random.Random) -> str:
    """The first words `often` times, the others `rarely`, shuffled and numbered."""
    repeated = words[:NUM_COMMON] * often + words[NUM_COMMON:] * rarely
    rng.shuffle(repeated)
    return _numbered(repeated)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
