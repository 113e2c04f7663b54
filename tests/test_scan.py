"""Rows drawn by a pass over coded keys: against the reference, and what holds for every draw."""

import itertools
import math
from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from zoo import loaded

import magicpig
from magicpig import LLM, LayerKV, SamplingParams, ScanConfig, WindowConfig, reference
from magicpig.attention.scan import Scan
from magicpig.context import Context
from magicpig.document import Document
from magicpig.kv.base import LayerShape
from tests.contexts import SCAN, assert_weighted_softmax, make_context, tolerance

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

shapes = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from([0, 1, 15, 16, 17, 31, 33, 129, 300, 1000]),
        "num_kv_heads": st.integers(1, 3),
        "head_dim": st.sampled_from([8, 16, 24, 64, 80, 96, 128, 256]),
        "dtype": st.sampled_from(DTYPES),
    }
)
groups = st.integers(1, 9)
configs = st.builds(
    ScanConfig,
    bits_per_dim=st.sampled_from([1, 2, 4]),
    budget=st.sampled_from([0.02, 0.1, 0.5, 1.0]),
    min_rows=st.sampled_from([0, 1, 8, 64]),
    seed=st.integers(0, 5),
    exact_below=st.just(0),
)
EVERY_DIM = [
    {"tokens": 300, "num_kv_heads": 1, "head_dim": dim, "dtype": torch.float32}
    for dim in (8, 24, 80, 256)
]

rotation = cache(reference.rotation)


@pytest.fixture(autouse=True)
def rotations_are_kept(monkeypatch):
    monkeypatch.setattr(reference, "rotation", rotation)


def log_probabilities(context, head, scan):
    """Of all keys, by the reference."""
    g = context.kv_head(head)
    logs = reference.proposals(
        context.queries[head], context.keys[g], context.values[g], scan, context.scale
    )
    rows = max(scan.budget * len(logs), scan.min_rows)
    return reference.inclusion_probability(logs, reference.log_threshold(logs, rows)).log()


@settings(max_examples=30)
@given(shape=shapes, group=groups, scan=configs)
@example(shape=EVERY_DIM[0], group=1, scan=ScanConfig(1, 0.1, 1, exact_below=0))
@example(shape=EVERY_DIM[1], group=3, scan=ScanConfig(2, 0.1, 1, exact_below=0))
@example(shape=EVERY_DIM[2], group=5, scan=ScanConfig(4, 0.1, 1, exact_below=0))
@example(shape=EVERY_DIM[3], group=9, scan=ScanConfig(2, 0.1, 1, exact_below=0))
def test_rows_have_the_probabilities_of_the_reference(every_isa, shape, group, scan):
    """But for a key whose element lies next to the border of two levels."""
    context = make_context(num_heads=group * shape["num_kv_heads"], index=scan, **shape)
    all_rows, all_logs = context.kv.sample(context.queries)
    differences = []
    for head, (rows, logs) in enumerate(zip(all_rows, all_logs, strict=True)):
        if shape["tokens"] == 0:
            assert rows.numel() == 0
            continue
        assert (rows.diff() > 0).all()
        assert logs.max() <= 0 if len(logs) else True
        expected = log_probabilities(context, head, scan)
        differences += (logs - expected[rows.long()]).abs().tolist()
        always = (expected == 0).nonzero()[:, 0].tolist()
        assert len(set(always) - set(rows.tolist())) <= len(always) / 100
    assert sum(x > 1e-3 for x in differences) <= len(differences) / 100
    assert all(x < 0.5 for x in differences)


@settings(max_examples=30)
@given(shape=shapes, group=groups, scan=configs)
def test_attention_is_the_weighted_softmax_of_what_was_drawn(every_isa, shape, group, scan):
    context = make_context(num_heads=group * shape["num_kv_heads"], index=scan, **shape)
    assert_weighted_softmax(context, shape["dtype"])


