"""`scan` with a target for the error: how many rows each head reads, and what it says of itself."""

import math

import pytest
import torch
from torch import Tensor

import magicpig
from magicpig import LayerKV, ScanConfig, WindowConfig, reference
from magicpig.kv.base import LayerShape
from magicpig.kv.native_layer import NativeLayer
from tests.contexts import make_context

NEAR = 40  # tokens of a second segment, too short to be indexed


def target(error, bits=4, **fields):
    fields = {"budget": 1.0, "min_rows": 1, "exact_below": 100, **fields}
    return ScanConfig(bits, target_error=error, **fields)


def with_near(context):
    """Adds tokens that are read whole; attention to them alone, by head."""
    kv = context.kv
    keys, values = (torch.randn(kv.num_kv_heads, NEAR, kv.head_dim) for _ in range(2))
    kv.append(keys, values)
    assert kv.segment_sizes[-1] == NEAR
    return [
        reference.exact_attention(
            context.queries[h], keys[context.kv_head(h)], values[context.kv_head(h)], context.scale
        )
        for h in range(kv.num_heads)
    ]


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("norm", [0.0, 1.0, 3.0])
@pytest.mark.parametrize(
    "scan",
    [
        target(0.3, 1),
        target(0.1, 2),
        target(0.1, 4, budget=0.05),
        target(0.03, 4),
        target(0.3, 4, min_rows=100),
    ],
)
def test_thresholds_are_those_of_the_reference(every_isa, scan, norm, near):
    context = make_context(tokens=900, index=scan, query_norm=norm, head_dim=48)
    besides = with_near(context) if near else [None] * 4
    all_rows, all_logs = context.kv.sample(context.queries)
    context.kv.attend(context.queries)
    predicted = context.kv.last_stats.predicted_error
    assert context.kv.last_stats.rows.tolist() == [len(rows) for rows in all_rows]
    for h, (rows, logs) in enumerate(zip(all_rows, all_logs, strict=True)):
        g = context.kv_head(h)
        inputs = context.queries[h], context.keys[g], context.values[g], scan, context.scale
        threshold = reference.scan_threshold(*inputs, besides[h])
        chance = reference.inclusion_probability(reference.proposals(*inputs), threshold)
        far = rows < 900
        assert int((~far).sum()) == (NEAR if near else 0)
        difference = (logs[far] - chance[rows[far].long()].log()).abs()
        assert (difference > 5e-3).double().mean() <= 0.02
        if threshold > -math.inf:
            expected = reference.predicted_error(*inputs, threshold, besides[h])
            assert predicted[h] == pytest.approx(expected, rel=0.02, abs=1e-3)


def with_mean_value(**fields):
    """As real values have one: outputs are not near zero."""
    context = make_context(tokens=0, **fields)
    kv = context.kv
    keys = 1.5 * torch.randn(kv.num_kv_heads, 20_000, kv.head_dim) + torch.randn(kv.head_dim)
    kv.append(keys, 1 + torch.randn_like(keys))
    return context


def rows_and_errors(context, draws=200) -> tuple[float, Tensor, Tensor]:
    """Rows of a head on average, errors of each head (root of the mean square over draws), and what
    was predicted."""
    kv = context.kv
    queries = context.queries * (1 + 2e-7 * torch.arange(draws).view(-1, 1, 1))
    exact, _ = magicpig.attend([kv] * draws, queries, exact=True)
    got, _ = magicpig.attend([kv] * draws, queries)
    errors = (got - exact).square().sum(-1).mean(0).sqrt() / exact.norm(dim=-1).mean(0)
    stats = kv.last_stats
    return stats.rows.double().mean().item(), errors, stats.predicted_error


@pytest.mark.parametrize("norm", [0.5, 2.0])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("error", [0.05, 0.2])
def test_the_error_is_what_was_asked_for(error, bits, norm):
    """About: more, where scores are large and codes are rough."""
    context = with_mean_value(index=target(error, bits), query_norm=norm, head_dim=64)
    _, errors, predicted = rows_and_errors(context, 60)
    assert (predicted <= error * 1.001).all()
    assert (errors < 1.5 * error).all()
    assert (errors > 0.25 * error).all()


def test_a_lower_target_takes_more_rows_within_its_bounds():
    rows = []
    for error in (0.5, 0.2, 0.1, 0.05, 0.01, 1e-4):
        context = with_mean_value(index=target(error, budget=0.05, min_rows=50))
        rows.append(rows_and_errors(context, 20)[0])
    assert rows == sorted(rows)
    assert rows[0] == pytest.approx(50, rel=0.3)
    assert rows[-1] == pytest.approx(1000, rel=0.1)


def test_heads_read_what_they_need():
    """A head whose attention is even reads more rows than one with a few heavy keys."""
    context = make_context(tokens=5000, num_heads=2, index=target(0.1), head_dim=64)
    queries = context.queries.clone()
    queries[0] *= 0.1
    queries[1] = 2 * (context.keys[1, 77] - context.keys[1].mean(0))
    context.kv.attend(queries)
    even, peaked = context.kv.last_stats.rows.tolist()
    assert even > 10 * peaked


def test_a_window_that_gets_the_attention_saves_rows():
    torch.manual_seed(0)
    shape = LayerShape(2, 1, 64, torch.float32, torch.device("cpu"))
    rows = []
    for strength in (0.0, 3.0):
        layer = NativeLayer(shape, target(0.05), WindowConfig(sinks=4, local=32, block=64))
        query = torch.randn(2, 64)
        keys, values = torch.randn(2, 1, 4000, 64)
        keys[0, -30:] = strength * query.mean(0)
        layer.extend(keys, values)
        NativeLayer.step([layer], query[None], keys[None, :, -1], values[None, :, -1], 0.125, None)
        rows.append(layer.cost.rows)
    assert rows[1] < rows[0] / 5


def test_without_a_target_nothing_is_predicted():
    context = make_context(tokens=500, index=ScanConfig(exact_below=0))
    context.kv.attend(context.queries)
    assert context.kv.last_stats.predicted_error is None


@pytest.mark.parametrize("value", [0, -0.1, 1.5, "much", True, float("nan")])
def test_bad_targets_are_refused(value):
    with pytest.raises(ValueError, match="target_error"):
        ScanConfig(target_error=value)


def test_values_of_zero_are_no_error():
    kv = LayerKV(1, 1, 16, target(0.1, exact_below=0))
    kv.append(torch.randn(1, 300, 16), torch.zeros(1, 300, 16))
    out, _ = kv.attend(torch.randn(1, 16))
    assert (out == 0).all()
    assert kv.last_stats.predicted_error.isfinite().all()
