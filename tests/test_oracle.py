"""oracle: draws from the true softmax, and what they estimate."""

import math

import numpy as np
import pytest
import torch
from method_rules import (
    DIM,
    GROUP,
    HEADS,
    KV_HEADS,
    SCALE,
    SHAPE,
    WINDOW,
    score,
)

from magicpig.attention.registry import parse
from magicpig.attention.scoring import Scoring
from magicpig.kv.far_tokens import FarTokens
from magicpig.kv.sequence import step


def drawn(seed, share, queries, far, scoring):
    """Rows of each head as {id: weight}."""
    layer = parse(f"oracle:{100 * share}%:{seed}").new_layer(SHAPE, WINDOW, 3)
    layer.far = FarTokens(*(x[None] for x in far))
    choice = layer.method.choose([layer], layer.far, queries[None], scoring)
    rows = []
    for ids, logs in zip(choice.ids[0].tolist(), choice.log_weights[0].tolist(), strict=True):
        read = [(i, math.exp(log)) for i, log in zip(ids, logs, strict=True) if log > -math.inf]
        assert len(dict(read)) == len(read)  # each once
        rows.append(dict(read))
    assert int(choice.num_rows[0]) == sum(map(len, rows))
    return rows


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_oracle_draws_follow_the_softmax(softcap):
    tokens, share, seeds = 40, 0.2, 250
    far = torch.randn(2, KV_HEADS, tokens, DIM).unbind()
    queries = torch.randn(HEADS, DIM)
    counts = np.zeros((HEADS, tokens))
    for seed in range(seeds):
        for head, rows in enumerate(drawn(seed, share, queries, far, Scoring(SCALE, softcap))):
            keys = far[0][head // GROUP].double().numpy()
            query = queries[head].double().numpy()
            exps = {i: math.exp(score(query, keys[i], softcap)) for i in rows}
            total = sum(math.exp(score(query, key, softcap)) for key in keys)
            # The share of draws that a row got, divided by its probability.
            times = {i: 8 * weight * exps[i] / total for i, weight in rows.items()}
            assert all(abs(count - round(count)) < 1e-3 for count in times.values())
            assert sum(times.values()) == pytest.approx(8, abs=1e-3)
            for i, count in times.items():
                counts[head, i] += count
    for head in range(HEADS):
        keys, query = far[0][head // GROUP].double().numpy(), queries[head].double().numpy()
        exps = np.array([math.exp(score(query, key, softcap)) for key in keys])
        p = exps / exps.sum()
        deviation = np.sqrt(8 * seeds * p * (1 - p))
        assert (abs(counts[head] - 8 * seeds * p) < 4.5 * deviation).all()


def test_oracle_is_unbiased():
    """The mean over seeds is exact attention, near tokens included."""
    seeds = 500
    prompt = torch.randn(2, KV_HEADS, 46, DIM).unbind()
    query, key, value = torch.randn(HEADS, DIM), *torch.randn(2, 1, KV_HEADS, DIM).unbind()
    outs = {"full": [], "oracle:10%": []}
    for seed in range(seeds):
        for name, found in outs.items():
            if name == "full" and found:
                continue
            layer = parse(f"oracle:10%:{seed}" if name != "full" else name).new_layer(
                SHAPE, WINDOW, 3
            )
            layer.extend(*prompt)
            found.append(step([layer], query[None], key, value, SCALE)[0].double())
    sampled = torch.stack(outs["oracle:10%"])
    error = sampled.std(0) / math.sqrt(seeds)
    worst = ((sampled.mean(0) - outs["full"][0]).abs() / error).max()
    assert error.min() > 0
    assert worst < 4.5


def test_oracle_draws_anew_at_every_step_and_layer():
    far = torch.randn(2, KV_HEADS, 40, DIM).unbind()
    queries = torch.randn(HEADS, DIM)
    found = []
    for place in [(0, 3, 0), (0, 3, 0), (1, 3, 0), (0, 4, 0), (0, 3, 1)]:
        seed, layer_number, more = place
        layer = parse(f"oracle:10%:{seed}").new_layer(SHAPE, WINDOW, layer_number)
        layer.far = FarTokens(*(x[None] for x in far))
        layer.extend(*torch.randn(2, KV_HEADS, more, DIM).unbind())
        found.append(layer.method.choose([layer], layer.far, queries[None], Scoring(1.0)).ids)
    assert torch.equal(found[0], found[1])
    for other in found[2:]:
        assert not torch.equal(found[0], other)
