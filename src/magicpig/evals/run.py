"""Running tasks: every method answers the same prompts, each of which is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from magicpig.evals.decoding import Answer, decode
from magicpig.evals.harness import Harness
from magicpig.evals.prompts import Prompt, prompt_of
from magicpig.evals.records import Record, Records
from magicpig.evals.sample import Sample

Make = Callable[[str, int, int], Sample]  # of a task, a length and an index


@dataclass(frozen=True)
class Batch:
    """Samples of a task that are answered together."""

    task: str
    length: int
    indices: tuple[int, ...]


def batches(
    tasks: Sequence[str], lengths: Sequence[int], samples: int, size: int
) -> Iterator[Batch]:
    for length in lengths:
        for task in tasks:
            for first in range(0, samples, size):
                yield Batch(task, length, tuple(range(first, min(first + size, samples))))


@dataclass(frozen=True)
class _Asked:
    """A prompt that some methods have yet to answer, under a protocol."""

    sample: Sample
    prompt: Prompt
    missing: dict[str, list[str]]  # methods by protocol


def run(
    harness: Harness,
    make: Make,
    batch: Batch,
    protocols: Sequence[str],
    records: Records,
    on_record: Callable[[Record], None],
    on_progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Answers a batch of samples, as far as records do not have the answers; appends them.

    on_record: told of each. on_progress: told in words what is being done.
    """
    asked = list(_asked(harness, make, batch, protocols, records, on_progress))
    rows: list[tuple[str, str, _Asked, Answer]] = []
    for number, one in enumerate(asked):

        def told(done: int, number: int = number) -> None:
            on_progress(f"reading prompt {number + 1} of {len(asked)}: {done:,} tokens")

        rows += [(*place, one, answer) for place, answer in _read(harness, one, told)]
    rows.sort(key=lambda row: (harness.methods.index(row[1]), protocols.index(row[0])))
    decode(harness, [row[-1] for row in rows], lambda left: on_progress(f"decoding {left} answers"))
    for protocol, method, one, answer in rows:
        record = _record(harness, batch, protocol, method, one, answer)
        records.append(record)
        on_record(record)


def _asked(
    harness: Harness,
    make: Make,
    batch: Batch,
    protocols: Sequence[str],
    records: Records,
    on_progress: Callable[[str], None],
) -> Iterator[_Asked]:
    for index in batch.indices:
        missing = {
            protocol: [
                method
                for method in harness.methods
                if not records.done(batch.task, batch.length, protocol, index, method)
            ]
            for protocol in protocols
        }
        if any(missing.values()):
            on_progress(f"writing prompt {index}")
            sample = make(batch.task, batch.length, index)
            asked = _Asked(sample, prompt_of(sample, harness.tokenizer), missing)
            _check_prompt(harness, batch, asked, records)
            yield asked


def _check_prompt(harness: Harness, batch: Batch, asked: _Asked, records: Records) -> None:
    """Raises where a method has answered another prompt in this one's place."""
    for protocol in asked.missing:
        for method in harness.methods:
            place = batch.task, batch.length, protocol, asked.sample.index, method
            known = (records.get(*place) or {}).get("prompt_sha256", asked.prompt.fingerprint)
            if known != asked.prompt.fingerprint:
                raise ValueError(
                    f"{str(records.folder)!r} has an answer to another prompt {asked.sample.index} "
                    f"of {batch.task}: its data differ; take another folder"
                )


def _read(
    harness: Harness, one: _Asked, on_part: Callable[[int], None]
) -> Iterator[tuple[tuple[str, str], Answer]]:
    """Answers that have yet to be decoded, by protocol and method."""
    easy, hard = one.missing.get("easy", []), one.missing.get("hard", [])
    prompt, max_tokens = one.prompt, one.sample.max_tokens
    following = max_tokens
    parts = [prompt.context, prompt.question] if hard else [prompt.context + prompt.question]
    if hard and not easy:
        following += len(parts.pop())
    methods = [method for method in harness.methods if method in easy or method in hard]
    reads = harness.read_parts(parts, following, methods, on_part)
    if hard:
        for method, kv in zip(methods, reads[0].kvs, strict=True):
            if method in hard:
                yield ("hard", method), Answer(method, kv, max_tokens, list(prompt.question))
    if easy:
        first = int(reads[-1].logits.argmax())
        for method, kv in zip(methods, reads[-1].kvs, strict=True):
            if method in easy:
                answer = Answer(method, kv, max_tokens, [])
                answer.take(first, harness.end_token_ids)
                yield ("easy", method), answer


def _record(
    harness: Harness, batch: Batch, protocol: str, method: str, one: _Asked, answer: Answer
) -> Record:
    output = str(harness.tokenizer.decode(answer.token_ids, skip_special_tokens=True))
    return {
        "task": batch.task,
        "length": batch.length,
        "protocol": protocol,
        "index": one.sample.index,
        "method": method,
        "score": one.sample.score(output),
        "output": output,
        "answers": list(one.sample.answers),
        "prompt_tokens": len(one.prompt.context) + len(one.prompt.question),
        "prompt_sha256": one.prompt.fingerprint,
        "new_tokens": len(answer.token_ids),
        "cost": answer.cost.as_dict(),
    }
