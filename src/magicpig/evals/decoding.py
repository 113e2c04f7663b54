"""Answers: many sequences decoded together, the likeliest token each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from magicpig.evals.harness import Harness
from magicpig.kv.cost import Cost
from magicpig.kv.sequence import SequenceKV


@dataclass
class Answer:
    """An answer on its way.

    method: its spec.
    forced: tokens that are fed first, whatever the model says; the answer comes after them.
    token_ids: the answer's. last: the newest token, which is not fed yet.
    cost: of its steps, once it is finished.
    """

    method: str
    kv: SequenceKV
    max_tokens: int
    forced: list[int]
    token_ids: list[int] = field(default_factory=list)
    last: int = -1
    finished: bool = False
    cost: Cost = Cost()  # noqa: RUF009

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
    on_cpu = harness.runner.device.type == "cpu"
    while any(not answer.finished for answer in running):
        left = [answer for answer in running if not answer.finished]
        # Sequences that leave make others of their method sit together anew: on a GPU that takes
        # more time and memory than to take finished ones along until all of a method are.
        methods = {answer.method for answer in left}
        running = left if on_cpu else [a for a in running if a.method in methods]
        logits = harness.step([a.kv for a in running], [a.last for a in running])
        best = logits.argmax(-1).tolist()
        finite = torch.isfinite(logits.sum(-1)).tolist()
        for answer, token, fine in zip(running, best, finite, strict=True):
            if answer.finished:
                continue
            if not fine:
                raise RuntimeError("the model gave numbers that are not finite")
            answer.take(token, harness.end_token_ids)
            if answer.finished:
                answer.cost = answer.kv.cost
        if on_step:
            on_step(len(left))
