import copy
import dataclasses
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from magicpig.engine.params import SamplingParams
from magicpig.engine.sampler import BadLogits, Choice, Sampler, argmax_on_device, candidates, sample

MIXED = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.5, logprobs=3),
    SamplingParams(temperature=1, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2, logprobs=0),
    SamplingParams(temperature=1.3, top_k=20, min_p=0.01, repetition_penalty=1.2, seed=3),
]


def tokens_of(params, logits, steps=8, prompt=(), index=0):
    sampler = Sampler(params, prompt, index)
    return [sample(logits, [sampler])[0] for _ in range(steps)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 101),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("top_k", 2.0),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 11),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", 3),
        ("stop", ["a", ""]),
        ("stop", ""),
        ("stop", ["a", None]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("logprobs", 21),
        ("logprobs", True),
        ("n", 0),
        ("n", 65),
    ],
)
def test_a_bad_value_is_named(field, value):
    shown = value[-1] if isinstance(value, list) else value
    with pytest.raises(ValueError, match=field) as error:
        SamplingParams(**{field: value})
    assert (repr(shown) if shown != "" else "''") in str(error.value)


def test_unknown_fields_are_refused():
    with pytest.raises(ValueError, match=r"temprature=1.*temperature, top_p"):
        SamplingParams(temprature=1)


def test_stop_becomes_a_tuple():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[2]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[2]).stop_token_ids == (2,)


