"""Questions about documents of SQuAD or HotpotQA, among other documents of the same file."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from magicpig.evals.ruler.draft import Draft

ASK = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\n"
)
HEAD = ASK + "The following are given documents.\n\n"
TAIL = "\n\n" + ASK
QUESTION_TASKS = {"qa_1": "SQuAD", "qa_2": "HotpotQA"}


@dataclass(frozen=True)
class _Question:
    """own: documents that hold the answer; near: those of the same article."""

    text: str
    answers: tuple[str, ...]
    own: tuple[str, ...]
    near: tuple[str, ...] = ()


def questions(task: str, rng: random.Random, index: int, qa_file: str | Path | None) -> Draft:
    """Question `index` of the file. A unit is a document."""
    name = QUESTION_TASKS[task]
    if qa_file is None:
        raise ValueError(f"{task} needs qa_file: the path of a JSON file of {name} as published")
    asked, documents = _read(name, str(qa_file))
    if index >= len(asked):
        raise ValueError(f"{qa_file} has {len(asked)} questions, none of index {index}")
    question = asked[index]
    known = {*question.own, *question.near}
    near = rng.sample(question.near, len(question.near))
    others = [text for text in documents if text not in known]
    rng.shuffle(others)
    order = [*question.own, *near, *others]
    shuffle = rng.random()

    def context(units: int) -> str:
        chosen = (order * -(-units // len(order)))[:units]
        random.Random(f"{shuffle} {units}").shuffle(chosen)
        numbered = (f"Document {number}:\n{text}" for number, text in enumerate(chosen, start=1))
        return HEAD + "\n\n".join(numbered) + TAIL

    return Draft(
        context=context,
        question=f"Question: {question.text}",
        answer_prefix=" Answer:",
        answers=question.answers,
        max_tokens=32,
        least=len(question.own),
        match="any",
    )


@lru_cache(maxsize=2)
def _read(name: str, path: str) -> tuple[list[_Question], list[str]]:
    """The questions of a file, and its documents without repetition, in a fixed order."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the file of {name} cannot be read: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file of {name}: {error}") from None
    try:
        asked, documents = _squad(data) if name == "SQuAD" else _hotpot(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has not the form of {name} as published: {error!r}") from None
    if not asked:
        raise ValueError(f"{path} has no question with an answer")
    return asked, sorted(documents)


def _squad(data: Any) -> tuple[list[_Question], set[str]]:
    asked: list[_Question] = []
    documents: set[str] = set()
    for article in data["data"]:
        texts = list(dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"]))
        documents.update(texts)
        for paragraph in article["paragraphs"]:
            own = paragraph["context"]
            near = tuple(text for text in texts if text != own)
            for qa in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in qa["answers"]))
                if answers and not qa.get("is_impossible", False):
                    asked.append(_Question(qa["question"], answers, (own,), near))
    return asked, documents


def _hotpot(data: Any) -> tuple[list[_Question], set[str]]:
    asked: list[_Question] = []
    documents: set[str] = set()
    for entry in data:
        own = tuple(dict.fromkeys(f"{title}\n{''.join(text)}" for title, text in entry["context"]))
        documents.update(own)
        asked.append(_Question(entry["question"], (entry["answer"],), own))
    return asked, documents
