"""Prefill: a prompt on its way through the model, and how much of it goes at once."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.cache_utils import Cache

PREFILL_TOKENS = 512  # of a prompt at once: bounds the memory of a pass
PREFILL_TOKENS_ON_GPU = 2048  # which has its launches to amortise


def part_tokens_on(device_type: str) -> int:
    """Tokens of a prompt that are read at once."""
    return PREFILL_TOKENS if device_type == "cpu" else PREFILL_TOKENS_ON_GPU


@dataclass
class Prefill:
    """prompt_ids after `done` tokens, into the cache, about `part_tokens` at once.

    long_rope: as in SequenceKV.
    """

    prompt_ids: list[int]
    cache: Cache
    done: int
    part_tokens: int
    long_rope: bool = False

    @property
    def next_part(self) -> list[int]:
        """Never one token alone, which would count as a decode step."""
        left = len(self.prompt_ids) - self.done
        parts = -(-left // self.part_tokens)
        return self.prompt_ids[self.done : self.done + -(-left // parts)]
