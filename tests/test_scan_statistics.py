"""Statistics of `scan` over its draws: many queries that differ in their last bits draw each for
themselves, and with nearly the same probabilities."""

import math
from functools import cache

import pytest
import torch

import magicpig
from magicpig import LayerKV, ScanConfig, reference
from tests.contexts import make_context

DRAWS = 3000


def nearly_equal(queries, count=DRAWS):
    """Queries [count, ...] that differ by up to 0.06 %."""
    return queries * (1 + 2e-7 * torch.arange(count).view(-1, *[1] * queries.dim()))


def attend(kv, queries, **arguments):
    return magicpig.attend([kv] * len(queries), queries, **arguments)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(
    "scan",
    [
        ScanConfig(1, 0.15, exact_below=0, min_rows=0),
        ScanConfig(2, 0.05, exact_below=0, min_rows=0),
        ScanConfig(2, 0.3, exact_below=0, min_rows=0),
        ScanConfig(4, 0.1, exact_below=0, min_rows=0),
    ],
)
def test_numerator_and_denominator_are_unbiased(scan, softcap):
    context = make_context(tokens=400, index=scan, query_norm=1.5)
    queries = nearly_equal(context.queries)
    exact_out, exact_lse = attend(context.kv, queries, exact=True, softcap=softcap)
    out, lse = attend(context.kv, queries, softcap=softcap)
    denominator = (lse - exact_lse).exp()
    numerator = out * denominator[..., None] - exact_out
    for error in (denominator - 1, numerator):
        standard_error = error.std(0) / math.sqrt(DRAWS)
        assert (error.mean(0) / standard_error).abs().max() < 4.5  # the largest of 128
        assert standard_error.max() < 0.02  # so that a bias worth the name would show
    assert denominator.std() > 0.02  # it was an estimate, not exact


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_reference_is_unbiased_and_errs_as_much(softcap):
    """As the native core does, by other numbers."""
    draws = 600
    scan = ScanConfig(2, 0.05, exact_below=0, min_rows=0)
    context = make_context(tokens=400, num_heads=1, num_kv_heads=1, index=scan, query_norm=1.5)
    exact_out, exact_lse = context.kv.attend(context.queries, exact=True, softcap=softcap)
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(draws):
        uniform = torch.rand(400, generator=generator, dtype=torch.float64)
        out, lse = reference.scanned_attention(
            context.queries[0],
            context.keys[0],
            context.values[0],
            scan,
            context.scale,
            uniform,
            softcap,
        )
        denominator = (lse - exact_lse[0]).exp()
        found.append(torch.cat([denominator[None], out * denominator - exact_out[0]]))
    estimates = torch.stack(found)
    estimates[:, 0] -= 1
    standard_error = estimates.std(0) / math.sqrt(draws)
    assert (estimates.mean(0) / standard_error).abs().max() < 4.5
    _, native = attend(context.kv, nearly_equal(context.queries, draws), softcap=softcap)
    spread = (native - exact_lse).exp().std().item()
    assert estimates[:, 0].std().item() == pytest.approx(spread, rel=0.2)


def drawn(kv, queries):
    """Which rows [count, tokens] the first head draws, and their probabilities [tokens]: what was
    said of them when they were drawn, on average, or 0."""
    hits = torch.zeros(len(queries), kv.num_tokens, dtype=torch.float64)
    chances = torch.zeros(kv.num_tokens, dtype=torch.float64)
    for i, query in enumerate(queries):
        rows, logs = kv.sample(query)
        hits[i, rows[0].long()] = 1
        chances[rows[0].long()] += logs[0].double().exp()
    return hits, chances / hits.sum(0).clamp(min=1)


def standardised(hits, chances):
    """Of the rows that are drawn neither always nor hardly ever: means of 0, variances of 1."""
    clear = (chances > 0.03) & (chances < 0.97)
    p = chances[clear]
    return (hits[:, clear] - p) / (p * (1 - p)).sqrt()


@pytest.fixture(scope="module", params=[1, 2, 4])
def draws(request):
    scan = ScanConfig(request.param, 0.25, exact_below=0)
    context = make_context(tokens=400, num_heads=1, num_kv_heads=1, index=scan, query_norm=1.2)
    return context, scan, *drawn(context.kv, nearly_equal(context.queries))


