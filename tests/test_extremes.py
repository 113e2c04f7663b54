"""Keys no model should have, but one will."""

import math

import pytest
import torch

from magicpig import LayerKV, LSHConfig

LSH = LSHConfig(3, 30, exact_below=0)


def kv_of(keys, values=None, dtype=torch.float32, lsh=LSH):
    kv = LayerKV(1, 1, keys.shape[-1], lsh, dtype)
    kv.append(keys[None], (torch.randn_like(keys) if values is None else values)[None])
    return kv


@pytest.mark.parametrize("key", [0.0, 1.0, -3e-3, 1e6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_keys_give_the_mean_value(every_isa, key, dtype):
    """All keys lie at their mean, where no angle tells them apart: all are read."""
    values = torch.randn(100, 16).to(dtype)
    kv = kv_of(torch.full((100, 16), key, dtype=dtype), values, dtype)
    for _ in range(5):
        query = torch.randn(1, 16)
        for exact in (False, True):
            out, lse = kv.attend(query, exact=exact)
            assert kv.last_stats.rows.item() == 100
            torch.testing.assert_close(out[0], values.float().mean(0), rtol=0, atol=1e-2)
            score = key * query.double().sum().item() / 4
            assert lse.item() == pytest.approx(score + math.log(100), rel=1e-3, abs=1e-2)


def test_some_keys_at_the_mean_among_others(every_isa):
    keys = torch.randn(200, 16)
    keys = 100 + torch.cat([keys, -keys, torch.zeros(50, 16)])[torch.randperm(450)]
    kv = kv_of(keys)
    rows, logs = kv.sample(torch.randn(1, 16))
    at_mean = (keys == 100).all(-1).nonzero()[:, 0]
    assert at_mean.numel() == 50
    assert set(at_mean.tolist()) <= set(rows[0].tolist())
    assert (logs[0][torch.isin(rows[0], at_mean)] == 0).all()
    assert rows[0].unique().numel() == rows[0].numel() < 450


def test_nearly_equal_keys_do_not_get_absurd_weights(every_isa):
    """Differences at the level of rounding have no angle; weights from one would be noise."""
    keys = 100 + 1e-5 * torch.randn(200, 32)
    kv = kv_of(keys)
    for _ in range(10):
        _, logs = kv.sample(torch.randn(1, 32))
        assert (logs[0] > -3).all()


def test_a_zero_query_draws_at_right_angles(every_isa):
    kv = kv_of(torch.randn(300, 16))
    _, logs = kv.sample(torch.zeros(1, 16))
    out, lse = kv.attend(torch.zeros(1, 16))
    assert torch.isfinite(out).all()
    assert logs[0].unique().numel() <= 1
    exact = kv.attend(torch.zeros(1, 16), exact=True)
    assert exact[1].item() == pytest.approx(math.log(300), abs=1e-4)
    assert lse.item() == pytest.approx(math.log(300), abs=1.0)


@pytest.mark.parametrize("norm", [1e-30, 1e-10, 1e10, 1e17])
def test_huge_and_tiny_norms_stay_finite(every_isa, norm):
    keys = torch.nn.functional.normalize(torch.randn(100, 16), dim=-1) * norm
    kv = kv_of(keys)
    for query_norm in (1e-20, 1.0, 1e17):
        query = torch.nn.functional.normalize(torch.randn(1, 16), dim=-1) * query_norm
        for exact in (True, False):
            out, lse = kv.attend(query, exact=exact, scale=100.0)
            assert torch.isfinite(out).all()
            assert not lse.isnan().any()
            if norm * query_norm < 1e-6:  # then all weights are one
                assert lse.item() == pytest.approx(math.log(100), abs=0.5)


def test_the_largest_score_wins_when_scores_are_huge(every_isa):
    keys = torch.zeros(50, 16)
    keys[17, 0] = 1e9
    values = torch.randn(50, 16)
    kv = kv_of(keys, values)
    query = torch.zeros(1, 16)
    query[0, 0] = 1e9
    out, _ = kv.attend(query, exact=True)
    torch.testing.assert_close(out[0], values[17], rtol=0, atol=1e-6)


def test_one_key(every_isa):
    value = torch.randn(1, 16)
    kv = kv_of(torch.randn(1, 16), value)
    out, _ = kv.attend(torch.randn(1, 16), exact=True)
    torch.testing.assert_close(out, value)


def test_nothing(every_isa):
    kv = LayerKV(2, 1, 16, LSH)
    for exact in (True, False):
        out, lse = kv.attend(torch.randn(2, 16), exact=exact)
        assert out.tolist() == torch.zeros(2, 16).tolist()
        assert lse.tolist() == [-math.inf] * 2
    kv.append(torch.empty(1, 0, 16), torch.empty(1, 0, 16))
    assert kv.num_tokens == 0
    assert kv.segment_sizes == []
