"""h2o: which tokens stay, and the attention that they are chosen by."""

import math

import pytest
import torch
from method_rules import (
    DIM,
    GROUP,
    HEADS,
    KV_HEADS,
    SCALE,
    WINDOW,
    Sequence,
    score,
    step_all,
)
from zoo import loaded, make_model

from magicpig import WindowConfig
from magicpig.attention.mass import attention_mass
from magicpig.evals.harness import Harness


class HeavyHitters:
    """H2O for one KV head: tokens that are kept, and the attention that each has got."""

    def __init__(self, sequence, head, share):
        self.sequence, self.head, self.share = sequence, head, share
        self.mass = {}
        self.far = []  # token numbers, as kept
        self.far_seen = 0

    def weights(self, query, tokens):
        keys = self.sequence.keys[self.head].double().numpy()
        exps = {i: math.exp(score(query, keys[i])) for i in tokens}
        total = sum(exps.values())
        return {i: exp / total for i, exp in exps.items()}

    def get(self, query, tokens):
        """A query's attention to tokens, which is remembered."""
        weights = self.weights(query, tokens)
        for i, weight in weights.items():
            self.mass[i] = self.mass.get(i, 0.0) + weight
        return weights

    @property
    def kept(self):
        """All tokens that are there."""
        sinks, length = self.sequence.config.sinks, self.sequence.keys.shape[1]
        near = [i for i in range(length) if i < sinks or i >= sinks + self.far_seen]
        return sorted(near + self.far)

    def leave(self, num_far):
        """Tokens left the window: of all far ones the heaviest stay."""
        sinks = self.sequence.config.sinks
        new = range(sinks + self.far_seen, sinks + num_far)
        self.far_seen = num_far
        candidates = [*self.far, *new]
        heaviest = sorted(candidates, key=self.mass.__getitem__, reverse=True)
        self.far = sorted(heaviest[: math.ceil(self.share * num_far - 1e-9)])