def test_rows_are_drawn_as_often_as_is_said(draws):
    context, scan, hits, chances = draws
    logs = reference.proposals(
        context.queries[0], context.keys[0], context.values[0], scan, context.scale
    )
    p = reference.inclusion_probability(logs, reference.log_threshold(logs, 100.0))
    often = DRAWS * p > 30
    torch.testing.assert_close(chances[often], p[often], rtol=0.01, atol=0)
    assert (hits[:, p > 0.9999] == 1).all()
    z = standardised(hits, chances).sum(0) / math.sqrt(DRAWS)
    assert len(z) > 150
    assert z.abs().max() < 4.5
    assert z.square().mean().item() == pytest.approx(1, abs=5 * math.sqrt(2 / len(z)))
    rare = p < 0.03  # together: each for itself too seldom to tell
    expected = DRAWS * p[rare].sum()
    assert abs(hits[:, rare].sum() - expected) < 4.5 * expected.sqrt() + 0.01 * expected


def correlations(z):
    """Between all pairs of columns, in standard deviations of what chance gives."""
    matrix = z.T @ z / math.sqrt(len(z))
    return matrix[torch.triu(torch.ones_like(matrix), 1).bool()]


def check_independent(z):
    found = correlations(z)
    assert len(found) > 5000
    assert found.abs().max() < 7  # draws of rare rows have long tails
    assert found.mean().abs() < 5 / math.sqrt(len(found))
    assert found.square().mean().item() == pytest.approx(1, abs=0.05)


def test_rows_are_drawn_independently(draws):
    _, _, hits, chances = draws
    z = standardised(hits, chances)
    check_independent(z)
    for apart in (1, 2, 3, 4, 8, 16, 32, 64):  # in the order of their ids
        pairs = (z[:, apart:] * z[:, :-apart]).mean()
        assert abs(pairs) * math.sqrt(z[:, apart:].numel()) < 4.5


def test_queries_draw_independently(draws):
    """Neighbours most of all, whose elements differ by a bit."""
    _, _, hits, chances = draws
    z = standardised(hits, chances)
    check_independent(z[:300].T)
    for apart in (1, 2, 4, 8, 256, 1024):
        pairs = (z[apart:] * z[:-apart]).mean()
        assert abs(pairs) * math.sqrt(z[apart:].numel()) < 4.5


@pytest.mark.parametrize("element", [0, 30, 31])
def test_bfloat16_queries_draw_independently(element):
    """Their words have sixteen bits that are zero; one element differs."""
    scan = ScanConfig(2, 0.25, exact_below=0)
    context = make_context(tokens=400, num_heads=1, num_kv_heads=1, index=scan)
    queries = context.queries.bfloat16().repeat(400, 1, 1)
    queries[:, 0, element] = (torch.arange(400).short() + 0x3000).view(torch.bfloat16)
    assert queries[:, 0, element].max() < 1e-8
    hits, chances = drawn(context.kv, queries)
    z = standardised(hits, chances)
    check_independent(z.T)
    check_independent(z)


def test_segments_and_kv_heads_draw_independently():
    """Their rows have the same numbers, and here the same queries."""
    scan = ScanConfig(2, 0.25, exact_below=0)
    kv = LayerKV(2, 2, 32, scan, torch.float32)
    tokens = 400
    for count in (tokens, 200):
        kv.append(*torch.randn(2, 2, count, 32).unbind())
    assert kv.segment_sizes == [tokens, 200]
    queries = nearly_equal(torch.randn(1, 32).expand(2, 32), 1500)
    hits = torch.zeros(2, len(queries), tokens + 200, dtype=torch.float64)
    chances = torch.zeros(2, tokens + 200, dtype=torch.float64)
    for i, query in enumerate(queries):
        all_rows, all_logs = kv.sample(query)
        for head, (rows, logs) in enumerate(zip(all_rows, all_logs, strict=True)):
            hits[head, i, rows.long()] = 1
            chances[head, rows.long()] = logs.double().exp()
    p = chances.clamp(0.03, 0.97)
    z = (hits - p[:, None]) / (p * (1 - p)).sqrt()[:, None]
    z *= ((chances > 0.03) & (chances < 0.97))[:, None]
    for a, b in ((z[0, :, :200], z[0, :, tokens:]), (z[0, :, :tokens], z[1, :, :tokens])):
        same_number = (a * b).sum() / (a * b != 0).sum().sqrt()
        assert abs(same_number) < 4.5
        check_pairs = a.T @ b / math.sqrt(len(queries))
        assert check_pairs[check_pairs != 0].square().mean().item() == pytest.approx(1, abs=0.05)


