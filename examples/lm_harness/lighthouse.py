"""Questions about examples/lighthouse.txt, for the tasks in this folder."""

import json
from pathlib import Path

from datasets import Dataset

import magicpig.evals.lm_harness  # noqa: F401 - so the harness knows `--model magicpig`

FOLDER = Path(__file__).parent


def load(**_):
    """The questions, each with the whole text before it."""
    text = (FOLDER.parent / "lighthouse.txt").read_text()
    lines = (FOLDER / "questions.jsonl").read_text().splitlines()
    return {"test": Dataset.from_list([{"text": text, **json.loads(line)} for line in lines])}


def found(doc, outputs):
    """Whether the answer occurs in the output."""
    return {"found": float(doc["answer"].lower() in outputs[0].lower())}
