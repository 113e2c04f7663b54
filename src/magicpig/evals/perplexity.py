"""Perplexity of the second half of a long text, decoded with each method.

The first half is read once, densely; then every method is given the second half token by token,
so that each of its tokens is predicted from what the method made of all before it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from magicpig.config import Strict, check_int
from magicpig.evals.forced import force
from magicpig.evals.prompts import fingerprint

if TYPE_CHECKING:
    from magicpig.evals.harness import Harness

DEFAULT_TOKENS = 8192
FEWEST_TOKENS = 16
BLOCK_TOKENS = 64  # neighbouring tokens are alike: errors are computed from means of so many
PROTOCOL = "forced"

OnProgress = Callable[[int, int], None]
Measure = Callable[..., list[dict[str, Any]]]  # as `measure`


@dataclass(frozen=True)
class Text(Strict):
    """A text and what it is called in results."""

    name: str
    text: str


def run(
    harness: Harness,
    texts: Sequence[Text],
    tokens: int | None = None,
    on_progress: OnProgress | None = None,
    measured: Measure | None = None,
) -> list[dict[str, Any]]:
    """Records of all texts and methods, as samples.jsonl has them.

    tokens: of each text, from its beginning, both halves together. None: of each as many as it
        has and the model's context holds, 8192 at most.
    on_progress: told (tokens that are done, tokens of all texts).
    measured: does one text; None: `measure`.

    score: the perplexity; score_error: its standard error; nll, nll_error: the mean negative
    log-likelihood, of which perplexity is the exponential. nll_minus_full: how much more than with
    full attention, with the standard error of the paired difference; None where full was not run.
    Errors are of means over blocks of 64 tokens, and None where there are fewer than two blocks.
    """
    if not texts:
        raise ValueError("no texts: give one at least")
    prompts = [token_ids(harness, text, tokens) for text in texts]
    total, before = sum(map(len, prompts)), 0
    records: list[dict[str, Any]] = []
    times: Counter[str] = Counter()
    for text, ids in zip(texts, prompts, strict=True):

        def told(done: int, before: int = before) -> None:
            if on_progress:
                on_progress(before + done, total)

        records += (measured or measure)(harness, text.name, ids, times[text.name], told)
        before += len(ids)
        times[text.name] += 1  # texts of one name are samples of one task
    return records


def token_ids(harness: Harness, text: Text, tokens: int | None = None) -> list[int]:
    """The first tokens of a text; see `run`. ValueError where there are not so many."""
    # verbose: some tokenizers warn of texts that are longer than the model's context.
    ids = list(harness.tokenizer(text.text, verbose=False)["input_ids"])
    if tokens is not None:
        check_int("tokens", tokens, FEWEST_TOKENS, harness.max_length)
    wanted = min(DEFAULT_TOKENS, harness.max_length, len(ids)) if tokens is None else tokens
    if len(ids) < max(wanted, FEWEST_TOKENS):
        raise ValueError(
            f"{text.name} has {len(ids)} tokens, and {max(wanted, FEWEST_TOKENS)} are needed: "
            "take a longer text or fewer tokens"
        )
    return ids[:wanted]


def measure(
    harness: Harness,
    name: str,
    ids: list[int],
    index: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """Records of one text's tokens, one for each method; see `run`."""
    half = len(ids) // 2
    done = half

    def stepped() -> None:
        nonlocal done
        done += 1
        if on_progress:
            on_progress(done)

    read = harness.read(ids[:half], len(ids) - half, on_progress)
    count = len(read.kvs)
    forced = force(harness.step, read.kvs, [read.logits] * count, [ids[half:]] * count, stepped)
    stepped()  # the last token is predicted and not fed
    losses = {
        method: -each.logprobs for method, each in zip(harness.methods, forced, strict=True)
    }  # [tokens] each
    records = []
    for (method, loss), kv in zip(losses.items(), read.kvs, strict=True):
        nll, nll_error = _mean_and_error(loss)
        more, more_error = None, None
        if "full" in losses:
            more, more_error = _mean_and_error(loss - losses["full"])
        perplexity = math.exp(nll)
        records.append(
            {
                "task": name,
                "length": len(ids),
                "protocol": PROTOCOL,
                "index": index,
                "method": method,
                "metric": "perplexity",
                "score": perplexity,
                "score_error": None if nll_error is None else perplexity * nll_error,
                "nll": nll,
                "nll_error": nll_error,
                "nll_minus_full": more,
                "nll_minus_full_error": more_error,
                "prompt_tokens": half,
                "new_tokens": len(loss),
                "prompt_sha256": fingerprint(ids),
                "cost": kv.cost.as_dict(),
            }
        )
    return records


def _mean_and_error(values: Tensor) -> tuple[float, float | None]:
    """The mean of values [tokens], and its standard error where there are blocks enough."""
    blocks = len(values) // BLOCK_TOKENS
    if blocks < 2:
        return float(values.mean()), None
    means = values[: blocks * BLOCK_TOKENS].reshape(blocks, BLOCK_TOKENS).mean(1)
    return float(values.mean()), float(torch.std(means) / math.sqrt(blocks))