def test_rows_read_vary_as_independent_draws_do(draws):
    _, _, hits, chances = draws
    rows = hits.sum(1)
    assert rows.mean().item() == pytest.approx(chances.sum().item(), rel=0.01)
    assert rows.var().item() == pytest.approx((chances * (1 - chances)).sum().item(), rel=0.15)
    assert rows.mean().item() == pytest.approx(100, rel=0.1)  # the budget


# Codes


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_the_rotation_is_orthogonal(head_dim):
    matrix = reference.rotation(ScanConfig(seed=head_dim), head_dim)
    eye = torch.eye(len(matrix), dtype=torch.float64)
    torch.testing.assert_close(matrix @ matrix.T, eye)
    assert len(matrix) == -(-head_dim // 16) * 16
    assert matrix.abs().max() < 0.9  # no element stays where it was


@pytest.mark.parametrize("head_dim", [16, 24, 80, 128])
def test_products_with_codes_are_unbiased_over_rotations(head_dim, monkeypatch):
    seeds = 200
    rotation = cache(lambda seed: reference_rotation(ScanConfig(seed=seed), head_dim))
    reference_rotation = reference.rotation
    monkeypatch.setattr(reference, "rotation", lambda scan, _: rotation(scan.seed))
    keys = torch.randn(40, head_dim) * torch.rand(40, 1) * 3 + 1
    keys[:, 3] *= 8  # an outlier among the dimensions, as real keys have
    query = torch.randn(head_dim)
    truth = reference.centre(keys).double() @ query.double()
    spread = truth.square().mean().sqrt()
    noises = []
    for bits in (1, 2, 4):
        estimates = []
        for seed in range(seeds):
            scan = ScanConfig(bits, seed=seed)
            levels, factors = reference.key_codes(keys, scan)
            assert (levels % 2 == 1).all()
            assert levels.abs().max() <= 2**bits - 1
            estimates.append(factors * (levels @ reference.rotate(query[None], scan)[0]))
        error = (torch.stack(estimates) - truth) / spread
        standard_error = error.std(0) / math.sqrt(seeds)
        assert (error.mean(0) / standard_error).abs().max() < 4.5
        noises.append(error.std().item())
    assert noises[0] > 1.7 * noises[1] > 1.7 * 2.5 * noises[2]


@pytest.mark.parametrize("head_dim", [64, 80])
def test_the_error_falls_with_bits_and_with_the_budget(head_dim):
    """At a given budget 2 bits beat 1 and 4 beat 2; more rows, less error."""
    errors = {}
    for bits in (1, 2, 4):
        for budget in (0.02, 0.08):
            context = make_context(
                tokens=3000,
                num_heads=16,
                num_kv_heads=4,
                head_dim=head_dim,
                index=ScanConfig(bits, budget, min_rows=0),
                query_norm=3.0,
            )
            queries = nearly_equal(context.queries, 40)
            exact, _ = attend(context.kv, queries[:1], exact=True)
            out, _ = attend(context.kv, queries)
            errors[bits, budget] = ((out - exact).norm(dim=-1) / exact.norm(dim=-1)).mean().item()
    for budget in (0.02, 0.08):
        assert errors[1, budget] > 1.2 * errors[2, budget] > 1.2 * 1.1 * errors[4, budget]
    for bits in (1, 2, 4):
        assert errors[bits, 0.02] > 1.5 * errors[bits, 0.08]


def test_scan_beats_uniform_draws_of_as_many_rows():
    context = make_context(
        tokens=4000, num_heads=8, head_dim=64, index=ScanConfig(budget=0.02), query_norm=3.0
    )
    exact, _ = context.kv.attend(context.queries, exact=True)
    out, _ = attend(context.kv, nearly_equal(context.queries, 50))
    scanned = (out - exact).norm(dim=-1).mean().item()
    errors = []
    for head in range(8):
        g = context.kv_head(head)
        for _ in range(20):
            rows = torch.randperm(4000)[:80]
            found, _ = reference.exact_attention(
                context.queries[head], context.keys[g][rows], context.values[g][rows], context.scale
            )
            errors.append((found - exact[head]).norm().item())
    assert scanned < 0.4 * sum(errors) / len(errors)