def read_with_heavy_hitters(sequence, share):
    """A prompt with random queries; its heavy hitters per KV head."""
    tokens = sequence.keys.shape[1]
    queries = torch.randn(HEADS, tokens, DIM).double().numpy()
    heads = [HeavyHitters(sequence, g, share) for g in range(KV_HEADS)]
    for head in range(HEADS):
        for i in range(tokens):
            heads[head // GROUP].get(queries[head, i], range(i + 1))
    mass = torch.tensor([[h.mass[i] for i in range(tokens)] for h in heads])
    sequence.read_prompt(mass.float().reshape(KV_HEADS, tokens))
    for heavy in heads:
        heavy.leave(sequence.num_far)
    return heads


@pytest.mark.parametrize("block", [1, 8])
def test_h2o_keeps_the_heavy_hitters(block):
    """With blocks of one token it is the paper's rule at every step."""
    window = WindowConfig(sinks=2, local=4, block=block)
    sequences = [Sequence("h2o:30%", length, window) for length in (5, 25, 48)]
    heads = [read_with_heavy_hitters(sequence, 0.3) for sequence in sequences]
    for _ in range(30):
        queries, out = step_all(sequences)
        for i, sequence in enumerate(sequences):
            for head in range(HEADS):
                heavy = heads[i][head // GROUP]
                weights = heavy.get(queries[i, head].double().numpy(), heavy.kept)
                values = sequence.values[head // GROUP].double()
                truth = sum(weight * values[token] for token, weight in weights.items())
                torch.testing.assert_close(out[i, head].double(), truth, atol=2e-5, rtol=0)
            before = sequence.num_far
            sequence.settle()
            if sequence.num_far != before:
                for heavy in heads[i]:
                    heavy.leave(sequence.num_far)
            for heavy in heads[i]:
                kept = sequence.layer.far.keys[0, heavy.head]
                assert torch.equal(kept, sequence.keys[heavy.head][heavy.far])
                assert len(kept) <= math.ceil(0.3 * sequence.num_far)
    assert heads[2][0].far != heads[2][1].far  # each KV head has its own


def test_h2o_goes_on_from_a_second_prompt():
    """Tokens of another prompt add to the attention of those that are left, in their places."""
    sequence = Sequence("h2o:50%", 30)
    heads = read_with_heavy_hitters(sequence, 0.5)
    before = [heavy.kept for heavy in heads]
    new = torch.randn(2, KV_HEADS, 12, DIM)
    for i in range(12):
        sequence.add(new[0, :, i], new[1, :, i])
    mass = torch.zeros(KV_HEADS, len(before[0]) + 12)
    for heavy, kept in zip(heads, before, strict=True):
        places = [*kept, *range(30, 42)]
        for i, token in enumerate(places):
            got = 10.0 * ((7 * token + heavy.head) % 5)
            heavy.mass[token] = heavy.mass.get(token, 0.0) + got
            mass[heavy.head, i] = got
    sequence.layer.extend(*new.unbind(), mass)
    for heavy in heads:
        heavy.leave(42 - 2 - 4)
        kept = sequence.layer.far.keys[0, heavy.head]
        assert torch.equal(kept, sequence.keys[heavy.head][heavy.far])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2"])
def test_h2o_gets_the_prompts_attention_from_the_model(name):
    """In parts, against the attention weights that transformers writes out."""
    model = make_model(name)
    model.set_attn_implementation("eager")
    ids = torch.randint(3, 250, (600,)).tolist()  # read in two parts
    with torch.no_grad():
        weights = model(torch.tensor([ids]), output_attentions=True).attentions
    harness = Harness(loaded(name), ["h2o:100%"], dense_layers=[], window=WINDOW)
    (kv,) = harness.read(ids, 60).kvs
    watched = [i for i, layer in enumerate(kv.layers) if not layer.span]
    assert len(watched) == (4 if name == "llama" else 2)
    for i in watched:
        state = kv.layers[i].state
        got = torch.cat([state.near[:, :2], state.far, state.near[:, 2:]], 1)
        truth = weights[i][0].sum(1).view(2, 2, -1).sum(1)
        torch.testing.assert_close(got, truth, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("at_once", [1, 300, 2**20])
def test_attention_mass_is_the_sum_of_softmax_weights(softcap, at_once, monkeypatch):
    monkeypatch.setattr("magicpig.attention.mass.SCORES_AT_ONCE", at_once)
    tokens, num_queries = 13, 9
    queries = torch.randn(2, HEADS, num_queries, DIM)
    keys = torch.randn(2, KV_HEADS, tokens, DIM)
    padding = [0, 6]  # of the second row's tokens the first six: two of them are queries
    truth = {name: torch.zeros(2, KV_HEADS, tokens) for name in ("causal", "padded")}
    for name, row, head, i in (
        (name, row, head, i)
        for name in truth
        for row in range(2)
        for head in range(HEADS)
        for i in range(num_queries)
    ):
        first = padding[row] if name == "padded" else 0
        seen = range(first, tokens - num_queries + i + 1)
        query = queries[row, head, i].double().numpy()
        own = keys[row, head // GROUP].double().numpy()
        exps = {j: math.exp(score(query, own[j], softcap)) for j in seen}
        for j, exp in exps.items():
            truth[name][row, head // GROUP, j] += exp / sum(exps.values())
    causal = attention_mass(queries, keys, None, SCALE, softcap)
    torch.testing.assert_close(causal, truth["causal"])
    positions = torch.arange(tokens - num_queries, tokens)
    mask = torch.arange(tokens) <= positions[:, None]
    mask = mask & (torch.arange(tokens) >= torch.tensor(padding)[:, None, None])
    for given in (
        mask[:, None],
        torch.zeros(2, 1, num_queries, tokens).masked_fill(~mask[:, None], -torch.inf),
        torch.zeros(2, 1, num_queries, tokens).masked_fill(
            ~mask[:, None], torch.finfo(torch.float32).min
        ),
    ):
        padded = attention_mass(queries, keys, given, SCALE, softcap)
        torch.testing.assert_close(padded, truth["padded"])
