"""`scan` where not all codes are looked at: patches of keys are drawn first, then keys of these."""

import math
from dataclasses import replace

import pytest
import torch

import magicpig
from magicpig import LayerKV, ScanConfig, reference
from magicpig.attention.registry import parse
from magicpig.config import draws_on_gpus
from magicpig.kv.base import LayerShape
from magicpig.kv.native_layer import NativeLayer
from tests.contexts import assert_weighted_softmax, make_context

TOKENS = 9001  # the last patch is a part of one
SCAN = ScanConfig(budget=0.01, min_rows=1, exact_below=0, passed=0.25)


def patch_chances(context, scan, kv_head):
    """By the reference, for every key."""
    group = context.kv.num_heads // context.kv.num_kv_heads
    keys, values = context.keys[kv_head], context.values[kv_head]
    logs = torch.stack(
        [
            reference.patch_proposals(query, keys, values, scan, context.scale)
            for query in context.queries[kv_head * group : (kv_head + 1) * group]
        ]
    )
    chance = reference.patch_probability(logs, reference.passed_share(scan, len(keys)))
    return chance.repeat_interleave(reference.PATCH)[: len(keys)]


def threshold_of(weights, within):
    """The log of the threshold by which a key of this weight was drawn with this probability."""
    low, high = float(weights) - 2, float(weights) + 20
    for _ in range(60):
        middle = (low + high) / 2
        above = reference.inclusion_probability(weights[None], middle)[0] > within
        low, high = (middle, high) if above else (low, middle)
    return low


@pytest.mark.parametrize(
    ("bits", "head_dim", "group"), [(1, 24, 1), (2, 64, 3), (4, 80, 4), (1, 80, 2), (2, 128, 5)]
)
def test_rows_have_the_probabilities_of_the_reference(every_isa, bits, head_dim, group):
    """Their patch's, times their own within what was drawn, where one threshold is found."""
    scan = replace(SCAN, bits_per_dim=bits)
    context = make_context(
        tokens=TOKENS, num_heads=2 * group, head_dim=head_dim, index=scan, query_norm=3.0
    )
    all_rows, all_logs = context.kv.sample(context.queries)
    for head, (rows, logs) in enumerate(zip(all_rows, all_logs, strict=True)):
        rows, g = rows.long(), context.kv_head(head)
        given = patch_chances(context, scan, g)[rows]
        weights = reference.proposals(
            context.queries[head], context.keys[g], context.values[g], scan, context.scale
        )[rows]
        weights -= given.log()
        within = logs.double().exp() / given
        assert within.max() < 1.01
        light = (within < 0.9) & (within > 1e-3)
        assert light.sum() > 10
        i = int((within - 0.3).abs().argmin())
        threshold = threshold_of(weights[i], within[i])
        expected = reference.inclusion_probability(weights, threshold)
        off = (expected / within).log().abs()
        assert (off > 0.01).sum() <= len(off) / 20  # elements next to the border of two levels
        assert off.max() < 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_is_the_weighted_softmax_of_what_was_drawn(every_isa, dtype):
    context = make_context(tokens=TOKENS, index=SCAN, dtype=dtype, query_norm=2.0)
    assert_weighted_softmax(context, dtype)


def test_numerator_and_denominator_are_unbiased():
    draws = 3000
    scan = ScanConfig(2, 0.05, exact_below=0, min_rows=0, passed=0.1)
    assert reference.passed_share(scan, TOKENS) == pytest.approx(4096 / TOKENS)
    context = make_context(tokens=TOKENS, index=scan, query_norm=1.5)
    queries = context.queries * (1 + 2e-7 * torch.arange(draws).view(-1, 1, 1))
    arguments = [context.kv] * draws, queries
    exact_out, exact_lse = (x[:1] for x in magicpig.attend([context.kv], queries[:1], exact=True))
    out, lse = magicpig.attend(*arguments)
    denominator = (lse - exact_lse).exp()
    for error in (denominator - 1, out * denominator[..., None] - exact_out):
        standard_error = error.std(0) / math.sqrt(draws)
        assert (error.mean(0) / standard_error).abs().max() < 4.5  # the largest of 128
        assert standard_error.max() < 0.02
    assert denominator.std() > 0.02


