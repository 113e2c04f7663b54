"""The eleven methods: each is held to its paper's rule, written out for one query head at a time,
and to what they all promise: exact at 100 %, costs as defined, sequences that do not touch each
other.
"""

import math

import numpy as np
import pytest
import torch
from specs import AT_100, EXACT, SPECS
from zoo import loaded, make_model

from magicpig import LSHConfig, WindowConfig, reference
from magicpig.attention.mass import attention_mass
from magicpig.attention.quest import Quest
from magicpig.attention.registry import parse
from magicpig.attention.scoring import Scoring
from magicpig.evals.harness import Harness
from magicpig.kv.base import LayerShape
from magicpig.kv.cost import Cost
from magicpig.kv.far_tokens import FarTokens
from magicpig.kv.sequence import step

HEADS, KV_HEADS, DIM = 6, 2, 16
GROUP = HEADS // KV_HEADS
SHAPE = LayerShape(HEADS, KV_HEADS, DIM, torch.float32)
SCALE = 0.4
WINDOW = WindowConfig(sinks=2, local=4, block=8)
ROW = 2 * DIM * 4  # bytes of a key and a value


# The rules. Each takes a query [dim] and the far keys [tokens, dim], all float64, and gives
# {row: weight} of the rows that are read; the weight multiplies exp(score).


def score(query, key, softcap=None):
    product = SCALE * sum(q * k for q, k in zip(query, key, strict=True))
    return product if softcap is None else softcap * math.tanh(product / softcap)


def highest(values, share):
    count = math.ceil(share * len(values) - 1e-9)
    return sorted(range(len(values)), key=lambda i: values[i], reverse=True)[:count]


def everything(query, keys):
    return dict.fromkeys(range(len(keys)), 1.0)


def nothing(query, keys):
    return {}


def topk(share):
    def rule(query, keys):
        return dict.fromkeys(highest([score(query, key) for key in keys], share), 1.0)

    return rule


def quest(page, share):
    def rule(query, keys):
        pages = [range(i, min(i + page, len(keys))) for i in range(0, len(keys), page)]
        bounds = []
        for rows in pages:
            low, high = keys[rows].min(0), keys[rows].max(0)
            bounds.append(sum(max(q * a, q * b) for q, a, b in zip(query, low, high, strict=True)))
        return {i: 1.0 for chosen in highest(bounds, share) for i in pages[chosen]}

    return rule


def loki(dims, share):
    def rule(query, keys):
        if not len(keys):
            return {}
        _, _, components = np.linalg.svd(keys - keys.mean(0), full_matrices=True)
        basis = components[: math.ceil(dims * DIM)]
        scores = [float((basis @ query) @ (basis @ key)) for key in keys]
        return dict.fromkeys(highest(scores, share), 1.0)

    return rule


def collisions(query, keys, config):
    """Tables in which each key, less the mean of all, has the query's bits."""
    directions = reference.projection(config, DIM).double()  # the random numbers as such
    vectors = torch.from_numpy(np.stack([query, *(keys - keys.mean(0))]))
    signs = (vectors.float().bfloat16().double() @ directions > 0).view(
        len(vectors), config.num_tables, config.bits_per_table
    )
    return (signs[1:] == signs[0]).all(2).sum(1).tolist()


def lsh(config):
    """Weights are one over the probability to be drawn: to meet the query in two tables."""
    bits, tables = config.bits_per_table, config.num_tables

    def rule(query, keys):
        if len(keys) < config.shortest_indexed:
            return everything(query, keys)
        drawn = {}
        for i, met in enumerate(collisions(query, keys, config)):
            key = keys[i] - keys.mean(0)
            cosine = key @ query / np.linalg.norm(key) / np.linalg.norm(query)
            bucket = (1 - math.acos(cosine) / math.pi) ** bits
            missed = (1 - bucket) ** tables + tables * bucket * (1 - bucket) ** (tables - 1)
            if met >= 2:
                drawn[i] = 1 / (1 - missed)
        return drawn

    return rule


LSH = LSHConfig(3, 12, exact_below=24)
RULES = {
    **dict.fromkeys([*EXACT, *AT_100], everything),
    "topk:20%": topk(0.2),
    "topk:1%": topk(0.01),
    "quest:4:30%": quest(4, 0.3),
    "quest:7:20%": quest(7, 0.2),
    "loki:25%:20%": loki(0.25, 0.2),
    "loki:40%:10%": loki(0.4, 0.1),
    "loki:100%:20%": topk(0.2),
    "streaming": nothing,
}


