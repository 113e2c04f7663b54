"""Attention over rows that the caller chose."""

import pytest
import torch

from magicpig import LayerKV, LSHConfig, ScanConfig, reference
from tests.contexts import make_context, tolerance

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    "index", [None, LSHConfig(4, 12, exact_below=0), ScanConfig(2, 0.2, 4, exact_below=100)]
)
def test_what_sample_gives_is_what_attend_reads(every_isa, index, softcap, dtype):
    context = make_context(tokens=700, index=index, dtype=dtype, head_dim=24, query_norm=2.0)
    more = make_context(tokens=90, index=index, dtype=dtype, head_dim=24, seed=1)
    context.kv.append(more.keys.to(dtype), more.values.to(dtype))
    out, lse = context.kv.attend(context.queries, softcap=softcap)
    sample = context.kv.sample(context.queries)
    got_out, got_lse = context.kv.attend_rows(context.queries, *sample, softcap=softcap)
    atol = tolerance(dtype)
    torch.testing.assert_close(got_out, out, atol=atol, rtol=0)
    torch.testing.assert_close(got_lse, lse, atol=atol, rtol=0)


def test_any_rows_with_any_probabilities(every_isa):
    context = make_context(tokens=500, num_heads=6, num_kv_heads=2, head_dim=80)
    generator = torch.Generator().manual_seed(0)
    rows, logs = [], []
    for count in (0, 1, 15, 16, 33, 400):
        rows.append(torch.randperm(500, generator=generator)[:count].int())
        logs.append(torch.rand(count, generator=generator).log())
    out, lse = context.kv.attend_rows(context.queries, rows, logs, scale=0.3)
    assert (out[0] == 0).all()
    assert lse[0] == -torch.inf
    for head in range(1, 6):
        g = context.kv_head(head)
        keys, values = (x[g][rows[head].long()] for x in (context.keys, context.values))
        logits = 0.3 * keys.double() @ context.queries[head].double() - logs[head].double()
        expected = reference.attend(logits, values)
        for mine, theirs in zip((out[head], lse[head]), expected, strict=True):
            torch.testing.assert_close(mine.double(), theirs, atol=3e-5, rtol=0)


def test_long_contexts_are_cut_into_segments():
    torch.manual_seed(0)
    kv = LayerKV(1, 1, 8, None, torch.float32)
    keys, values = torch.randn(2, 1, 70_000, 8)
    kv.append(keys, values)
    assert len(kv.segment_sizes) > 1
    rows = torch.tensor([0, 65_535, 65_536, 69_999, 40_000], dtype=torch.int32)
    query = torch.randn(1, 8)
    out, _ = kv.attend_rows(query, [rows], [torch.zeros(5)])
    at = rows.long()
    weights = (keys[0, at] @ query[0] * 8**-0.5).softmax(0)
    torch.testing.assert_close(out[0], weights @ values[0, at], atol=1e-5, rtol=0)


def given(rows=((3, 4), (5,)), logs=((-1.0, -0.5), (0.0,))):
    return (
        [torch.tensor(each, dtype=torch.int32) for each in rows],
        [torch.tensor(each, dtype=torch.float32) for each in logs],
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (given(rows=((3, 10), (5,))), ValueError, "row 10 is not among the 10 tokens"),
        (given(rows=((-1, 4), (5,))), ValueError, "row -1 is not among"),
        (given(logs=((0.1, 0.0), (0.0,))), ValueError, "log_probability must be 0 at most"),
        (given(logs=((float("nan"), 0.0), (0.0,))), ValueError, "log_probability must be 0"),
        (given(logs=((-float("inf"), 0.0), (0.0,))), ValueError, "and finite, not -inf"),
        (given(logs=((0.0,), (0.0,))), ValueError, "as many elements, head by head"),
        ((given()[0][:1], given()[1][:1]), ValueError, "a list of 2 tensors"),
        (([x.long() for x in given()[0]], given()[1]), TypeError, r"rows\[0\] must be a tensor"),
        ((given()[0], [x.double() for x in given()[1]]), TypeError, "log_probability"),
    ],
)
def test_what_is_wrong_is_said(arguments, error, message):
    context = make_context(tokens=10, num_heads=2, num_kv_heads=1)
    with pytest.raises(error, match=message):
        context.kv.attend_rows(context.queries, *arguments)
    assert context.kv.attend_rows(context.queries, *given())[0].isfinite().all()
