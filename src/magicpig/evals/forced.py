"""Forced decoding: how likely a model finds tokens that are given, not chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magicpig.kv.sequence import SequenceKV

Step = Callable[[list[SequenceKV], list[int]], Tensor]


@dataclass(frozen=True)
class Forced:
    """A continuation that a sequence was given.

    logprobs: float64 [tokens], of each token after all before it.
    greedy: whether every token was the likeliest, so that greedy decoding would have given it.
    """

    logprobs: Tensor
    greedy: bool


def force(
    step: Step,
    kvs: Sequence[SequenceKV],
    logits: Sequence[Tensor],
    continuations: Sequence[Sequence[int]],
    on_step: Callable[[], None] | None = None,
) -> list[Forced]:
    """Feeds every sequence its continuation, token by token, all of them as one batch.

    step: takes one token of each sequence; gives logits [batch, vocab] after it.
    kvs: prompts as they were read; they go on from there.
    logits: [vocab] after each prompt.
    continuations: token ids; those that end early leave the batch. Last tokens are not fed.
    on_step: called after each step.
    """
    logprobs: list[list[float]] = [[] for _ in kvs]
    greedy = [True] * len(kvs)
    left = [i for i, tokens in enumerate(continuations) if tokens]
    rows = torch.stack([logits[i] for i in left]) if left else torch.empty(0)
    at = 0
    while left:
        tokens = [continuations[i][at] for i in left]
        found = _logprobs(rows, tokens)
        best = rows.argmax(-1).tolist()
        for i, token, logprob, likeliest in zip(left, tokens, found, best, strict=True):
            if logprob != logprob:
                raise ValueError(
                    f"logits after {kvs[i].num_tokens} tokens are NaN: the model cannot compute "
                    "this text in its dtype"
                )
            logprobs[i].append(logprob)
            greedy[i] &= token == likeliest
        at += 1
        left = [i for i in left if len(continuations[i]) > at]
        if left:
            rows = step([kvs[i] for i in left], [continuations[i][at - 1] for i in left])
            if on_step:
                on_step()
    return [
        Forced(torch.tensor(values, dtype=torch.float64), all_best)
        for values, all_best in zip(logprobs, greedy, strict=True)
    ]


def _logprobs(rows: Tensor, tokens: list[int]) -> list[float]:
    """Of one token of each row [vocab]."""
    chosen = (
        rows.float().log_softmax(-1).gather(-1, torch.tensor(tokens, device=rows.device)[:, None])
    )
    return [float(value) for value in chosen[:, 0].tolist()]
