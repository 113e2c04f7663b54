"""How often keys are drawn, by their cosine to the query, against the formula for u."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magicpig.analysis.estimators import log_inclusion
from magicpig.config import LSHConfig

BINS = 40  # of the cosine, from -1 to 1
MIN_DRAWN = 10  # expected draws, below which a bin says nothing


class Inclusion:
    """Counts of keys and of those drawn, in bins of the cosine.

    Keys of one hash function are not drawn independently of each other: what one draw of the
    projection makes of similar keys is similar. So there are two error bars: as if keys were
    independent (binomial), and from the spread between the groups, each with a projection of its
    own (grouped).
    """

    def __init__(self) -> None:
        self.keys = torch.zeros(BINS, dtype=torch.double)
        self.drawn = torch.zeros(BINS, dtype=torch.double)
        self.expected = torch.zeros(BINS, dtype=torch.double)
        self.binomial = torch.zeros(BINS, dtype=torch.double)  # variance of `drawn`
        self.grouped = torch.zeros(BINS, dtype=torch.double)

    def add(self, cosine: Tensor, drawn: Tensor, lsh: LSHConfig) -> None:
        """A group: cosines of queries and centred keys, and which keys (bool) were drawn."""
        cosine, hit = cosine.flatten(), drawn.flatten().double()
        u = log_inclusion(cosine, lsh).double().exp()
        bins = ((cosine + 1) * (BINS / 2)).long().clamp(0, BINS - 1)

        def total(x: Tensor | None) -> Tensor:
            return torch.bincount(bins, x, minlength=BINS).double()

        self.keys += total(None)
        hits, expected = total(hit), total(u)
        self.drawn += hits
        self.expected += expected
        self.binomial += total(u * (1 - u))
        self.grouped += (hits - expected) ** 2

    def include(self, other: Inclusion) -> None:
        """Adds the groups of another."""
        self.keys += other.keys
        self.drawn += other.drawn
        self.expected += other.expected
        self.binomial += other.binomial
        self.grouped += other.grouped

    def result(self) -> list[dict[str, Any]]:
        """A row for every bin with keys in it; errors are one standard deviation of the rate."""
        found = []
        for i in self.keys.nonzero()[:, 0].tolist():
            keys = self.keys[i].item()
            found.append(
                {
                    "cosine_from": -1 + 2 * i / BINS,
                    "cosine_to": -1 + 2 * (i + 1) / BINS,
                    "keys": int(keys),
                    "drawn": int(self.drawn[i].item()),
                    "expected": self.expected[i].item(),
                    "rate": self.drawn[i].item() / keys,
                    "formula": self.expected[i].item() / keys,
                    "binomial_error": self.binomial[i].sqrt().item() / keys,
                    "grouped_error": self.grouped[i].sqrt().item() / keys,
                }
            )
        return found
