"""`scan` on keys, values and queries no model should have, but one will."""

import math

import pytest
import torch

from magicpig import LayerKV, ScanConfig, reference
from tests.contexts import SCAN, kv_of


@pytest.mark.parametrize("key", [0.0, 1.0, -3e-3, 1e6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_keys(every_isa, key, dtype):
    """No code tells them apart: all that is left is the sample of a mean."""
    values = torch.randn(2000, 16).to(dtype)
    kv = kv_of(torch.full((2000, 16), key, dtype=dtype), values, dtype=dtype)
    for _ in range(5):
        query = torch.randn(1, 16)
        out, lse = kv.attend(query)
        assert 100 < kv.last_stats.rows.item() < 320
        score = key * query.double().sum().item() / 4
        assert lse.item() == pytest.approx(score + math.log(2000), rel=1e-3, abs=0.5)
        torch.testing.assert_close(out[0], values.float().mean(0), rtol=0, atol=0.4)


def test_keys_at_the_mean_have_their_values_to_go_by(every_isa):
    keys = torch.randn(200, 16)
    keys = 100 + torch.cat([keys, -keys, torch.zeros(50, 16)])
    context_values = torch.randn(450, 16)
    kv = kv_of(keys, context_values)
    query = torch.randn(1, 16)
    rows, logs = kv.sample(query)
    proposed = reference.proposals(query[0], keys, context_values, SCAN, 0.25)
    at_mean = reference.at_mean(reference.centre(keys))
    assert at_mean.sum() == 50
    base = reference.TEMPERS[2] * 0.25 * (keys.double().mean(0) @ query[0].double())
    biases = reference.value_biases(context_values)
    torch.testing.assert_close(proposed[at_mean], base + biases[at_mean])
    chance = reference.inclusion_probability(proposed, reference.log_threshold(proposed, 45.0))
    torch.testing.assert_close(logs[0].double(), chance.log()[rows[0].long()], rtol=0, atol=0.05)


@pytest.mark.parametrize("value", [0.0, 1.0, -300.0])
def test_equal_values_come_out_as_they_are(every_isa, value):
    kv = kv_of(torch.randn(1000, 24), torch.full((1000, 24), value))
    for _ in range(5):
        out, lse = kv.attend(torch.randn(1, 24))
        torch.testing.assert_close(out, torch.full((1, 24), value), rtol=1e-5, atol=0)
        assert 50 < kv.last_stats.rows.item() < 200
        assert lse.isfinite().all()


@pytest.mark.parametrize("tokens", [1, 256, 4000])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0])
def test_a_segment_of_equal_values_is_drawn_from_beside_others(every_isa, tokens, spread):
    """It tells nothing new in itself, but it is not what the others say."""
    kv = kv_of(torch.randn(4000, 16), torch.randn(4000, 16))
    keys = 2 + torch.randn(1, tokens, 16)
    kv.append(keys, 3 + spread * torch.randn(1, tokens, 16))
    errors = []
    for _ in range(10):
        query = 1.5 * torch.ones(1, 16) + 0.5 * torch.randn(1, 16)  # towards the second segment
        (out, lse), (exact, exact_lse) = kv.attend(query), kv.attend(query, exact=True)
        errors.append(((out - exact).norm() / exact.norm()).item())
        assert lse.item() == pytest.approx(exact_lse.item(), abs=1.0)
    assert sum(errors) / 10 < 0.15


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("sharpness", [1.0, 30.0, 300.0, 1e5])
def test_the_budget_is_kept_when_scores_lie_far_apart(every_isa, bits, sharpness):
    keys = torch.randn(1024, 32)  # all of which thresholds come from
    kv = kv_of(keys, torch.randn(1024, 32), ScanConfig(bits, 0.05, min_rows=1, exact_below=0))
    for _ in range(5):
        kv.attend(sharpness * torch.randn(1, 32))
        assert 25 < kv.last_stats.rows.item() < 80


def test_a_zero_query_draws_by_values_alone(every_isa):
    values = torch.randn(1000, 16)
    values[:10] *= 150 / values[:10].norm(dim=-1, keepdim=True)
    kv = kv_of(torch.randn(1000, 16), values)
    rows, logs = kv.sample(torch.zeros(1, 16))
    assert rows[0][:10].tolist() == list(range(10))
    assert (logs[0][:10] == 0).all()
    out, lse = kv.attend(torch.zeros(1, 16))
    assert out.isfinite().all()
    assert lse.item() == pytest.approx(math.log(1000), abs=0.5)