def test_every_row_is_drawn_as_often_as_is_said():
    """On average over draws: drawn or not, over the probability that was said, is 1."""
    draws = 2000
    scan = ScanConfig(2, 0.05, exact_below=0, min_rows=0, passed=0.1)
    context = make_context(tokens=TOKENS, num_heads=1, num_kv_heads=1, index=scan, query_norm=2.0)
    sums, squares, least = torch.zeros(3, TOKENS, dtype=torch.float64)
    for i in range(draws):
        [rows], [logs] = context.kv.sample(context.queries * (1 + 2e-7 * i))
        weights = (-logs.double()).exp()
        sums[rows.long()] += weights
        squares[rows.long()] += weights.square()
        least[rows.long()] = torch.maximum(least[rows.long()], logs.double().exp())
    often = least > 0.05
    assert often.sum() > 1000
    mean, square = sums[often] / draws, squares[often] / draws
    z = (mean - 1) / ((square - mean.square()) / draws).clamp(min=1e-9).sqrt()
    uncertain = least[often] < 0.99
    assert z[uncertain].abs().max() < 6
    assert z[uncertain].square().mean().item() == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("passed", [0.25, 0.5])
def test_the_rows_read_are_the_budget(passed):
    scan = replace(SCAN, budget=0.02, passed=passed)
    context = make_context(tokens=30_000, num_heads=8, index=scan, query_norm=3.0)
    read = []
    for i in range(20):
        context.kv.attend(context.queries + 0.01 * i)
        read.append(context.kv.last_stats.rows.double().mean().item())
    assert sum(read) / len(read) == pytest.approx(600, rel=0.1)


def test_short_contexts_and_large_budgets_are_looked_at_whole():
    for tokens, budget in ((5000, 0.01), (20_000, 0.1)):
        samples = []
        for passed in (0.2, 1.0):
            scan = ScanConfig(2, budget, exact_below=0, passed=passed)
            assert reference.passed_share(scan, tokens) == 1
            context = make_context(tokens=tokens, index=scan)
            samples.append(context.kv.sample(context.queries))
        for one, other in zip(*samples, strict=True):
            assert all(map(torch.equal, one, other))


def test_budget_of_all_rows_is_full_attention():
    context = make_context(tokens=TOKENS, index=ScanConfig(budget=1.0, passed=0.1))
    for found, exact in zip(
        context.kv.attend(context.queries),
        context.kv.attend(context.queries, exact=True),
        strict=True,
    ):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


