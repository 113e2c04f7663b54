"""How far contexts are cut into segments, how these grow, and what is held of them meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from magicpig.config import IndexConfig, ScanConfig

LONGEST = 65_536  # tokens of a segment, as in segment.h
LEAST_EARLY = 4096  # far tokens that are not made so all at the end, or codes of some of them
BUILT_AT_ONCE = 3  # layers, of prompts that are being read
MOST_AHEAD = 6  # segments whose keys are sorted or hashed before the native core has time for them
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


def early_pieces(far: int, index: IndexConfig | None) -> list[int]:
    """Segments of a prompt that is made far while it is read.

    An index is made of all keys of a segment. lsh looks into each table of each segment, small as
    it may be: they are to be few. Codes of three quarters of what is no full segment are made
    before the last quarter is there.
    """
    rest = far % LONGEST
    if not isinstance(index, ScanConfig) or rest < LEAST_EARLY:
        return pieces(far)
    return [*pieces(far - rest), rest - rest // 4, rest // 4]


def early_segment(built: int, far: int, index: IndexConfig | None) -> tuple[int, int] | None:
    """Where the segment begins that gets the next token, and where it ends; None: it gets none.

    built: tokens before it. far: how many there will be.
    """
    first = 0
    for size in early_pieces(far, index) if far >= LEAST_EARLY else ():
        if first + size > built:
            return first, first + size
        first += size
    return None


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
