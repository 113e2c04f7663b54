"""How far contexts are cut into segments, how these grow, and what is held of them meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from magicpig.config import IndexConfig, LSHConfig

LONGEST = 65_536  # tokens of a segment, as in segment.h
LEAST_EARLY = 12_288  # of what is less than that
PART = 4096  # tokens that a growing segment gets at once
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


class Early(NamedTuple):
    """Tokens of a prompt that are made far while others are read, their place in their segment, and
    how many that will have."""

    tokens: int
    place: int
    segment: int

    @property
    def is_last(self) -> bool:
        return self.place + self.tokens == self.segment


def next_early(built: int, far: int, index: IndexConfig | None) -> Early | None:
    """A full segment; then three quarters of the rest, once, so that little is left for the end;
    then none. lsh looks into each table of each segment, small as it may be, and has as few of them
    as there can be: they grow.

    built: tokens that have been made far. far: how many will be.
    """
    left, place = far - built, built % LONGEST
    if isinstance(index, LSHConfig):
        segment = min(LONGEST, place + left)
        tokens = min(PART, segment - place)
        worth = segment >= max(PART, index.shortest_indexed)
        return Early(tokens, place, segment) if worth and tokens else None
    tokens = LONGEST if left >= LONGEST else 0 if place else left * 3 // 4
    return Early(tokens, 0, tokens) if tokens >= min(LONGEST, LEAST_EARLY) else None


def early_pieces(far: int, index: IndexConfig | None) -> list[int]:
    """Segments of a prompt, parts of which are made early."""
    if isinstance(index, LSHConfig):
        return pieces(far)
    sizes, built = list[int](), 0
    while early := next_early(built, far, index):
        sizes.append(early.tokens)
        built += early.tokens
    return sizes + pieces(far - built)


def pieces(tokens: int) -> list[int]:
    """Segments of tokens that come together."""
    full, rest = divmod(tokens, LONGEST)
    return [LONGEST] * full + [rest] * (rest > 0)


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
