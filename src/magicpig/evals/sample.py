"""A prompt whose answer is known: what every generation task hands to the runner."""

from __future__ import annotations

from dataclasses import dataclass

from magicpig.config import Strict

MATCHES = ("all", "any")


@dataclass(frozen=True)
class Sample(Strict):
    """A prompt whose answer is known.

    task, index: which sample it is.
    context: what is read before the question.
    question: asked after it; context + question is the user's turn.
    answer_prefix: the beginning of the answer, given to the model after its chat template's
        generation prompt.
    answers: texts to be found in the output.
    max_tokens: of the output.
    match: "all" scores the share of the answers that was found, "any" whether one was.
    """

    task: str
    index: int
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_tokens: int
    match: str = "all"

    def __post_init__(self) -> None:
        if not self.answers or not all(self.answers):
            raise ValueError(f"answers must be texts to look for, not {self.answers!r}")
        if self.match not in MATCHES:
            raise ValueError(f"match must be one of {', '.join(MATCHES)}, not {self.match!r}")

    def score(self, output: str) -> float:
        """From 0 to 1: which answers occur in `output`, without regard to case."""
        output = output.lower()
        found = [answer.lower() in output for answer in self.answers]
        return float(any(found)) if self.match == "any" else sum(found) / len(found)