@pytest.mark.parametrize("scale", [0.05, 0.7])
@pytest.mark.parametrize("softcap", [None, 0.5, 5.0])
def test_scale_and_softcap_are_honoured(every_isa, scale, softcap):
    """The scale by which rows are drawn, too: it is given to `sample`."""
    context = make_context(tokens=500, index=SCAN, query_norm=2.0)
    out, lse = context.kv.attend(context.queries, scale=scale, softcap=softcap)
    all_rows, logs = context.kv.sample(context.queries, scale)
    for head, rows in enumerate(all_rows):
        g = context.kv_head(head)
        inputs = (context.queries[head], context.keys[g], context.values[g])
        proposed = reference.proposals(*inputs, SCAN, scale)
        chance = reference.inclusion_probability(proposed, reference.log_threshold(proposed, 50.0))
        torch.testing.assert_close(
            logs[head].double(), chance.log()[rows.long()], rtol=0, atol=1e-2
        )
        scores = reference.scores(inputs[0], inputs[1][rows.long()], scale, softcap)
        expected = reference.attend(scores - logs[head], inputs[2][rows.long()])
        torch.testing.assert_close(out[head].double(), expected[0], rtol=0, atol=1e-4)
        torch.testing.assert_close(lse[head].double(), expected[1], rtol=0, atol=1e-4)


def test_the_heads_of_a_group_share_their_numbers_and_other_queries_do_not():
    context = make_context(tokens=1000, num_heads=6, index=SCAN)
    queries = context.queries.clone()
    queries[1] = queries[0]
    rows, _ = context.kv.sample(queries)
    assert rows[0].tolist() == rows[1].tolist()
    assert context.kv.sample(queries)[0][0].tolist() == rows[0].tolist()
    queries[2] *= 1 + 1e-6  # another of the group: its numbers are those of them all
    assert context.kv.sample(queries)[0][0].tolist() != rows[0].tolist()


def test_a_seed_decides_the_draws():
    drawn = {
        seed: tuple(
            make_context(tokens=1000, index=ScanConfig(seed=seed, exact_below=0))
            .kv.sample(torch.ones(4, 32))[0][0]
            .tolist()
        )
        for seed in (0, 1, 2, 2**32 - 1)
    }
    assert len(set(drawn.values())) == 4


# How many rows


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("budget", [0.01, 0.05, 0.3])
def test_the_rows_read_are_the_budget(bits, budget):
    """Over many heads, with thresholds from a part of the keys."""
    scan = ScanConfig(bits, budget, min_rows=0)
    context = make_context(tokens=12_000, num_heads=32, num_kv_heads=4, index=scan, query_norm=1.5)
    context.kv.attend(context.queries)
    assert context.kv.last_stats.share.mean().item() == pytest.approx(budget, rel=0.15)


@pytest.mark.parametrize("tokens", [200, 2000])
def test_min_rows_is_a_floor(tokens):
    scan = ScanConfig(budget=0.01, min_rows=100)
    context = make_context(tokens=tokens, num_heads=32, index=scan)
    context.kv.attend(context.queries)
    assert context.kv.last_stats.rows.float().mean().item() == pytest.approx(100, rel=0.15)


