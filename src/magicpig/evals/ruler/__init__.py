"""RULER (arXiv 2404.06654): long prompts made up so that their answers are known.

The thirteen tasks with their published settings, wording and metric. What differs from the
published programs: needles are hidden in text that ships with this package, from a sentence
drawn for each sample; keys and values never repeat by chance; prompts fill the length up to the
last sentence, needle or word. qa_1 and qa_2 need the user's copy of SQuAD or HotpotQA.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

from magicpig.config import check_int
from magicpig.evals.ruler.chains import variable_tracking
from magicpig.evals.ruler.draft import Draft, most_units
from magicpig.evals.ruler.needles import NEEDLE_TASKS, needles
from magicpig.evals.ruler.questions import QUESTION_TASKS, questions
from magicpig.evals.ruler.words import common_words, frequent_words
from magicpig.evals.sample import Sample

_COUNTING: Mapping[str, Callable[[random.Random, int], Draft]] = {
    "vt": variable_tracking,
    "cwe": common_words,
    "fwe": frequent_words,
}
TASKS: tuple[str, ...] = (*NEEDLE_TASKS, *_COUNTING, *QUESTION_TASKS)
MAX_LENGTH = 1 << 20


def make(
    task: str,
    length: int,
    index: int,
    count_tokens: Callable[[str], int],
    seed: int = 0,
    qa_file: str | Path | None = None,
    *,
    reserve: int = 0,
) -> Sample:
    """Sample `index` of `task`, the same for the same arguments.

    length: tokens of the prompt and its answer; one more sentence, needle or word would exceed it.
    count_tokens: how many tokens a text has for the model.
    qa_file: for qa_1 a JSON file of SQuAD, for qa_2 one of HotpotQA, as they are published.
    reserve: tokens that are added to the prompt's text, such as a chat template's.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    check_int("length", length, 1, MAX_LENGTH)
    check_int("index", index, 0, MAX_LENGTH)
    check_int("reserve", reserve, 0, MAX_LENGTH)
    rng = random.Random(f"{task} {length} {index} {seed}")
    if task in NEEDLE_TASKS:
        draft = needles(NEEDLE_TASKS[task], rng)
    elif task in _COUNTING:
        draft = _COUNTING[task](rng, length)
    else:
        draft = questions(task, rng, index, qa_file)

    def tokens(units: int) -> int:
        prompt = draft.context(units) + draft.question + draft.answer_prefix
        return count_tokens(prompt) + reserve + draft.max_tokens

    try:
        units = most_units(tokens, length, draft.least, draft.most)
    except ValueError as error:
        raise ValueError(f"{task} cannot be made {length} tokens long: {error}") from None
    return Sample(
        task=task,
        index=index,
        context=draft.context(units),
        question=draft.question,
        answer_prefix=draft.answer_prefix,
        answers=draft.answers,
        max_tokens=draft.max_tokens,
        match=draft.match,
    )
