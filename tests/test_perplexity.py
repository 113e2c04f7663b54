"""Perplexity under each method: exact with full, paired with it, and honest about its error."""

import json
import math
from pathlib import Path

import pytest
import torch
from zoo import loaded, make_model

from magicpig.evals.forced import force
from magicpig.evals.harness import Harness
from magicpig.evals.perplexity import Text, _mean_and_error, run, token_ids

TEXT = Text(
    "lighthouse.txt", (Path(__file__).parent.parent / "examples/lighthouse.txt").read_text()
)
METHODS = ["full", "lsh:4:30:exact_below=64"]


@pytest.fixture(scope="module")
def harness():
    return Harness(loaded("llama"), METHODS, dense_layers=[0])


@torch.no_grad()
def losses(ids):
    """Negative log-likelihoods [tokens - 1] by a single pass of transformers."""
    rows = make_model("llama")(torch.tensor([ids])).logits[0].log_softmax(-1)
    return -rows[range(len(ids) - 1), ids[1:]]


def test_full_is_what_transformers_says_and_the_others_are_compared_with_it(harness):
    full, sampled = run(harness, [TEXT], 900)
    ids = token_ids(harness, TEXT, 900)
    truth = losses(ids)[449:]
    assert len(truth) == full["new_tokens"] == sampled["new_tokens"] == 450
    assert full["prompt_tokens"] == 450
    assert full["nll"] == pytest.approx(truth.mean().item(), abs=1e-3)
    assert full["score"] == pytest.approx(math.exp(full["nll"]))
    blocks = truth[:448].reshape(7, 64).mean(1)
    assert full["nll_error"] == pytest.approx((blocks.std() / 7**0.5).item(), rel=1e-3)
    assert full["score_error"] == pytest.approx(full["score"] * full["nll_error"])
    assert full["nll_minus_full"] == full["nll_minus_full_error"] == 0
    assert sampled["nll_minus_full"] == pytest.approx(sampled["nll"] - full["nll"])
    assert sampled["nll_minus_full_error"] > 0
    assert full["cost"]["steps"] == sampled["cost"]["steps"] == 449
    assert 0 < sampled["cost"]["rows"] < sampled["cost"]["tokens"]


def test_records_of_several_texts(harness):
    other = Text("other.txt", TEXT.text[5000:5200])
    told = []
    records = run(harness, [TEXT, other], 200, lambda done, total: told.append((done, total)))
    keys = [(record["task"], record["index"], record["method"]) for record in records]
    texts = [("lighthouse.txt", 0), ("other.txt", 0)]
    assert keys == [(*text, method) for text in texts for method in harness.methods]
    assert {record["length"] for record in records} == {200}
    assert json.loads(json.dumps(records, allow_nan=False)) == records
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1] == (400, 400)


def test_without_full_nothing_is_compared():
    (record,) = run(Harness(loaded("llama"), METHODS[1:]), [TEXT], 64)
    assert record["nll_minus_full"] is None
    assert record["nll_error"] is None  # of a single block


def test_lengths(harness):
    short = Text("short.txt", "x" * 40)
    assert len(token_ids(harness, short)) == 40
    assert len(token_ids(harness, TEXT)) == harness.max_length
    for text, tokens, message in (
        (short, 41, "short.txt has 40 tokens, and 41 are needed"),
        (Text("empty.txt", ""), None, "empty.txt has 0 tokens, and 16 are needed"),
        (TEXT, 5000, "tokens must be from 16 to 4096, not 5000"),
    ):
        with pytest.raises(ValueError, match=message):
            run(harness, [text], tokens)
    with pytest.raises(ValueError, match="no texts"):
        run(harness, [])


def test_continuations_of_any_lengths_step_together(harness):
    ids = token_ids(harness, TEXT, 100)
    given = [[5], ids[60:75], [], [7, 8, 9, 9, 3]]
    read = harness.read(ids[:60], 60)
    steps = []
    together = force(
        harness.step,
        [read.kvs[0].fork() for _ in given],
        [read.logits] * 4,
        given,
        lambda: steps.append(1),
    )
    assert len(steps) == 14  # the last token is not fed
    assert together[2].logprobs.shape == (0,)
    for tokens, forced in zip(given, together, strict=True):
        (alone,) = force(harness.step, [read.kvs[0].fork()], [read.logits], [tokens])
        torch.testing.assert_close(forced.logprobs, alone.logprobs, atol=1e-4, rtol=0)
        truth = -losses(ids[:60] + tokens)[59:].double()
        torch.testing.assert_close(forced.logprobs, truth, atol=1e-3, rtol=0)


def test_greedy_tokens_are_known_as_such(harness):
    read = harness.read(token_ids(harness, TEXT, 50), 60)
    best = int(read.logits.argmax())
    for token in (best, best - 1):
        (forced,) = force(harness.step, read.kvs[:1], [read.logits], [[token]])
        assert forced.greedy == (token == best)


def test_nan_is_no_result(harness):
    read = harness.read(token_ids(harness, TEXT, 50), 60)
    with pytest.raises(ValueError, match="logits after 50 tokens are NaN"):
        force(harness.step, read.kvs[:1], [read.logits * math.nan], [[3]])


def test_the_error_covers_what_blocks_have_in_common():
    """Neighbours that are alike count as one; independent values as many."""
    torch.manual_seed(0)
    repeated = torch.randn(256).repeat_interleave(64).double()
    mean, error = _mean_and_error(repeated)
    assert error == pytest.approx(repeated.std().item() / 256**0.5, rel=0.02)
    assert mean == pytest.approx(repeated.mean().item())
    independent = torch.randn(64 * 256).double()
    assert _mean_and_error(independent)[1] == pytest.approx(1 / 128, rel=0.2)
