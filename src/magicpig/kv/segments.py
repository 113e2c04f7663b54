"""How far contexts are cut into segments, how these grow, and what is held of them meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from magicpig.config import IndexConfig, LSHConfig

LONGEST = 65_536  # tokens of a segment, as in segment.h
LEAST_EARLY = 12_288  # of what is less than that
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


def early_part(built: int, far: int, index: IndexConfig | None) -> int:
    """Tokens of a prompt to be made a segment next, while others are read: a full segment; then
    three quarters of the rest, once, so that little is left for the end; then none.

    built: how many are in segments. far: how many will be.
    lsh looks into each table of each segment, small as it may be: beside full ones another costs it
    a fiftieth of its speed, beside a rest alone a fifth (docs/log.md).
    """
    left = far - built
    if left >= LONGEST:
        return LONGEST
    rest_begun = built % LONGEST > 0
    costs = isinstance(index, LSHConfig) and not built
    some = 0 if rest_begun or costs else left * 3 // 4
    return some if some >= LEAST_EARLY else 0


def early_pieces(far: int, index: IndexConfig | None) -> list[int]:
    """Segments of a prompt, parts of which are made early."""
    sizes, built = list[int](), 0
    while part := early_part(built, far, index):
        sizes.append(part)
        built += part
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