def local_keys(tokens, dim, generator):
    """Neighbours are alike, as those of a text are."""
    centres = torch.randn(tokens // 100 + 1, dim, generator=generator).repeat_interleave(100, 0)
    return centres[:tokens] + 0.7 * torch.randn(tokens, dim, generator=generator)


def test_where_neighbours_are_alike_a_quarter_of_the_codes_is_nearly_as_good():
    generator = torch.Generator().manual_seed(3)
    keys = local_keys(40_000, 64, generator)[None]
    values = torch.randn(1, 40_000, 64, generator=generator)
    queries = 3 * torch.randn(100, 1, 64, generator=generator)
    errors = {}
    for passed in (1.0, 0.25, 0.05):
        kv = LayerKV(1, 1, 64, ScanConfig(2, 0.004, 1, passed=passed), torch.float32)
        kv.append(keys, values)
        found = []
        for query in queries:
            (out, _), (exact, _) = kv.attend(query), kv.attend(query, exact=True)
            found.append(((out - exact).norm() / exact.norm()).item())
        errors[passed] = sum(found) / len(found)
    assert errors[0.25] < 1.15 * errors[1.0]
    assert errors[0.05] > errors[0.25]


def test_segments_have_patches_of_their_own():
    """Rows of all segments are drawn, whose patches are numbered through, the short last ones too;
    and each segment's share is what its keys weigh."""
    scan = ScanConfig(2, 0.05, exact_below=0, min_rows=1, passed=0.25)
    kv = LayerKV(2, 1, 32, scan, torch.float32)
    sizes = [5000, 3001, 1500]
    for size in sizes:
        kv.append(*torch.randn(2, 1, size, 32).unbind())
    assert kv.segment_sizes == sizes
    shares = []
    for _ in range(40):
        rows = torch.cat(kv.sample(torch.randn(2, 32))[0])
        assert rows.max() < sum(sizes)
        shares.append(torch.tensor([(rows < 5000).sum(), (rows >= 8001).sum(), len(rows)]))
    first, last, all_rows = torch.stack(shares).sum(0).tolist()
    assert first / all_rows == pytest.approx(5000 / 9501, abs=0.03)
    assert last / all_rows == pytest.approx(1500 / 9501, abs=0.03)


def test_a_batch_equals_its_sequences_one_by_one(every_isa):
    contexts = [
        make_context(tokens=tokens, index=SCAN, seed=tokens) for tokens in (TOKENS, 300, 12_000)
    ]
    queries = torch.stack([context.queries for context in contexts])
    together = magicpig.attend([context.kv for context in contexts], queries)
    for i, context in enumerate(contexts):
        for one, many in zip(context.kv.attend(queries[i]), together, strict=True):
            assert torch.equal(one, many[i])


@pytest.mark.parametrize("norm", [0.0, 1e-30, 1e10, 1e17])
def test_extreme_keys_stay_finite(every_isa, norm):
    kv = LayerKV(2, 1, 32, SCAN, torch.float32)
    kv.append(norm * torch.randn(1, TOKENS, 32), torch.randn(1, TOKENS, 32))
    out, lse = kv.attend(torch.randn(2, 32))
    assert out.isfinite().all()
    assert not lse.isnan().any()


def test_the_index_has_means_beside_codes():
    for tokens in (64, 6400, 6401):
        kv = LayerKV(1, 1, 64, SCAN, torch.bfloat16)
        kv.append(*torch.randn(2, 1, tokens, 64).bfloat16().unbind())
        means = -(-tokens // 64)
        lines = -(-tokens // 16) * 16 * 24 + 2 * 64 * 4 + -(-means // 16) * 16 * 40
        assert kv.nbytes.index == lines
        method = parse("scan:2:1%:passed=25%")
        counted = method.index_bytes(LayerShape(1, 1, 64, torch.bfloat16), tokens)
        assert counted == pytest.approx(kv.nbytes.index, abs=64 * 4 * 2 + 16 * 24 + 16 * 40)


def test_costs_are_of_what_is_looked_at():
    shape = LayerShape(4, 2, 64, torch.bfloat16)
    costs = {}
    for passed in (1.0, 0.25):
        layer = NativeLayer(shape, replace(SCAN, passed=passed), magicpig.WindowConfig(4, 4))
        layer.extend(*torch.randn(2, 2, 20_008, 64).bfloat16().unbind())
        layer.settle()
        queries, token = torch.randn(1, 4, 64).bfloat16(), torch.randn(1, 2, 64).bfloat16()
        NativeLayer.step([layer], queries, token, token, 0.125, None)
        costs[passed] = layer.cost
    codes = 2 * 20_000
    means = 2 * 313 * 40
    assert costs[1.0].search_bytes == pytest.approx(codes * 24, rel=0.01)
    assert costs[0.25].search_bytes == pytest.approx(0.25 * codes * 24 + means, rel=0.01)


def test_what_cannot_be_had_together_is_refused():
    with pytest.raises(ValueError, match="passed must be"):
        ScanConfig(passed=0)
    with pytest.raises(ValueError, match="passed and target_error"):
        ScanConfig(passed=0.5, target_error=0.1)
    assert draws_on_gpus(ScanConfig())
    assert not draws_on_gpus(SCAN)