class Sequence:
    """A sequence as a list of tokens, and which of them are far, by the words of WindowConfig."""

    def __init__(self, spec, prompt, window=WINDOW):
        self.config = window
        self.layer = parse(spec).new_layer(SHAPE, window, 3)
        self.keys, self.values = torch.randn(2, KV_HEADS, prompt, DIM).unbind()
        behind = prompt - window.sinks - window.local
        self.num_far = behind if behind >= window.block else 0

    def read_prompt(self, mass=None):
        self.layer.extend(self.keys, self.values, mass)

    def add(self, key, value):
        self.keys = torch.cat([self.keys, key[:, None]], 1)
        self.values = torch.cat([self.values, value[:, None]], 1)

    def settle(self):
        self.layer.settle()
        recent = self.keys.shape[1] - self.num_far - self.config.sinks
        if recent >= self.config.local + 2 * self.config.block:
            self.num_far += self.config.block

    def attend(self, query, rule, softcap=None):
        """Output [heads, dim], in float64."""
        first = self.config.sinks if self.num_far else 0
        far = range(first, first + self.num_far)
        out = np.zeros((HEADS, DIM))
        for head in range(HEADS):
            keys, values = (x[head // GROUP].double().numpy() for x in (self.keys, self.values))
            q = query[head].double().numpy()
            weights = {i: 1.0 for i in range(len(keys)) if i not in far}
            weights |= {first + i: weight for i, weight in rule(q, keys[far]).items()}
            exps = {i: w * math.exp(score(q, keys[i], softcap)) for i, w in weights.items()}
            out[head] = sum(exp * values[i] for i, exp in exps.items()) / sum(exps.values())
        return torch.from_numpy(out)


def step_all(sequences, softcap=None):
    """A random token of each: queries, and outputs."""
    queries = torch.randn(len(sequences), HEADS, DIM)
    keys, values = torch.randn(2, len(sequences), KV_HEADS, DIM).unbind()
    layers = [sequence.layer for sequence in sequences]
    out = step(layers, queries, keys, values, SCALE, softcap)
    for i, sequence in enumerate(sequences):
        sequence.add(keys[i], values[i])
    return queries, out


LENGTHS = [0, 5, 14, 37, 51]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("spec", RULES)
def test_follows_its_rule_at_every_step(spec, softcap):
    """Lengths below and above a window, pages that are not full, blocks that leave meanwhile."""
    sequences = [Sequence(spec, length) for length in LENGTHS]
    for sequence in sequences:
        sequence.read_prompt(torch.zeros(KV_HEADS, sequence.keys.shape[1]))
    far = set()
    for i in range(30):
        queries, out = step_all(sequences, softcap)
        for j, sequence in enumerate(sequences):
            if i % 4 == 0 or j == i % 5:  # the rules are slow
                truth = sequence.attend(queries[j], RULES[spec], softcap)
                torch.testing.assert_close(out[j].double(), truth, atol=2e-5, rtol=1e-5)
            sequence.settle()
            far.add(sequence.num_far)
    assert len(far) > 5


@pytest.mark.parametrize("prompt", [29, 30, 90])  # with 23, 24 and 84 far tokens
def test_lsh_follows_its_rule(prompt):
    spec = f"lsh:{LSH.bits_per_table}:{LSH.num_tables}:exact_below={LSH.exact_below}"
    sequences = [Sequence(spec, prompt) for _ in range(3)]
    for sequence in sequences:
        sequence.read_prompt()
    for _ in range(5):
        queries, out = step_all(sequences)
        for i, sequence in enumerate(sequences):
            truth = sequence.attend(queries[i], lsh(LSH))
            torch.testing.assert_close(out[i].double(), truth, atol=1e-4, rtol=0)
    cost = sequences[0].layer.cost
    assert (cost.rows < cost.tokens) == (prompt > 29)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("prompt", [29, 30, 90])
def test_scan_attends_to_what_it_draws(prompt, softcap):
    """Its rule is a sum over rows that were drawn: by themselves, so they are asked for."""
    sequences = [Sequence("scan:2:20%:min_rows=4:exact_below=24", prompt, WINDOW) for _ in range(3)]
    for sequence in sequences:
        sequence.read_prompt()
    for _ in range(5):
        queries, out = step_all(sequences, softcap)
        for i, sequence in enumerate(sequences):
            rows, logs = sequence.layer.far.sample(queries[i], SCALE)
            heads = iter(zip(rows, logs, strict=True))

            def rule(query, keys, heads=heads):
                ids, probabilities = next(heads)
                return dict(zip(ids.tolist(), (-probabilities).exp().tolist(), strict=True))

            truth = sequence.attend(queries[i], rule, softcap)
            torch.testing.assert_close(out[i].double(), truth, atol=1e-4, rtol=0)
    cost = sequences[0].layer.cost
    assert (cost.rows < cost.tokens) == (prompt > 29)


def test_quest_bounds_are_bounds():
    keys = torch.randn(KV_HEADS, 37, DIM)
    queries = torch.randn(200, DIM)
    least, greatest = Quest(8).bounds(keys)
    assert least.shape == greatest.shape == (KV_HEADS, 5, DIM)
    for head in range(KV_HEADS):
        for page in range(5):
            rows = keys[head, 8 * page : 8 * page + 8]
            bound = torch.maximum(queries * least[head, page], queries * greatest[head, page]).sum(
                1
            )
            assert (queries @ rows.T <= bound[:, None] + 1e-5).all()
            assert torch.equal(least[head, page], rows.amin(0))


def test_loki_chooses_by_the_leading_principal_components():
    """Keys that vary in few directions: these are found, wherever the keys' mean is."""
    basis = torch.linalg.qr(torch.randn(DIM, DIM)).Q[:, :4]
    keys = (torch.randn(KV_HEADS, 60, 4) * torch.tensor([9.0, 6, 4, 2])) @ basis.T
    keys = keys + 5 * torch.randn(KV_HEADS, 1, DIM) + 0.01 * torch.randn(KV_HEADS, 60, DIM)
    found, short_keys = parse("loki:25%:10%").calibrate(keys)
    for head in range(KV_HEADS):
        torch.testing.assert_close(found[head] @ found[head].T, basis @ basis.T, atol=0.02, rtol=0)
        torch.testing.assert_close(short_keys[head], keys[head] @ found[head])
        scores = keys[head].numpy()
        _, _, components = np.linalg.svd(scores - scores.mean(0))
        cosines = abs(torch.from_numpy(components[:4]) @ found[head])
        torch.testing.assert_close(cosines.flip(1), torch.eye(4), atol=0.02, rtol=0)


# oracle


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


# h2o


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
    (kv,) = harness.read(ids).kvs
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


# What is left in memory, and what it took


@pytest.mark.parametrize(("spec", "kept"), [("streaming", 0), ("h2o:25%", 0.25), ("topk", 1)])
def test_evicted_tokens_are_gone(spec, kept):
    sequence = Sequence(spec, 400)
    sequence.read_prompt(torch.rand(KV_HEADS, 400))
    for _ in range(40):
        step_all([sequence])
        sequence.settle()
        nbytes = sequence.layer.nbytes
        assert nbytes.rows == KV_HEADS * ROW * math.ceil(kept * sequence.num_far)
        assert nbytes.window <= KV_HEADS * ROW * (2 + 4 + 2 * 8)
        far = sequence.layer.far
        held = sum(x.untyped_storage().nbytes() for x in (far.keys, far.values))
        assert held == nbytes.rows
    assert sequence.layer.num_tokens == sum(x.shape[1] for x in sequence.layer.read()) // 2
    assert (sequence.layer.num_tokens < 440) == sequence.layer.evicts == (kept < 1)


def read_figures(spec, prompt=46, steps=3):
    """The cost of steps over 40 far tokens: of a batch of two, so that seats are shared."""
    sequences = [Sequence(spec, prompt), Sequence(spec, 20)]
    for sequence in sequences:
        sequence.read_prompt(torch.rand(KV_HEADS, sequence.keys.shape[1]))
    for _ in range(steps):
        step_all(sequences)
        for sequence in sequences:
            sequence.settle()
    assert sequences[0].num_far == 40
    return sequences[0].layer.cost


ALL = 3 * HEADS * 40  # three steps


@pytest.mark.parametrize(
    ("spec", "rows", "row_bytes", "search_bytes", "search_ops"),
    [
        ("full", ALL, 3 * KV_HEADS * 40 * ROW, 0, 0),
        ("cpu-dense", ALL, 3 * KV_HEADS * 40 * ROW, 0, 0),
        ("kv-stream", ALL, 3 * KV_HEADS * 40 * ROW, 0, 0),
        ("streaming", 0, 0, 0, 0),
        ("h2o:25%", 3 * HEADS * 10, 3 * KV_HEADS * 10 * ROW, 0, 0),
        # Every key once for a group; every query with every key.
        ("topk:10%", 3 * HEADS * 4, 3 * HEADS * 4 * ROW, 3 * KV_HEADS * 40 * 64, ALL * DIM),
        ("oracle:10%", None, None, 3 * KV_HEADS * 40 * 64, ALL * DIM),
        # Two bounds of five pages, of which two are read.
        ("quest:8:40%", 3 * HEADS * 16, 3 * HEADS * 16 * ROW, 3 * KV_HEADS * 640, 3 * HEADS * 160),
        # Keys in four dimensions, and the query's way there.
        ("loki:25%:10%", 72, 72 * ROW, 3 * KV_HEADS * 40 * 16, 3 * HEADS * 4 * (40 + DIM)),
        # Too short for an index: all rows, once for a group.
        ("lsh:10:150", ALL, 3 * KV_HEADS * 40 * ROW, 0, 0),
        ("scan", ALL, 3 * KV_HEADS * 40 * ROW, 0, 0),
    ],
)
def test_costs_are_what_one_computes_by_hand(spec, rows, row_bytes, search_bytes, search_ops):
    cost = read_figures(spec)
    if spec.startswith("oracle"):  # as many rows as draws at most; as few as one
        assert 3 * HEADS <= cost.rows < 3 * HEADS * 4
        rows, row_bytes = cost.rows, cost.rows * ROW
    assert cost == Cost(3, rows, ALL, row_bytes, search_bytes, search_ops)
    assert cost.share_read == rows / ALL


def test_the_cost_of_lsh():
    """Rows with their norms, once for each query head; ids and borders of the buckets; hashing."""
    config = LSHConfig(3, 12, exact_below=0)
    sequence = Sequence("lsh:3:12:exact_below=0", 46)
    sequence.read_prompt()
    rows = visited = 0
    for _ in range(3):
        queries, _ = step_all([sequence])
        for head in range(HEADS):
            keys = sequence.keys[head // GROUP, 2:42].double().numpy()
            met = collisions(queries[0, head].double().numpy(), keys, config)
            visited += sum(met)
            rows += sum(count >= 2 for count in met)
    hashed = 3 * HEADS * 36 * DIM
    borders = 3 * HEADS * 12 * 2 * 4
    expected = Cost(3, rows, ALL, rows * (ROW + 4), 2 * visited + borders, hashed)
    assert sequence.layer.cost == expected


@pytest.mark.parametrize(("bits", "code"), [(1, 10), (2, 12), (4, 16)])
def test_the_cost_of_scan(bits, code):
    """Rows, once for each query head; codes with factor and bias, once for a group; rotations."""
    sequence = Sequence(f"scan:{bits}:10%:min_rows=4:exact_below=0", 46)
    sequence.read_prompt()
    rows = 0
    for _ in range(3):
        queries, _ = step_all([sequence])
        drawn, _ = sequence.layer.far.sample(queries[0], SCALE)
        rows += sum(map(len, drawn))
    searched = 3 * KV_HEADS * 40 * code
    expected = Cost(3, rows, ALL, rows * ROW, searched, 3 * HEADS * (40 + DIM) * DIM)
    assert sequence.layer.cost == expected


@pytest.mark.parametrize("spec", [*SPECS, "lsh:3:12:exact_below=24", "h2o:100%"])
def test_costs_add_up_step_by_step(spec):
    """What a step took does not change when the far context grows, gets an index or is forked."""
    sequence = Sequence(spec, 15)
    sequence.read_prompt(torch.rand(KV_HEADS, 15))
    before, far = sequence.layer.cost.as_dict(), set()
    for _ in range(60):
        step_all([sequence])
        cost = sequence.layer.cost
        one = {name: value - before[name] for name, value in cost.as_dict().items()}
        assert one["steps"] == 1
        assert one["tokens"] == HEADS * sequence.num_far
        assert 0 <= one["rows"] <= one["tokens"]
        assert min(one.values()) >= 0
        if one["rows"] == one["tokens"] and not one["search_bytes"]:
            assert one["row_bytes"] == KV_HEADS * sequence.num_far * ROW
        far.add(sequence.num_far)
        sequence.settle()
        assert sequence.layer.fork().cost == Cost()
        assert sequence.layer.cost == cost
        before = cost.as_dict()
    assert len(far) > 3
    mass = torch.rand(KV_HEADS, sequence.layer.num_tokens + 40)
    sequence.layer.extend(*torch.randn(2, KV_HEADS, 40, DIM).unbind(), mass)
    assert sequence.layer.cost == cost


@pytest.mark.parametrize("spec", SPECS)
def test_nan_stays_in_its_sequence(spec):
    """Also when it has become far, where the others are neither touched nor held up."""
    clean = [Sequence(spec, length) for length in (30, 41, 30)]
    for sequence in clean:
        sequence.read_prompt(torch.rand(KV_HEADS, sequence.keys.shape[1]))
    layers = [sequence.layer for sequence in clean]
    spoiled = [layer.fork() for layer in layers]
    for i in range(30):
        queries = torch.randn(3, HEADS, DIM)
        keys, values = torch.randn(2, 3, KV_HEADS, DIM).unbind()
        fine = step(layers, queries, keys, values, SCALE)
        if i == 2:
            keys[1, :, 3] = math.nan
        out = step(spoiled, queries, keys, values, SCALE)
        assert torch.equal(out[[0, 2]], fine[[0, 2]])
        if 2 <= i < 10:
            assert out[1].isnan().all()
        for layer in [*layers, *spoiled]:
            layer.settle()
