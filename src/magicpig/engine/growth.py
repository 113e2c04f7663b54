"""How far contexts grow by segments, and what is held of them at most while they do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from magicpig.kv.hybrid_layer import FULL_SEGMENT as LONGEST
from magicpig.kv.hybrid_layer import LEAST_EARLY

FANOUT = 4  # as in layer_kv.cpp
FOLLOWED = 4096  # blocks; what comes behind them is taken to be added and no more


@lru_cache(maxsize=1024)
def most_held(prompt: tuple[int, ...], blocks: int, block: int) -> tuple[int, ...]:
    """Sizes of a sequence's own segments when they are most, beside those of its prompt.

    Block by block is appended to a copy of the list of segments, which takes the list's place when
    the next block is full. What was merged for it is there twice until then, and a prompt that
    others share is copied.
    """
    sizes, of_prompt, most = list(prompt), len(prompt), list[int]()
    for _ in range(min(blocks, FOLLOWED)):
        grown, kept = appended(sizes, block)
        held = sizes[of_prompt:] + grown[kept:]
        if sum(held) > sum(most):
            most = held
        sizes, of_prompt = grown, min(of_prompt, kept)
    return (*most, *pieces(max(0, blocks - FOLLOWED) * block))


def pieces(tokens: int, early: bool = False) -> list[int]:
    """Segments of tokens that come together. early: most of the last one before the rest."""
    full, rest = divmod(tokens, LONGEST)
    some = rest * 3 // 4 if early and rest * 3 // 4 >= LEAST_EARLY else 0
    return [LONGEST] * full + [size for size in (some, rest - some) if size]


def appended(sizes: Sequence[int], count: int) -> tuple[list[int], int]:
    """The list of segments with so many tokens more, and how many at its beginning stay."""
    grown, kept = [*sizes, *pieces(count)], len(sizes)
    while True:
        level, begin = _level(grown[-1]), len(grown)
        while begin and _level(grown[begin - 1]) <= level and grown[begin - 1] < LONGEST:
            begin -= 1
        if len(grown) - begin < FANOUT:
            return grown, kept
        grown[begin:] = pieces(sum(grown[begin:]))
        kept = min(kept, begin)


def _level(tokens: int) -> int:
    level = 0
    while tokens >= FANOUT:
        tokens, level = tokens // FANOUT, level + 1
    return level
