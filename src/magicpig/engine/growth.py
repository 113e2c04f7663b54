"""How far contexts grow by segments, and what is held of them at most while they do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

FANOUT, LONGEST = 4, 65_536  # as in layer_kv.cpp
FOLLOWED = 4096  # blocks; what comes behind them is taken to be added and no more


@lru_cache(maxsize=1024)
def most_held(far: int, new: int, block: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of a prompt's segments, and of a sequence's own ones when these are most.

    far: tokens of the prompt. new: tokens that the sequence goes on for; every `block` of them is
    appended to a copy of the list, which takes the list's place when the next block is full. What
    was merged for it is there twice until then, and a prompt that others share is copied.
    """
    shared = tuple(_pieces(far))
    sizes, of_prompt, most = list(shared), len(shared), list[int]()
    blocks = new // block
    for _ in range(min(blocks, FOLLOWED)):
        grown, kept = appended(sizes, block)
        held = sizes[of_prompt:] + grown[kept:]
        if sum(held) > sum(most):
            most = held
        sizes, of_prompt = grown, min(of_prompt, kept)
    return shared, (*most, *_pieces(max(0, blocks - FOLLOWED) * block))


def appended(sizes: Sequence[int], count: int) -> tuple[list[int], int]:
    """The list of segments with so many tokens more, and how many at its beginning stay."""
    grown, kept = [*sizes, *_pieces(count)], len(sizes)
    while True:
        level, begin = _level(grown[-1]), len(grown)
        while begin and _level(grown[begin - 1]) <= level and grown[begin - 1] < LONGEST:
            begin -= 1
        if len(grown) - begin < FANOUT:
            return grown, kept
        grown[begin:] = _pieces(sum(grown[begin:]))
        kept = min(kept, begin)


def _pieces(count: int) -> list[int]:
    full, rest = divmod(count, LONGEST)
    return [LONGEST] * full + [rest] * (rest > 0)


def _level(tokens: int) -> int:
    level = 0
    while tokens >= FANOUT:
        tokens, level = tokens // FANOUT, level + 1
    return level
