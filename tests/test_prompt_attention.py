"""Attention of many queries: the native core against the plain formula, one query at a time."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import magicpig
from magicpig import _native, reference
from magicpig.attention import exact, in_torch


def make_rows(heads, kv_heads, queries, tokens, dim):
    return (
        torch.randn(heads, queries, dim).bfloat16(),
        torch.randn(kv_heads, tokens, dim).bfloat16(),
        torch.randn(kv_heads, tokens, dim).bfloat16(),
    )


def natively(queries, keys, values, scale, softcap=None, span=None):
    """[num_queries, num_heads, head_dim]"""
    out = torch.full((queries.shape[1], queries.shape[0], queries.shape[2]), 7.0).bfloat16()
    _native.attend_prompt(queries, keys, values, scale, softcap or 0.0, span or 0, out)
    return out


def plainly(queries, keys, values, scale, softcap=None, span=None):
    heads, num_queries, dim = queries.shape
    out = torch.empty(num_queries, heads, dim, dtype=torch.float64)
    for i in range(num_queries):
        end = keys.shape[1] - num_queries + i + 1
        seen = slice(max(0, end - span) if span else 0, end)
        for h in range(heads):
            g = h * len(keys) // heads
            out[i, h], _ = reference.exact_attention(
                queries[h, i], keys[g, seen], values[g, seen], scale, softcap
            )
    return out


def assert_close(ours, truth):
    """Within the rounding of the weights (averaging out) and of the result to bfloat16."""
    assert torch.isfinite(ours).all()
    assert (ours.double() - truth).abs().max() < 2**-7 * truth.abs().max()
    assert (ours.double() - truth).norm() < 2**-8 * truth.norm()


@pytest.mark.parametrize(
    ("queries", "tokens"),
    [(1, 1), (1, 2), (1, 33), (2, 2), (5, 5), (3, 31), (4, 32), (13, 45), (40, 300), (33, 257)],
)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_every_shape_equals_the_formula(every_isa, queries, tokens, group):
    rows = make_rows(2 * group, 2, queries, tokens, 32)
    assert_close(natively(*rows, 0.3), plainly(*rows, 0.3))


@pytest.mark.parametrize("dim", [8, 16, 24, 40, 64, 72, 80, 128, 256])
def test_every_head_dim_equals_the_formula(every_isa, dim):
    rows = make_rows(3, 1, 7, 70, dim)
    assert_close(natively(*rows, dim**-0.5), plainly(*rows, dim**-0.5))


@pytest.mark.parametrize("span", [1, 2, 30, 31, 32, 33, 64, 299, 300, 10**6])
def test_a_span_hides_what_is_older(every_isa, span):
    rows = make_rows(4, 2, 40, 300, 16)
    assert_close(natively(*rows, 0.5, span=span), plainly(*rows, 0.5, span=span))


def test_a_span_of_one_gives_the_own_value(every_isa):
    rows = make_rows(4, 2, 40, 300, 16)
    own = rows[2][:, -40:].repeat_interleave(2, 0).transpose(0, 1)
    assert torch.equal(natively(*rows, 0.5, span=1), own)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("span", [None, 50])
def test_scores_are_bent(every_isa, softcap, span):
    rows = make_rows(6, 2, 20, 100, 64)
    assert_close(natively(*rows, 1.0, softcap, span), plainly(*rows, 1.0, softcap, span))


@pytest.mark.parametrize("span", [None, 3000])
def test_contexts_longer_than_what_is_packed_at_once(every_isa, span):
    if every_isa == "scalar":
        pytest.skip("plain code would take long")
    rows = make_rows(2, 1, 700, 5001, 16)
    ours = natively(*rows, 0.6, span=span)
    some = [0, 1, 255, 511, 512, 513, 699]
    for i in some:
        end = 5001 - 700 + i + 1
        alone = (rows[0][:, i : i + 1], rows[1][:, :end], rows[2][:, :end])
        assert_close(ours[i : i + 1], plainly(*alone, 0.6, span=span))


def test_large_scores_do_not_overflow(every_isa):
    """The last keys outweigh all before them, again and again."""
    queries, keys, values = make_rows(3, 1, 9, 600, 32)
    keys = keys * torch.linspace(1, 40, 600)[:, None].bfloat16()
    rows = (queries, keys, values)
    truth = plainly(*rows, 5.0)
    assert (natively(*rows, 5.0).double() - truth).abs().max() < 0.02 * truth.abs().max()


def test_huge_scores_pick_one_value(every_isa):
    queries, keys, values = make_rows(4, 2, 30, 300, 32)
    queries, keys = queries * 1e9, keys * 1e9
    truth = plainly(queries, keys, values, 1.0)
    assert torch.equal(natively(queries, keys, values, 1.0), truth.bfloat16())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_the_queries_that_see_it_only(every_isa, value):
    queries, keys, values = make_rows(2, 1, 200, 200, 16)
    keys[0, 60] = values[0, 60] = value
    queries[:, 150] = value
    out = natively(queries, keys, values, 0.5, span=30)
    finite = torch.isfinite(out).flatten(1).all(1)
    places = torch.arange(200)
    assert not finite[60:90].any()
    assert not finite[150]
    # Zero weight times NaN is NaN: rows of a tile and tokens of a group share it.
    near = (places >= 60 - 42) & (places < 90 + 42) | (places == 150)
    assert finite[~near].all()


def test_keys_that_score_minus_infinity_have_no_weight(every_isa):
    queries, keys, values = make_rows(1, 1, 4, 50, 16)
    queries, keys[0, 10] = queries.abs() + 0.1, float("-inf")
    without = [torch.cat([x[:, :10], x[:, 11:]], 1) for x in (keys, values)]
    assert_close(natively(queries, keys, values, 0.5), plainly(queries, *without, 0.5))


def test_strided_rows(every_isa):
    queries, keys, values = make_rows(4, 2, 20, 90, 32)
    wide = torch.randn(90, 3, 2, 96).bfloat16()  # tokens first, other heads and elements between
    wide[:, 0, :, :32], wide[:, 2, :, 32:64] = keys.transpose(0, 1), values.transpose(0, 1)
    strided = (
        queries.transpose(0, 1).contiguous().transpose(0, 1),
        wide[:, 0, :, :32].transpose(0, 1),
        wide[:, 2, :, 32:64].transpose(0, 1),
    )
    assert torch.equal(natively(*strided, 0.3), natively(queries, keys, values, 0.3))


@pytest.mark.parametrize("shape", [(6, 2, 300, 2500, 40), (1, 1, 2, 2, 8), (9, 3, 33, 1000, 64)])
def test_the_number_of_threads_changes_nothing(shape):
    rows = make_rows(*shape)
    before = magicpig.num_threads()
    outs = []
    for count in (1, 2, 5):
        magicpig.set_num_threads(count)
        outs.append(natively(*rows, 0.2, span=900))
    magicpig.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_it_is_as_close_as_torch(every_isa, spread):
    queries, keys, values = make_rows(3, 1, 60, 500, 64)
    queries = queries * spread
    truth = plainly(queries, keys, values, 0.125)
    ours = natively(queries, keys, values, 0.125).double()
    mask = torch.arange(500) <= torch.arange(440, 500)[:, None]
    theirs = scaled_dot_product_attention(
        queries[None], keys[None], values[None], mask[None, None], scale=0.125, enable_gqa=True
    )[0].transpose(0, 1)
    assert (ours - truth).norm() <= 1.3 * (theirs.double() - truth).norm()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("span", [None, 7])
def test_exact_attention_takes_the_native_path_and_agrees_with_torch(softcap, span, monkeypatch):
    queries, keys, values = (torch.stack([x, -x]) for x in make_rows(4, 2, 30, 80, 32))
    calls = []
    native = _native.attend_prompt
    monkeypatch.setattr(_native, "attend_prompt", lambda *args: calls.append(args) or native(*args))
    out = exact.exact_attention(queries, keys, values, None, 0.2, softcap, span)
    assert out.shape == queries.shape
    assert len(calls) == (0 if magicpig.isa() == "scalar" else 2)
    expected = exact.exact_attention(
        queries.float(), keys.float(), values.float(), None, 0.2, softcap, span
    )
    assert torch.allclose(out.float(), expected, atol=0.02)


def test_gradients_are_left_to_torch():
    queries, keys, values = (x[None] for x in make_rows(4, 2, 3, 8, 16))
    queries.requires_grad_()
    exact.exact_attention(queries, keys, values, None, 0.2).float().sum().backward()
    assert queries.grad is not None


def test_a_mask_and_a_span_are_refused():
    queries, keys, values = (x[None] for x in make_rows(2, 1, 3, 8, 16))
    mask = torch.ones(1, 1, 3, 8, dtype=torch.bool)
    with pytest.raises(ValueError, match="mask and span"):
        exact.exact_attention(queries, keys, values, mask, 0.2, span=4)


GOOD = {
    "queries": torch.zeros(4, 3, 16).bfloat16(),
    "keys": torch.zeros(2, 8, 16).bfloat16(),
    "values": torch.zeros(2, 8, 16).bfloat16(),
    "scale": 0.5,
    "softcap": 0.0,
    "span": 0,
    "out": torch.zeros(3, 4, 16).bfloat16(),
}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"queries": torch.zeros(4, 16).bfloat16()}, "queries must have shape"),
        ({"queries": torch.zeros(4, 3, 12).bfloat16()}, "multiple of 8"),
        ({"queries": torch.zeros(4, 3, 264).bfloat16()}, "up to 256"),
        ({"queries": torch.zeros(4, 9, 16).bfloat16()}, "at least as many tokens"),
        ({"queries": torch.zeros(3, 3, 16).bfloat16()}, "keys must have a number of heads"),
        ({"queries": torch.zeros(4, 3, 32).bfloat16()[..., ::2]}, "queries must be contiguous"),
        ({"keys": torch.zeros(2, 8, 24).bfloat16()}, "keys must have shape"),
        ({"keys": torch.zeros(0, 8, 16).bfloat16()}, "keys must have a number of heads"),
        ({"keys": torch.zeros(2, 8, 32).bfloat16()[..., ::2]}, "keys must be contiguous"),
        ({"keys": torch.zeros(2, 8, 16)}, "keys must be bfloat16"),
        ({"values": torch.zeros(2, 7, 16).bfloat16()}, "values must have the shape of keys"),
        ({"values": torch.zeros(2, 8, 16).half()}, "values must be bfloat16"),
        ({"scale": 0.0}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"softcap": -1.0}, "softcap"),
        ({"out": torch.zeros(4, 3, 16).bfloat16()}, "out must have shape"),
        ({"out": torch.zeros(3, 4, 16)}, "out must be bfloat16"),
        ({"out": torch.zeros(3, 4, 32).bfloat16()[..., :16]}, "out must be contiguous"),
    ],
)
def test_errors_name_the_argument(bad, message):
    _native.attend_prompt(**GOOD)
    with pytest.raises((ValueError, TypeError), match=message):
        _native.attend_prompt(**GOOD | bad)


@pytest.mark.parametrize("at_once", [1, 700, 2**24])
def test_some_queries_at_a_time(at_once, monkeypatch):
    """As torch does it on a GPU in float32, and with soft-capped scores anywhere."""
    monkeypatch.setattr(in_torch, "SCORES_AT_ONCE", at_once)
    torch.manual_seed(0)
    queries = torch.randn(2, 6, 9, 16)
    keys, values = torch.randn(2, 2, 2, 13, 16)
    expected = in_torch.attention_in_torch(queries, keys, values, None, 0.3)
    # Keys that heads share are not written out for each: a long prompt's take more than is counted.
    monkeypatch.setattr(in_torch, "_for_each_head", None)
    got = in_torch._in_parts(queries, keys, values, 0.3)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    hardly_bent = in_torch.attention_in_torch(queries, keys, values, None, 0.3, softcap=1e4)
    torch.testing.assert_close(hardly_bent, expected, atol=1e-4, rtol=1e-4)
