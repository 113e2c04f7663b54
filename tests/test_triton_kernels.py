"""Kernels in Triton against plain torch: on a GPU, or interpreted (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

from magicpig.attention.mass import attention_mass
from magicpig.attention.merge import merge
from magicpig.attention.scoring import Scoring, attend_to_all

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", reason="needs Triton, which comes with torch for CUDA")
pytestmark = pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA GPU, or TRITON_INTERPRET=1",
)

DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]


def on_device(*tensors):
    return [tensor.to(DEVICE) for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("span", [None, 64])
@pytest.mark.parametrize(
    ("heads", "lengths"),
    [((6, 2, 16), [5, 70]), ((4, 4, 80), [150]), ((9, 3, 64), [0, 1, 130]), ((32, 1, 24), [64])],
)
def test_a_step_over_windows(heads, lengths, span, softcap, dtype):
    from magicpig.attention.window_on_gpu import merge_into, step

    torch.manual_seed(0)
    num_heads, kv_heads, dim = heads
    batch, capacity = len(lengths), 160
    queries = torch.randn(batch, num_heads, dim).to(dtype)
    keys, values = torch.randn(2, batch, kv_heads, capacity, dim).to(dtype)
    new_keys, new_values = torch.randn(2, batch, kv_heads, dim).to(dtype)
    there = on_device(queries, new_keys, new_values, keys, values)
    near = step(*there, *on_device(torch.tensor(lengths, dtype=torch.int32)), 0.3, softcap, span)
    for i, length in enumerate(lengths):
        keys[i, :, length], values[i, :, length] = new_keys[i], new_values[i]
    assert torch.equal(there[3].cpu(), keys)
    assert torch.equal(there[4].cpu(), values)
    seen = torch.tensor(lengths)[:, None] + 1
    hidden = torch.arange(capacity) >= seen
    if span:
        hidden |= torch.arange(capacity) < seen - span
    expected = attend_to_all(queries.float(), keys, values, Scoring(0.3, softcap), hidden[:, None])
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for got, wanted in zip(near, expected, strict=True):
        torch.testing.assert_close(got.cpu(), wanted, atol=tolerance, rtol=tolerance)
    far_out, far_lse = torch.randn(batch, num_heads, dim), torch.randn(batch, num_heads)
    far_lse[0, 0] = -torch.inf
    merged = merge_into(near, tuple(on_device(far_out, far_lse)), torch.float32).cpu()
    wanted, _ = merge(*expected, far_out, far_lse)
    torch.testing.assert_close(merged, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    "sizes", [(2, 6, 2, 9, 13, 16), (1, 6, 2, 100, 300, 24), (1, 4, 4, 130, 131, 80)]
)
def test_what_tokens_get_of_attention(sizes, softcap):
    from magicpig.attention.mass_on_gpu import causal_mass

    torch.manual_seed(0)
    batch, heads, kv_heads, num_queries, tokens, dim = sizes
    queries = torch.randn(batch, heads, num_queries, dim)
    keys = torch.randn(batch, kv_heads, tokens, dim)
    expected = attention_mass(queries, keys, None, 0.3, softcap)
    got = causal_mass(*on_device(queries, keys), 0.3, softcap).cpu()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
