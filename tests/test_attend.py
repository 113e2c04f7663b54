"""Native attention against the reference, over shapes, dtypes, groups, lengths, ISAs."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import magicpig
from magicpig import LayerKV, LSHConfig, reference
from magicpig.kv.layer import native_lsh
from tests.contexts import assert_weighted_softmax, make_context, tolerance

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LENGTHS = [0, 1, 15, 16, 17, 31, 33, 129, 300]

shapes = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from(LENGTHS),
        "num_kv_heads": st.integers(1, 3),
        "head_dim": st.sampled_from([8, 16, 24, 64, 80, 96, 128, 256]),
        "dtype": st.sampled_from(DTYPES),
    }
)
groups = st.integers(1, 9)
indexes = st.builds(
    lambda bits, tables, collisions, seed: LSHConfig(
        bits, max(tables, collisions), collisions, seed, exact_below=0
    ),
    st.integers(1, 9),
    st.integers(1, 80),
    st.integers(1, 3),
    st.integers(0, 5),
)


@given(shape=shapes, group=groups)
def test_exact_attention_equals_the_reference(every_isa, shape, group):
    context = make_context(num_heads=group * shape["num_kv_heads"], **shape)
    out, lse = context.kv.attend(context.queries, exact=True)
    for head in range(context.kv.num_heads):
        expected_out, expected_lse = context.exact(head)
        atol = tolerance(shape["dtype"])
        torch.testing.assert_close(out[head].double(), expected_out, rtol=0, atol=atol)
        torch.testing.assert_close(lse[head].double(), expected_lse, rtol=0, atol=atol)


def native_codes(context, head, lsh):
    """Buckets of the query and of the stored keys, as the native tables have them."""
    query = context.queries[head][None]
    return (
        native_lsh(lsh, context.kv.head_dim).codes(query)[0],
        context.kv._native.segment_codes(0, context.kv_head(head)),
    )


@given(shape=shapes, group=groups, lsh=indexes)
@example(
    shape={"tokens": 300, "num_kv_heads": 1, "head_dim": 64, "dtype": torch.float32},
    group=1,
    lsh=LSHConfig(2, 400, 200, exact_below=0),  # more tables than an 8-bit counter counts
)
def test_the_drawn_set_is_exactly_the_colliding_keys(every_isa, shape, group, lsh):
    context = make_context(num_heads=group * shape["num_kv_heads"], index=lsh, **shape)
    all_rows, _ = context.kv.sample(context.queries)
    for head, rows in enumerate(all_rows):
        if shape["tokens"] == 0:
            assert rows.numel() == 0
            continue
        collisions = reference.collisions(*native_codes(context, head, lsh))
        always = reference.at_mean(reference.centre(context.keys[context.kv_head(head)]))
        expected = ((collisions >= lsh.min_collisions) | always).nonzero()[:, 0]
        assert rows.tolist() == expected.tolist()


@given(shape=shapes, lsh=indexes)
def test_keys_and_queries_are_hashed_like_the_reference(every_isa, shape, lsh):
    context = make_context(num_heads=shape["num_kv_heads"], index=lsh, **shape)
    if shape["tokens"] == 0:
        return
    for head in range(context.kv.num_heads):
        native_query, native_keys = native_codes(context, head, lsh)
        for vectors, native in (
            (context.queries[head][None], native_query[None]),
            (reference.centre(context.keys[head]), native_keys),
        ):
            projections = reference.project(vectors, lsh)
            # Where a projection is next to zero, the order of summation may turn its sign.
            clear = projections.abs() >= 0.01 * vectors.norm(dim=-1)[:, None, None]
            bits = native[..., None] >> torch.arange(lsh.bits_per_table) & 1
            assert torch.equal(bits[clear], (projections >= 0).int()[clear])
            assert clear.float().mean() > 0.8 or clear.numel() < 100


@given(shape=shapes, group=groups, lsh=indexes)
def test_sampled_attention_is_the_weighted_softmax_of_what_was_drawn(every_isa, shape, group, lsh):
    context = make_context(num_heads=group * shape["num_kv_heads"], index=lsh, **shape)
    assert_weighted_softmax(context, shape["dtype"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sampled_attention_equals_the_reference_end_to_end(every_isa, dtype):
    lsh = LSHConfig(4, 40, exact_below=0)
    context = make_context(tokens=700, head_dim=64, index=lsh, dtype=dtype)
    out, lse = context.kv.attend(context.queries)
    for head in range(context.kv.num_heads):
        g = context.kv_head(head)
        expected_out, expected_lse = reference.sampled_attention(
            context.queries[head], context.keys[g], context.values[g], lsh, context.scale
        )
        torch.testing.assert_close(out[head].double(), expected_out, rtol=0, atol=1e-2)
        torch.testing.assert_close(lse[head].double(), expected_lse, rtol=0, atol=1e-2)


def test_when_everything_collides_sampling_is_exact(every_isa):
    context = make_context(tokens=200, index=LSHConfig(1, 400, 1, exact_below=0), head_dim=16)
    sampled, exact = (
        context.kv.attend(context.queries),
        context.kv.attend(context.queries, exact=True),
    )
    assert context.kv.last_stats.share.tolist() == [1.0] * 4
    torch.testing.assert_close(sampled[0], exact[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(sampled[1], exact[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("exact", [True, False])
def test_a_batch_equals_its_sequences_one_by_one(every_isa, exact):
    lsh = LSHConfig(4, 30, exact_below=0)
    contexts = [
        make_context(tokens=n, index=lsh, dtype=torch.bfloat16, seed=n)
        for n in (0, 1, 400, 77, 9000)
    ]
    queries = torch.stack([c.queries for c in contexts])
    out, lse = magicpig.attend([c.kv for c in contexts], queries, exact=exact)
    for i, context in enumerate(contexts):
        stats = context.kv.last_stats
        alone = context.kv.attend(context.queries, exact=exact)
        assert torch.equal(out[i], alone[0])
        assert torch.equal(lse[i], alone[1])
        assert torch.equal(stats.rows, context.kv.last_stats.rows)


def test_scale_is_applied(every_isa):
    context = make_context(tokens=100)
    out, _ = context.kv.attend(context.queries, exact=True, scale=0.7)
    expected, _ = reference.exact_attention(
        context.queries[0], context.keys[0], context.values[0], 0.7
    )
    torch.testing.assert_close(out[0].double(), expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_softcap_is_applied(every_isa, softcap):
    lsh = LSHConfig(3, 30, exact_below=0)
    context = make_context(tokens=300, index=lsh, query_norm=5.0)
    for head in range(context.kv.num_heads):
        g = context.kv_head(head)
        inputs = (context.queries[head], context.keys[g], context.values[g])
        for exact, (out, lse) in (
            (True, reference.exact_attention(*inputs, 0.7, softcap)),
            (False, reference.sampled_attention(*inputs, lsh, 0.7, softcap)),
        ):
            result = context.kv.attend(context.queries, exact=exact, scale=0.7, softcap=softcap)
            torch.testing.assert_close(result[0][head].double(), out, rtol=0, atol=1e-3)
            torch.testing.assert_close(result[1][head].double(), lse, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_may_have_any_of_the_dtypes(every_isa, dtype):
    context = make_context(tokens=100, dtype=torch.bfloat16)
    queries = context.queries.to(dtype)
    out, lse = context.kv.attend(queries, exact=True)
    same_out, same_lse = context.kv.attend(queries.float(), exact=True)
    assert torch.equal(out, same_out)
    assert torch.equal(lse, same_lse)


def test_float32_queries_are_not_rounded_to_bfloat16(every_isa):
    """One token has weight 1, so lse is its score: bfloat16 queries would be off by 0.1."""
    for head_dim in (8, 16, 40, 128):
        kv = LayerKV(4, 1, head_dim, dtype=torch.bfloat16)
        keys = (30 * torch.randn(1, 1, head_dim)).bfloat16()
        kv.append(keys, keys)
        queries = torch.randn(4, head_dim)
        _, lse = kv.attend(queries)
        expected = queries.double() @ keys[0, 0].double() / head_dim**0.5
        torch.testing.assert_close(lse.double(), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("given_dtype", DTYPES)
def test_rows_are_converted_like_torch_does(every_isa, stored, given_dtype):
    kv = LayerKV(1, 1, 24, dtype=stored)
    keys = torch.randn(1, 40, 24).mul(10).to(given_dtype)
    values = torch.randn(1, 40, 24).to(given_dtype)
    values[0, 0, :4] = torch.tensor([1e-7, -3e-8, 2e-5, 65000 if stored != torch.float32 else 1.0])
    kv.append(keys, values)
    for token in range(40):  # a query that singles out one token reads its value back
        one = LayerKV(1, 1, 24, dtype=stored)
        one.append(keys[:, token : token + 1], values[:, token : token + 1])
        out, lse = one.attend(torch.ones(1, 24), exact=True)
        assert torch.equal(out[0], values[0, token].to(stored).float())
        score = keys[0, token].to(stored).double().sum() / 24**0.5
        assert lse.item() == pytest.approx(score.item(), abs=1e-4)


def test_strided_tensors_are_read_in_place(every_isa):
    storage = torch.randn(50, 2, 3, 32)
    keys, values = storage[:, :, 0].transpose(0, 1), storage[:, :, 2].transpose(0, 1)
    a, b = LayerKV(2, 2, 32), LayerKV(2, 2, 32)
    a.append(keys, values)
    b.append(keys.contiguous(), values.contiguous())
    queries = torch.randn(2, 32)
    assert torch.equal(a.attend(queries)[0], b.attend(queries)[0])


def test_the_index_is_optional_and_then_every_row_is_read():
    context = make_context(tokens=5000)
    context.kv.attend(context.queries)
    assert context.kv.last_stats.rows.tolist() == [5000] * 4
    assert context.kv.nbytes.index == 0


def test_views_with_a_pending_negation_are_read_right():
    keys = torch.randn(1, 10, 16)
    a, b = LayerKV(1, 1, 16), LayerKV(1, 1, 16)
    a.append(torch._neg_view(keys), keys)
    b.append(-keys, keys)
    assert torch.equal(a.attend(keys[0, :1])[0], b.attend(keys[0, :1])[0])