@pytest.mark.parametrize("scan", [ScanConfig(budget=1.0), ScanConfig(min_rows=700)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_rows_are_full_attention(every_isa, scan, dtype):
    context = make_context(tokens=700, index=scan, dtype=dtype, query_norm=3.0)
    sampled = context.kv.attend(context.queries)
    assert context.kv.last_stats.rows.tolist() == [700] * 4
    _, logs = context.kv.sample(context.queries)
    assert all((log == 0).all() for log in logs)
    exact = context.kv.attend(context.queries, exact=True)
    for ours, truth in zip(sampled, exact, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=tolerance(dtype))


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_heavy_key_is_always_drawn(every_isa, bits):
    """Wherever it is, also where the threshold was not found from."""
    kv = LayerKV(1, 1, 64, ScanConfig(bits, 0.01))
    keys, values = torch.randn(2, 1, 9000, 64).unbind()
    needles = [0, 17, 4097, 8991, 8999]
    for token in needles:
        keys[0, token] = 2 * torch.nn.functional.normalize(torch.randn(64), dim=0) * 64**0.5
    kv.append(keys, values)
    for token in needles:
        query = 2 * keys[:, token].bfloat16()
        rows, logs = kv.sample(query)
        at = rows[0].tolist().index(token)
        assert logs[0][at] == 0
        out, _ = kv.attend(query)
        torch.testing.assert_close(out, values[:, token].bfloat16().float(), rtol=0, atol=1e-2)


def needle(tokens, first, count, mass):
    """A query, keys and values; neighbours have so much of its attention together."""
    generator = torch.Generator().manual_seed(tokens + first)
    keys, values = torch.randn(2, 1, tokens, 64, generator=generator)
    query = torch.randn(1, 64, generator=generator)
    others = (keys[0] @ query[0] / 8).logsumexp(0)
    score = others + math.log(mass / (1 - mass) / count)
    keys[0, first : first + count] += (score * 8 / query.norm() ** 2) * query
    return query, keys, values


@pytest.mark.parametrize(
    ("tokens", "count", "scan"),
    [
        (3000, 16, ScanConfig()),
        (8192, 16, ScanConfig()),
        (40_000, 16, ScanConfig()),
        (3000, 1, ScanConfig(target_error=0.05, budget=0.2)),
        (6000, 16, ScanConfig(target_error=0.05, budget=0.2)),
    ],
)
def test_neighbours_with_much_of_the_attention_change_little(tokens, count, scan):
    """Wherever they are, as many rows are read as by a threshold from all keys."""
    for first in range(1000, 1500, 88):
        query, keys, values = needle(tokens, first, count, 0.6)
        kv = LayerKV(1, 1, 64, scan, torch.float32)
        kv.append(keys, values)
        rows = 0.0
        for _ in range(10):
            kv.attend(query + 1e-6 * torch.randn(1, 64))
            rows += kv.last_stats.rows.item() / 10
        args = query[0], keys[0], values[0], scan, 1 / 8
        logs, threshold = reference.proposals(*args), reference.scan_threshold(*args)
        wanted = reference.inclusion_probability(logs, threshold).sum().item()
        assert rows == pytest.approx(wanted, rel=0.25)


# What does not matter, and what is kept


def test_a_batch_equals_its_sequences_one_by_one(every_isa):
    contexts = [
        make_context(tokens=n, index=SCAN, dtype=torch.bfloat16, seed=n)
        for n in (0, 1, 400, 77, 20_000)
    ]
    queries = torch.stack([c.queries for c in contexts])
    out, lse = magicpig.attend([c.kv for c in contexts], queries)
    for i, context in enumerate(contexts):
        stats = context.kv.last_stats
        alone = context.kv.attend(context.queries)
        assert torch.equal(out[i], alone[0])
        assert torch.equal(lse[i], alone[1])
        assert torch.equal(stats.rows, context.kv.last_stats.rows)


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 300), max_size=6))
def test_one_segment_draws_alike_however_it_came_about(cuts):
    torch.manual_seed(1)
    keys, values = torch.randn(2, 2, 1000, 16).unbind()
    queries = torch.randn(4, 16)
    whole, pieces = (LayerKV(4, 2, 16, SCAN, torch.float32) for _ in range(2))
    whole.append(keys, values)
    for first, last in itertools.pairwise([0, *sorted(cuts), 1000]):
        pieces.append(keys[:, first:last], values[:, first:last])
    assert pieces.num_tokens == 1000
    if pieces.segment_sizes != [1000]:
        rows, _ = pieces.sample(queries)
        assert all(row.unique().numel() == row.numel() for row in rows)
        return
    for a, b in zip(whole.sample(queries)[0], pieces.sample(queries)[0], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(whole.attend(queries)[0], pieces.attend(queries)[0])


def test_small_appends_are_merged_and_nothing_is_lost():
    """Every token has its turn as the heaviest; the budget is that of the whole."""
    scan = ScanConfig(budget=0.1, min_rows=16, exact_below=32)
    keys = torch.nn.functional.normalize(torch.randn(1, 700, 64), dim=-1) * 8
    values = torch.randn(1, 700, 64)
    kv = LayerKV(1, 1, 64, scan, torch.float32)
    for first in range(0, 700, 7):
        kv.append(keys[:, first : first + 7], values[:, first : first + 7])
    assert kv.num_tokens == 700
    assert 1 < len(kv.segment_sizes) < 15
    small = sum(size for size in kv.segment_sizes if size < 32)
    rows = []
    for token in range(0, 700, 3):
        out, _ = kv.attend(3 * keys[:, token])
        torch.testing.assert_close(out, values[:, token], rtol=0, atol=0.05)
        kv.attend(keys[:, token])
        rows.append(kv.last_stats.rows.item())
    budget = small + 0.1 * (700 - small)
    assert sum(rows) / len(rows) == pytest.approx(budget, rel=0.2)


def test_short_segments_are_read_whole():
    kv = LayerKV(1, 1, 16, ScanConfig())
    kv.append(*torch.randn(2, 1, 127, 16).unbind())
    rows, logs = kv.sample(torch.randn(1, 16))
    assert rows[0].tolist() == list(range(127))
    assert logs[0].tolist() == [0.0] * 127
    assert kv.nbytes.index == 0
    kv.append(*torch.randn(2, 1, 1000, 16).unbind())
    assert kv.nbytes.index > 0


@pytest.mark.parametrize(("bits", "dim"), [(1, 16), (1, 128), (2, 128), (2, 80), (4, 64)])
def test_the_index_is_as_small_as_its_codes(bits, dim):
    kv = LayerKV(2, 2, dim, ScanConfig(bits))
    kv.append(*torch.randn(2, 2, 1600, dim).unbind())
    line = -(-dim * bits // 32) * 4  # codes fill words of 32 bits
    assert kv.nbytes.index == 2 * (1600 * (line + 8) + 8 * dim)  # and two means
    if (bits, dim) == (2, 128):
        assert kv.nbytes.index < 0.1 * kv.nbytes.rows


def test_the_last_row_of_a_full_segment_is_read_right(every_isa):
    """Row ids are 16 bits wide, and tasks have 16,384 rows each."""
    full = 65_536
    keys, values = 0.01 * torch.randn(1, full + 2, 8), torch.zeros(1, full + 2, 8)
    wanted = [0, 16_383, 16_384, 32_768, full - 1, full, full + 1]
    for i, token in enumerate(wanted):
        keys[0, token] = 30 * torch.nn.functional.one_hot(torch.tensor(i), 8)
        values[0, token, i] = 1.0
    kv = LayerKV(7, 1, 8, ScanConfig(budget=0.001, exact_below=0))
    kv.append(keys, values)
    assert kv.segment_sizes == [full, 2]
    out, _ = kv.attend(30 * torch.eye(7, 8))
    torch.testing.assert_close(out, torch.eye(7, 8), rtol=0, atol=1e-2)
    rows, _ = kv.sample(torch.randn(7, 8))
    assert all(row.unique().numel() == row.numel() for row in rows)
    assert max(row.max() for row in rows) > 0.9 * full


# In a model

SPEC = "scan:2:10%:min_rows=8:exact_below=16"
WINDOW = WindowConfig(sinks=2, local=6, block=4)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def tokens_of(llm, prompt):
    return llm.generate([prompt], GREEDY)[0].completions[0].token_ids


def test_a_model_reads_a_part_and_says_it_again():
    prompt = torch.randint(3, 250, (300,)).tolist()
    llm = LLM(loaded("llama"), method=SPEC, window=WINDOW)
    first, again = (llm.generate([prompt], GREEDY)[0].completions[0] for _ in range(2))
    assert first.token_ids == again.token_ids
    assert 0.07 < first.usage.cost.share_read < 0.15
    everything = LLM(loaded("llama"), method="scan:4:100%", window=WINDOW)
    assert tokens_of(everything, prompt) == tokens_of(LLM(loaded("llama"), method="full"), prompt)


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])  # head_dim 24; soft caps and sliding layers
def test_other_models(name):
    prompt = torch.randint(3, 250, (200,)).tolist()
    llm = LLM(loaded(name), method=SPEC, window=WINDOW)
    assert len(tokens_of(llm, prompt)) == 24