@pytest.mark.parametrize("scan", [SCAN, ScanConfig(budget=1.0, exact_below=0)])
@pytest.mark.parametrize("norm", [1e-30, 1e-10, 1e10, 1e17])
def test_huge_and_tiny_norms_stay_finite(every_isa, norm, scan):
    keys = torch.nn.functional.normalize(torch.randn(100, 16), dim=-1) * norm
    kv = kv_of(keys, norm * torch.randn(100, 16), scan)
    for query_norm in (1e-20, 1.0, 1e17):
        query = torch.nn.functional.normalize(torch.randn(1, 16), dim=-1) * query_norm
        out, lse = kv.attend(query, scale=100.0)
        assert out.isfinite().all()
        assert not lse.isnan().any()
        if norm * query_norm < 1e-6:  # then all weights are one
            assert lse.item() == pytest.approx(math.log(100), abs=1.0)


@pytest.mark.parametrize("scan", [SCAN, ScanConfig(budget=1.0, exact_below=0)])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("norm", [1e2, 1e4, 1e10, 1e17])
def test_the_largest_score_wins_when_scores_are_huge(every_isa, norm, sign, scan):
    """And all others are huge as well, of one sign."""
    direction = torch.nn.functional.normalize(torch.randn(1, 16), dim=-1)
    keys = norm * (sign * direction + 0.3 * torch.randn(300, 16))
    values = torch.randn(300, 16)
    keys[17] = norm * (sign + 5) * direction
    kv = kv_of(keys, values, scan)
    out, lse = kv.attend(norm * direction, scale=1.0)
    torch.testing.assert_close(out[0], values[17], rtol=0, atol=1e-3)
    assert lse.item() == pytest.approx(norm**2 * (sign + 5), rel=1e-3)


@pytest.mark.parametrize("norm", [1e2, 1e4, 1e10, 1e17])
def test_scores_far_below_zero_are_as_good_as_any(every_isa, norm):
    direction = torch.nn.functional.normalize(torch.randn(1, 16), dim=-1)
    keys = norm * (-direction + 0.01 * torch.randn(300, 16))
    values = torch.randn(300, 16)
    everything = kv_of(keys, values, ScanConfig(budget=1.0, exact_below=0))
    exact = everything.attend(norm * direction, scale=1.0, exact=True)
    out, lse = everything.attend(norm * direction, scale=1.0)
    assert everything.last_stats.rows.item() == 300
    torch.testing.assert_close(out, exact[0])
    torch.testing.assert_close(lse, exact[1])
    out, lse = kv_of(keys, values).attend(norm * direction, scale=1.0)
    assert lse.item() == pytest.approx(exact[1].item(), rel=0.02)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_one_token(every_isa, bits):
    for min_rows in (0, 1):
        value = torch.randn(1, 16)
        scan = ScanConfig(bits, 0.5, min_rows, exact_below=0)
        kv = kv_of(torch.randn(1, 16), value, scan)
        rows, _ = kv.sample(torch.randn(1, 16))
        out, _ = kv.attend(torch.randn(1, 16))
        if min_rows:
            assert rows[0].tolist() == [0]
            torch.testing.assert_close(out, value)
        assert out.isfinite().all()


def test_nothing(every_isa):
    kv = LayerKV(2, 1, 16, SCAN)
    out, lse = kv.attend(torch.randn(2, 16))
    assert out.tolist() == torch.zeros(2, 16).tolist()
    assert lse.tolist() == [-math.inf] * 2
    assert [len(rows) for rows in kv.sample(torch.randn(2, 16))[0]] == [0, 0]


@pytest.mark.parametrize("period", [8, 16, 24, 32, 23])
@pytest.mark.parametrize("tokens", [16384, 65536])
def test_text_that_repeats_itself_is_read_as_much_as_any(period, tokens):
    """Thresholds come from a sample of keys, which must not be in step with the text."""
    torch.manual_seed(period)
    once = torch.randn(period, 16)
    keys = once.repeat(-(-tokens // period), 1)[:tokens] + 0.02 * torch.randn(tokens, 16)
    kv = kv_of(keys, torch.randn(tokens, 16))
    shares = []
    for _ in range(20):
        kv.attend(3 * torch.randn(1, 16))
        shares.append(kv.last_stats.rows.item() / (SCAN.budget * tokens))
    assert min(shares) > 0.6
    assert max(shares) < 1.6
