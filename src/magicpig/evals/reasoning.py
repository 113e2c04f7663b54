"""Arithmetic told in words, among many statements that do not matter.

In the spirit of GSM-Infinite (arXiv 2502.05252), with statements of our own: "Cedar Bay has 3 more
lynxes than Maple Park has otters." The quantity that is asked for follows from the others by
exactly 2, 4 or 5 operations, each on what the one before gave; all other statements, shuffled among
those that are needed, speak of the same places and things, follow from needed quantities, or have
nothing to do with them. The answer is in the text alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from magicpig.config import check_int
from magicpig.evals.ruler.draft import most_units
from magicpig.evals.sample import Sample
from magicpig.evals.story import Story

OPERATIONS = {"ops2": 2, "ops4": 4, "ops5": 5}
TASKS: tuple[str, ...] = tuple(OPERATIONS)
MAX_LENGTH = 1 << 19

HEAD = """Read the example and then the statements. Most of the statements do not matter.

Example: {statements}
Question: {question}
Solution: {solution}

Statements:
"""
QUESTION = (
    "\nQuestion: {question} Solve it step by step as in the example, with steps such as "
    '"Cedar Bay has 7 + 3 = 10 owls.", and end with "The answer is" and the number.'
)
PREFIX = "Solution:"


class Problem(Sample):
    """A sample whose answer is a number, at the end of a chain of steps."""

    def score(self, output: str) -> float:
        """1 if the number after the first "answer is" is the answer; where those words are missing,
        if the last number is. Numbers are taken whole: 12 is not found in 123 or 12.5."""
        _, told, rest = output.lower().partition("answer is")
        numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", rest if told else output)
        if not numbers:
            return 0.0
        number = float(numbers[0 if told else -1].replace(",", ""))
        return float(number == float(self.answers[0]))


def make(
    task: str,
    length: int,
    index: int,
    count_tokens: Callable[[str], int],
    reserve: int = 0,
    seed: int = 0,
) -> Problem:
    """Problem `index` of `task`, the same for the same arguments.

    length: tokens of the prompt and its answer; one more statement would exceed it.
    count_tokens: how many tokens a text has for the model.
    reserve: tokens that are added to the prompt's text, such as a chat template's.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    for name, value in (("length", length), ("index", index), ("reserve", reserve)):
        check_int(name, value, 0, MAX_LENGTH)
    operations = OPERATIONS[task]
    rng = random.Random(f"{task} {length} {index} {seed}")
    story = Story(rng)
    example = story.chain(operations)
    shown = [*example, *(story.other(example) for _ in range(2))]
    story.leave(shown)
    head = HEAD.format(
        statements=" ".join(rng.sample([step.statement for step in shown], len(shown))),
        question=example[-1].question,
        solution=" ".join(step.told for step in example) + f" The answer is {example[-1].value}.",
    )
    needed = story.chain(operations)
    question = QUESTION.format(question=needed[-1].question)
    max_tokens = 40 * operations + 40
    statements = [(rng.random(), step.statement) for step in needed]  # and their places

    def context(others: int) -> str:
        while len(statements) < len(needed) + others:
            statements.append((rng.random(), story.other(needed).statement))
        chosen = sorted(statements[: len(needed) + others])
        return head + " ".join(statement for _, statement in chosen)

    def tokens(others: int) -> int:
        return count_tokens(context(others) + question + PREFIX) + reserve + max_tokens

    try:
        others = most_units(tokens, length, 0, story.num_quantities * 9 // 10)
    except ValueError as error:
        raise ValueError(f"{task} cannot be made {length} tokens long: {error}") from None
    return Problem(
        task=task,
        index=index,
        context=context(others),
        question=question,
        answer_prefix=PREFIX,
        answers=(str(needed[-1].value),),
        max_tokens=max_tokens,
    )
