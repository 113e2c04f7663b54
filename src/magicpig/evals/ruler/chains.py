"""Variable tracking: find the names that were assigned one value, directly or through others."""

from __future__ import annotations

import random
import string

from magicpig.evals.ruler.draft import Draft, insert, spread
from magicpig.evals.ruler.texts import NOISE

HEAD = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
# "assgined" is how it was published
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables"
    " are assgined the value {value}, they are: "
)
HOPS = 4
EXAMPLE_LINES = 10


def variable_tracking(rng: random.Random, _length: int) -> Draft:
    """One chain among noise, after a solved example. A unit is a line of noise."""
    example = _Chain(rng, letters=3)
    solved = " ".join(
        [
            example.context(EXAMPLE_LINES) + example.question + example.answer_prefix,
            *example.names,
        ]
    )
    chain = _Chain(rng, letters=5)
    return Draft(
        context=lambda units: solved + "\n\n" + chain.context(units),
        question=chain.question,
        answer_prefix=chain.answer_prefix,
        answers=chain.names,
        max_tokens=30,
        least=len(chain.names),
    )


class _Chain:
    """VAR A = 12345, VAR B = VAR A, and so on, in this order, at random places of the noise."""

    def __init__(self, rng: random.Random, letters: int) -> None:
        names: dict[str, None] = {}
        while len(names) <= HOPS:
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        self.names = tuple(names)
        value = rng.randrange(10000, 100000)
        self.lines = [f"VAR {self.names[0]} = {value}"]
        self.lines += [f"VAR {b} = VAR {a} " for a, b in zip(names, self.names[1:], strict=False)]
        self.places = spread(rng, len(self.lines))
        self.question = QUESTION.format(value=value)
        self.answer_prefix = PREFIX.format(value=value, count=len(names))

    def context(self, units: int) -> str:
        return HEAD + "\n".join(insert([NOISE] * units, self.lines, self.places)) + "\n"
