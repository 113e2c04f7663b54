"""Answers: many sequences decoded together, the likeliest token each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from magicpig.evals.harness import Harness
from magicpig.kv.sequence import SequenceKV


@dataclass
class Answer:
    """An answer on its way.

    forced: tokens that are fed first, whatever the model says; the answer comes after them.
    token_ids: the answer's. last: the newest token, which is not fed yet.
    """

    kv: SequenceKV
    max_tokens: int
    forced: list[int]
    token_ids: list[int] = field(default_factory=list)
    last: int = -1
    finished: bool = False

    def take(self, token: int, end_token_ids: frozenset[int]) -> None:
        """The likeliest next token; while there are forced ones, the next of those instead."""
        if self.forced:
            self.last = self.forced.pop(0)
            return
        self.last = token
        if token in end_token_ids:
            self.finished = True
            return
        self.token_ids.append(token)
        self.finished = len(self.token_ids) >= self.max_tokens


def decode(
    harness: Harness, answers: Sequence[Answer], on_step: Callable[[int], None] | None = None
) -> None:
    """Takes all answers to their end. Those that have no token yet must have forced ones.

    on_step: told how many answers are not finished.
    """
    for answer in answers:
        if answer.last < 0 and not answer.finished:
            answer.take(-1, harness.end_token_ids)
    running = [answer for answer in answers if not answer.finished]
    # Sequences that leave make the others sit together anew: on a GPU that costs more than to
    # take finished ones along for a while.
    patience = 1 if harness.runner.device.type == "cpu" else 2
    while any(not answer.finished for answer in running):
        left = [answer for answer in running if not answer.finished]
        if len(running) >= patience * len(left):
            running = left
        logits = harness.step([a.kv for a in running], [a.last for a in running])
        best = logits.argmax(-1).tolist()
        finite = torch.isfinite(logits.sum(-1)).tolist()
        for answer, token, fine in zip(running, best, finite, strict=True):
            if answer.finished:
                continue
            if not fine:
                raise RuntimeError("the model gave numbers that are not finite")
            answer.take(token, harness.end_token_ids)
        if on_step:
            on_step(len(left))
