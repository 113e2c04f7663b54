"""From logits to tokens, for a batch whose sequences each have their own parameters.

The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p, draw.
Rows are worked on one at a time, so what shares a batch cannot change a sequence's tokens.
numpy and torch are both used on purpose: on the CPU each is several times quicker at some step
(numpy at argmax, torch at softmax and running sums).
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from magicpig.engine.params import SamplingParams

Floats = npt.NDArray[np.floating[Any]]
Ids = npt.NDArray[np.int64]

GROUP = 64  # logits whose maxima alone are looked at first


@dataclass(frozen=True)
class Choice:
    """A token, its log-probability if asked for, and (token, log-probability) of the likeliest."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class BadLogits(RuntimeError):
    """Logits no token can be chosen from: a NaN among them, or a largest one that is infinite."""


class Sampler:
    """The state of one completion: its random numbers and the tokens it has seen.

    prompt_ids: the prompt, for the repetition penalty.
    index: which of the request's n completions this is; each has its own random numbers.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], index: int = 0) -> None:
        self.params = params
        self._random = _generator(params.seed, index)
        # Replaced, never written to: forks share it. None: nobody asks what was seen.
        self._seen: Ids | None = None
        if params.repetition_penalty != 1:
            self._seen = np.unique(np.asarray(prompt_ids, dtype=np.int64))

    def fork(self, index: int) -> Sampler:
        """Another completion: the same tokens seen so far, random numbers of its own."""
        other = copy.copy(self)
        other._random = _generator(self.params.seed, index)
        return other

    @property
    def is_argmax(self) -> bool:
        """Whether the choice is the largest logit and nothing else is asked for."""
        return self.params.greedy and self._seen is None and self.params.logprobs is None

    def choose(self, logits: Floats) -> Choice | BadLogits:
        """The next token from `logits` [vocab], float32; they are left as they are."""
        token = int(logits.argmax())  # the first NaN where there is one
        if not np.isfinite(logits[token]):
            return _bad_logits(logits[token])
        scores = self._penalised(logits)
        if not self.params.greedy:
            token = self._draw(scores)
        elif scores is not logits:
            token = int(scores.argmax())
        self._note(token)
        if self.params.logprobs is None:
            return Choice(token)
        logprobs = torch.from_numpy(logits).log_softmax(-1).numpy()
        return Choice(token, float(logprobs[token]), _likeliest(logprobs, self.params.logprobs))

    def _penalised(self, logits: Floats) -> Floats:
        if self._seen is None:
            return logits
        # A prompt may hold ids that the model has an input embedding but no logit for.
        ids = self._seen[self._seen < len(logits)]
        seen, penalty = logits[ids], self.params.repetition_penalty
        scores = logits.copy()
        scores[ids] = np.where(seen < 0, seen * penalty, seen / penalty)
        return scores

    def _draw(self, scores: Floats) -> int:
        ids, probabilities = candidates(scores, self.params)
        running = torch.from_numpy(probabilities).cumsum(0, dtype=torch.float64).numpy()
        # Below the total even after rounding, so that the token found has a probability above 0.
        target = min(self._random.random() * running[-1], np.nextafter(running[-1], 0))
        return int(ids[running.searchsorted(target, side="right")])

    def _note(self, token: int) -> None:
        if self._seen is not None and not (self._seen == token).any():
            self._seen = np.append(self._seen, token)


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[Choice | BadLogits]:
    """The next token of every sequence; of equally likely greedy choices the lowest id.

    logits: [batch, vocab], any float type, on any device. A row that no token can be chosen from
    has a `BadLogits` (returned, not raised) in its place: the other rows go on, and that row's
    sampler is as it was.
    """
    if logits.dim() != 2 or len(logits) != len(samplers):
        raise ValueError(
            f"logits must be [{len(samplers)}, vocab] for {len(samplers)} samplers, "
            f"not {list(logits.shape)}"
        )
    logits = logits.detach()
    if logits.device.type != "cpu":
        if all(sampler.is_argmax for sampler in samplers):
            return argmax_on_device(logits)
        logits = logits.cpu()
    pairs = zip(logits, samplers, strict=True)
    return [_chosen(row, sampler) for row, sampler in pairs]


def _chosen(logits: Tensor, sampler: Sampler) -> Choice | BadLogits:
    try:
        return sampler.choose(logits.float().numpy())
    except Exception as error:  # whatever a row does, the others have their tokens
        return BadLogits(f"no token can be chosen: {error!r}")


def argmax_on_device(logits: Tensor) -> list[Choice | BadLogits]:
    """`sample` where every sampler `is_argmax`; only the chosen tokens leave the device."""
    largest, tokens = logits.max(dim=-1)
    pairs = zip(tokens.tolist(), largest.tolist(), strict=True)
    return [Choice(t) if math.isfinite(value) else _bad_logits(value) for t, value in pairs]


def candidates(scores: Floats, params: SamplingParams) -> tuple[Ids, Floats]:
    """The tokens that may be drawn, by rising id, and their probabilities up to a common factor.

    scores: [vocab] float32, after the repetition penalty; `params` must not be greedy.
    """
    scaled = scores / params.temperature
    ids = np.arange(len(scores))
    if 0 < params.top_k < len(scores):
        ids = np.flatnonzero(scaled >= _nth_largest(scaled, params.top_k))
        scaled = scaled[ids]
    probabilities: Floats = torch.from_numpy(scaled).softmax(-1).numpy()
    floor = params.min_p * probabilities.max()
    if params.top_p < 1:
        kept = _nucleus(probabilities, params.top_p)
        ids, probabilities = ids[kept], probabilities[kept]
    if params.min_p > 0:
        kept = np.flatnonzero(probabilities >= floor)
        ids, probabilities = ids[kept], probabilities[kept]
    return ids, probabilities


def _nucleus(probabilities: Floats, top_p: float) -> Ids:
    """Positions, rising, of the fewest likeliest tokens that reach `top_p`.

    Only tokens above a floor are sorted. The last floor always suffices: all tokens below it
    together have less than 1 - top_p.
    """
    for floor in (1e-3, 1e-4, (1 - top_p) / len(probabilities)):
        positions = np.flatnonzero(probabilities >= floor)
        above = probabilities[positions]
        if above.sum() >= top_p:
            break
    falling = np.sort(above)[::-1]
    count = min(int(falling.cumsum(dtype=np.float64).searchsorted(top_p)) + 1, len(falling))
    return positions[_largest(above, count, falling[count - 1])]


def _largest(values: Floats, count: int, last: np.floating[Any]) -> Ids:
    """Positions, rising, of the `count` largest values, down to `last`; of equal ones the first."""
    kept = values > last
    kept[np.flatnonzero(values == last)[: count - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def _nth_largest(values: Floats, n: int) -> np.floating[Any]:
    if n * GROUP <= len(values):
        # n groups or more, so the n-th largest of their maxima is no larger than what is sought.
        maxima = values[: len(values) // GROUP * GROUP].reshape(GROUP, -1).max(axis=0)
        values = values[values >= np.partition(maxima, -n)[-n]]
    return np.partition(values, -n)[-n]  # type: ignore[no-any-return]


def _likeliest(logprobs: Floats, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    count = min(count, len(logprobs))
    ids = _largest(logprobs, count, _nth_largest(logprobs, count))
    best_first = ids[np.argsort(-logprobs[ids], kind="stable")]
    return tuple((int(i), float(logprobs[i])) for i in best_first if logprobs[i] > -np.inf)


def _bad_logits(largest: float) -> BadLogits:
    return BadLogits(f"no token can be chosen: the largest of the logits is {largest}")


def _generator(seed: int | None, index: int) -> random.Random:
    # Text is hashed before it seeds: neighbouring seeds and indices have unrelated numbers.
    return random.Random() if seed is None else random.Random(f"{seed}/{index}")
