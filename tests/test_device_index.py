"""Segments whose keys torch has hashed are those of the native core."""

import pytest
import torch

from magicpig import LayerKV, LSHConfig
from magicpig.kv.device_index import append_from

CPU = torch.device("cpu")


def rows(tokens, dim=64, heads=2, dtype=torch.bfloat16):
    torch.manual_seed(tokens)
    keys = torch.randn(heads, 1, dim) + torch.randn(heads, tokens, dim)
    return keys.to(dtype), torch.randn(heads, tokens, dim).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("dim", "bits", "tables"), [(64, 10, 150), (40, 7, 31), (128, 16, 9)])
def test_memory_is_the_native_cores(dtype, dim, bits, tables):
    lsh = LSHConfig(bits, tables, exact_below=0)
    keys, values = rows(3000, dim, dtype=dtype)
    native, made = (LayerKV(4, 2, dim, lsh, dtype) for _ in range(2))
    native.append(keys, values)
    append_from(CPU, made, keys, values)
    (their_rows, their_tables), (our_rows, our_tables) = (
        kv._native.segment_memory(0) for kv in (native, made)
    )
    assert (their_rows == our_rows).all()
    assert their_tables.shape == our_tables.shape
    # Ids after a key whose projection lies within rounding of zero stand elsewhere in that table.
    query = torch.randn(4, dim)
    for theirs, ours in zip(native.sample(query)[0], made.sample(query)[0], strict=True):
        differing = set(theirs.tolist()) ^ set(ours.tolist())
        assert len(differing) <= max(1, 0.01 * len(theirs))


def test_attention_is_the_native_cores():
    lsh = LSHConfig(6, 60)
    keys, values = rows(5000)
    native, made = (LayerKV(6, 2, 64, lsh) for _ in range(2))
    native.append(keys, values)
    append_from(CPU, made, keys, values)
    queries = torch.randn(6, 64)
    for exact in (True, False):
        (out, lse), (other, other_lse) = (kv.attend(queries, exact=exact) for kv in (native, made))
        assert torch.allclose(out, other, atol=0.05)
        assert torch.allclose(lse, other_lse, atol=0.05)
    made.append(*rows(2000))  # goes on as any other
    assert made.num_tokens == 7000


def test_keys_at_the_mean_are_always_drawn():
    keys = torch.ones(1, 300, 16)
    keys[:, 0] = 3
    keys[:, 1] = -1
    made = LayerKV(1, 1, 16, LSHConfig(8, 10, exact_below=0), torch.float32)
    append_from(CPU, made, keys, torch.randn(1, 300, 16))
    drawn = set(made.sample(torch.randn(1, 16))[0][0].tolist())
    assert set(range(2, 300)) <= drawn


def test_long_and_short_ones():
    made = LayerKV(1, 1, 8, LSHConfig(4, 3), torch.float32)
    keys = torch.randn(1, 65536 + 10, 8)
    append_from(CPU, made, keys, keys)
    assert made.segment_sizes == [65536, 10]
    assert made.nbytes.index > 0
    assert torch.equal(made.read()[0], keys)
    dense = LayerKV(1, 1, 8, None, torch.float32)
    append_from(CPU, dense, keys, keys)
    assert dense.nbytes.index == 0
    assert dense.num_tokens == 65546


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e19])
def test_bad_numbers_are_refused(bad):
    made = LayerKV(1, 1, 8, LSHConfig(4, 3), torch.float32)
    keys = torch.randn(1, 50, 8)
    spoiled = keys.clone()
    spoiled[0, 7, 3] = bad
    for tensors, name in (((spoiled, keys), "keys"), ((keys, spoiled), "values")):
        with pytest.raises(ValueError, match=f"{name} at .* token 7 is NaN"):
            append_from(CPU, made, *tensors)
    assert made.num_tokens == 0