def test_a_saved_context_goes_on_as_if_it_had_stayed(tmp_path):
    llm = LLM(loaded("llama"), method=SPEC, window=WINDOW)
    context = Context.read(llm, Document("The keeper's name was Mora. " * 20, raw=True))
    context.save(llm, tmp_path / "a.pig")
    answers = []
    for known in (context, Context.load(llm, tmp_path / "a.pig")):
        ids = known.prompt_ids(llm, "Who?")
        completion = llm.generate_from(ids, GREEDY, known.kv).completions[0]
        answers.append((completion.token_ids, completion.usage))
    assert answers[0] == answers[1]
    other = LLM(loaded("llama"), method="scan:4:10%:exact_below=16", window=WINDOW)
    known = Context.load(other, tmp_path / "a.pig")  # coded anew
    assert known.kv.layers[1].far.index == other.engine.runner.plan.method.index
    assert other.generate_from(ids, GREEDY, known.kv).new_tokens == 24


@pytest.mark.parametrize(("head_dim", "bits"), [(8, 2), (24, 4), (64, 2), (80, 1), (128, 2)])
def test_the_index_takes_as_many_bytes_as_are_planned(head_dim, bits):
    kv = LayerKV(4, 2, head_dim, ScanConfig(bits, exact_below=0), torch.bfloat16)
    vectors = torch.randn(2, 1600, head_dim)
    kv.append(vectors, vectors)
    shape = LayerShape(4, 2, head_dim, torch.bfloat16)
    assert kv.nbytes.index == Scan(bits).index_bytes(shape, 1600)