def test_params_can_be_copied_pickled_and_hashed():
    params = SamplingParams(stop=["a"], temperature=1)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert dataclasses.replace(params, stop="b") == SamplingParams(stop=("b",), temperature=1)
    assert len({params, SamplingParams(temperature=1.0, stop="a")}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vocab", [5, 1000, 49152])
def test_greedy_takes_the_lowest_of_the_largest(dtype, vocab):
    logits = (torch.randn(4, vocab) * 4).round().to(dtype)
    expected = [Choice(row.index(max(row))) for row in logits.tolist()]
    samplers = [Sampler(SamplingParams(temperature=t), []) for t in (0, 0.0, 1e-9, 0)]
    assert sample(logits, samplers) == expected
    assert argmax_on_device(logits) == expected


def processed(logits, params, seen):
    """The scores after transformers' processors, in the order of its `generate`, in float64."""
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    steps.append(MinPLogitsWarper(params.min_p))
    return steps(torch.tensor([seen]), logits.double()[None])[0]


@given(
    vocab=st.sampled_from([3, 100, 3000, 20000]),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    temperature=st.floats(0.2, 3),
    top_k=st.sampled_from([0, 1, 7, 50, 400, 10**6]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    penalty=st.sampled_from([1.0, 1.3, 0.5]),
    seed=st.integers(0, 1000),
)
def test_what_may_be_drawn_is_what_transformers_keeps(
    vocab, spread, temperature, top_k, top_p, min_p, penalty, seed
):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    seen = [0, 2, 2, vocab + 5]
    scores = Sampler(params, seen)._penalised(logits.numpy())
    ids, weights = candidates(scores, params)
    expected = processed(logits, params, seen)
    kept = torch.zeros(vocab, dtype=torch.bool)
    kept[torch.from_numpy(ids)] = True
    # Where sums differ in their last bits, only tokens of next to no weight can differ.
    differ = kept != expected.isfinite()
    assert expected.isfinite().sum() > 0
    if vocab > 1000 and top_p < 1:
        assert torch.from_numpy(scores / temperature).softmax(-1)[differ].sum() < 1e-5 or (
            int(differ.sum()) <= 1
        )
    else:
        assert not differ.any()
    probabilities = np.zeros(vocab)
    probabilities[ids] = weights / weights.sum(dtype=np.float64)
    np.testing.assert_allclose(probabilities, expected.softmax(-1), atol=1e-4)


def test_draws_follow_the_probabilities():
    logits = torch.tensor([[2.0, -1.0, float("-inf"), 1.0, 0.0]])
    counts = Counter(
        c.token for c in tokens_of(SamplingParams(temperature=2, seed=0), logits, steps=20000)
    )
    shares = torch.tensor([counts[i] / 20000 for i in range(5)])
    torch.testing.assert_close(shares, (logits[0] / 2).softmax(-1), atol=0.015, rtol=0)
    assert counts[2] == 0


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_range_draw_no_impossible_token(uniform, monkeypatch):
    logits = torch.full((1, 1000), float("-inf"))
    logits[0, 300:700] = torch.randn(400)
    sampler = Sampler(SamplingParams(temperature=1), [])
    monkeypatch.setattr(sampler._random, "random", lambda: uniform)
    assert sample(logits, [sampler])[0].token == (699 if uniform else 300)


def test_top_p_splits_ties_and_top_k_keeps_them():
    scores = np.zeros(8, dtype=np.float32)
    assert candidates(scores, SamplingParams(temperature=1, top_p=0.5))[0].tolist() == [0, 1, 2, 3]
    assert len(candidates(scores, SamplingParams(temperature=1, top_k=2))[0]) == 8


def test_a_row_does_not_depend_on_its_batch():
    logits = torch.randn(len(MIXED), 1000).bfloat16() * 2
    alone = [tokens_of(p, row[None], prompt=[1, 2]) for p, row in zip(MIXED, logits, strict=True)]
    samplers = [Sampler(p, [1, 2]) for p in MIXED]
    order = [3, 0, 4, 2, 1]
    batched = [sample(logits[order], [samplers[i] for i in order]) for _ in range(8)]
    for place, i in enumerate(order):
        assert [step[place] for step in batched] == alone[i]


def test_completions_of_a_seed_differ_and_repeat():
    logits = torch.randn(1, 1000)
    params = SamplingParams(temperature=1, seed=-7, n=3)
    first, second = (tokens_of(params, logits, index=i) for i in (0, 1))
    assert first != second
    assert first == tokens_of(params, logits)
    assert second != tokens_of(SamplingParams(temperature=1, seed=7), logits, index=1)
    unseeded = SamplingParams(temperature=1)
    assert tokens_of(unseeded, logits) != tokens_of(unseeded, logits)


def test_forks_share_what_was_seen_until_they_write():
    params = SamplingParams(temperature=1, repetition_penalty=5, seed=4)
    logits = torch.randn(1, 50).abs() * 3
    origin = Sampler(params, range(40))
    fork = origin.fork(1)
    assert fork._seen is origin._seen
    drawn = [sample(logits, [fork])[0] for _ in range(8)]
    assert drawn == tokens_of(params, logits, prompt=range(40), index=1)
    assert [sample(logits, [origin])[0] for _ in range(8)] == tokens_of(
        params, logits, prompt=range(40)
    )


def test_the_penalty_counts_the_output_and_leaves_the_logits_alone():
    logits = torch.tensor([[3.0, 2.9, 2.8, -1.0]])
    before = logits.clone()
    tokens = tokens_of(SamplingParams(repetition_penalty=2), logits, steps=3, prompt=[3])
    assert [choice.token for choice in tokens] == [0, 1, 2]
    assert torch.equal(logits, before)


def test_logprobs_are_the_models_own():
    logits = torch.randn(1, 500) * 3
    expected = logits[0].log_softmax(-1)
    params = SamplingParams(temperature=0.5, top_k=5, repetition_penalty=2, logprobs=4, seed=0)
    for choice in tokens_of(params, logits, prompt=[int(logits.argmax())]):
        assert choice.logprob == pytest.approx(expected[choice.token].item(), abs=1e-5)
        values, ids = expected.topk(4)
        assert [token for token, _ in choice.top] == ids.tolist()
        assert [value for _, value in choice.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert tokens_of(SamplingParams(logprobs=0), logits)[0].top == ()
    assert tokens_of(SamplingParams(), logits)[0].logprob is None


def test_impossible_tokens_have_no_logprob_and_ties_are_by_id():
    logits = torch.tensor([[1.0, float("-inf"), 2.0, 1.0, float("-inf")]])
    (choice,) = tokens_of(SamplingParams(logprobs=20), logits, steps=1)
    assert [token for token, _ in choice.top] == [2, 0, 3]


@pytest.mark.parametrize("params", MIXED)
def test_a_bad_row_fails_alone_and_changes_nothing(params):
    inf = float("inf")
    logits = torch.randn(5, 100)
    logits[1, 7] = float("nan")
    logits[2] = -inf
    logits[3, 0] = inf
    samplers = [Sampler(params, [1]) for _ in range(5)]
    choices = sample(logits, samplers)
    assert [type(choice) for choice in choices] == [Choice, *[BadLogits] * 3, Choice]
    assert "nan" in str(choices[1])
    assert sample(logits[4:], samplers[1:2]) == choices[4:]
    assert [type(c) for c in argmax_on_device(logits)] == [type(c) for c in choices]


@pytest.mark.parametrize("shape", [(2, 10), (10,), (1, 1, 10)])
def test_a_wrong_shape_is_named(shape):
    with pytest.raises(ValueError, match=r"logits must be \[1, vocab\]"):
        sample(torch.zeros(shape), [Sampler(SamplingParams(), [])])


def test_a_vocabulary_of_one():
    for params in MIXED:
        (choice,) = tokens_of(params, torch.zeros(1, 1), steps=1)
        assert choice.token == 0
