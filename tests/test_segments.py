"""Segments: how they are cut, merged, shared and counted."""

import itertools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magicpig import LayerKV, LSHConfig

FULL = 65_536


def random_kv(tokens, heads=1, dim=8, dtype=torch.bfloat16):
    return torch.randn(heads, tokens, dim).to(dtype), torch.randn(heads, tokens, dim).to(dtype)


@given(cuts=st.lists(st.integers(0, 300), max_size=6))
def test_appends_in_any_split_give_the_same_exact_attention(cuts):
    torch.manual_seed(1)
    keys, values = random_kv(300, heads=2, dim=16, dtype=torch.float32)
    lsh = LSHConfig(3, 10, exact_below=0)
    whole, pieces = (LayerKV(4, 2, 16, lsh, torch.float32) for _ in range(2))
    whole.append(keys, values)
    borders = [0, *sorted(cuts), 300]
    for first, last in itertools.pairwise(borders):
        pieces.append(keys[:, first:last], values[:, first:last])
    queries = torch.randn(4, 16)
    assert pieces.num_tokens == 300
    for a, b in zip(
        whole.attend(queries, exact=True), pieces.attend(queries, exact=True), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokens", [FULL - 1, FULL, FULL + 1, 2 * FULL + 3])
def test_long_input_is_cut_at_the_largest_segment(tokens):
    kv = LayerKV(1, 1, 8, LSHConfig(4, 3, exact_below=0))
    kv.append(*random_kv(tokens))
    sizes = kv.segment_sizes
    assert sum(sizes) == tokens
    assert sizes == [FULL] * (tokens // FULL) + ([tokens % FULL] if tokens % FULL else [])
    rows, _ = kv.sample(torch.randn(1, 8))
    assert rows[0].max() > tokens * 0.9
    assert rows[0].unique().numel() == rows[0].numel()


def test_ten_thousand_small_appends_leave_a_short_list_at_constant_cost():
    kv = LayerKV(2, 1, 32, LSHConfig(8, 20))
    kv.append(*random_kv(40_000, dim=32))
    seconds = []
    generator = torch.Generator().manual_seed(0)
    keys, values = random_kv(3, dim=32)
    appended = 0
    for _ in range(4):
        start = time.process_time()
        for _ in range(2500):
            tokens = int(torch.randint(1, 4, (), generator=generator))
            kv.append(keys[:, :tokens], values[:, :tokens])
            appended += tokens
        seconds.append(time.process_time() - start)
    assert kv.num_tokens == 40_000 + appended
    assert len(kv.segment_sizes) <= 27
    assert max(kv.segment_sizes) <= FULL
    assert seconds[3] < 3 * min(seconds[:2]) + 0.5  # no growth with the length


def test_segments_grow_geometrically():
    kv = LayerKV(1, 1, 8)
    keys, values = random_kv(1)
    lists = []
    for _ in range(64):
        kv.append(keys, values)
        lists.append(kv.segment_sizes)
    assert lists[2] == [1, 1, 1]
    assert lists[3] == [4]
    assert lists[15] == [16]
    assert lists[62] == [16] * 3 + [4] * 3 + [1] * 3
    assert lists[63] == [64]


def test_a_long_append_swallows_the_small_segments_before_it():
    kv = LayerKV(1, 1, 8)
    for tokens in (1, 1, 1, 500):
        kv.append(*random_kv(tokens))
    assert kv.segment_sizes == [503]


def test_forks_share_memory_and_do_not_see_each_other():
    keys, values = random_kv(500, heads=2, dim=16)
    kv = LayerKV(4, 2, 16, LSHConfig(4, 20))
    kv.append(keys, values)
    queries = torch.randn(4, 16)
    before = kv.attend(queries)
    fork = kv.fork()
    fork.append(*random_kv(300, heads=2, dim=16))
    second = fork.fork()
    kv.append(*random_kv(2, heads=2, dim=16))
    assert (kv.num_tokens, fork.num_tokens, second.num_tokens) == (502, 800, 800)
    again = LayerKV(4, 2, 16, LSHConfig(4, 20))
    again.append(keys, values)
    assert torch.equal(again.attend(queries)[0], before[0])
    fork.append(*random_kv(1, heads=2, dim=16))
    assert second.num_tokens == 800
    del kv, fork
    assert torch.isfinite(second.attend(queries)[0]).all()


def test_forking_costs_no_memory():
    kv = LayerKV(2, 1, 64, LSHConfig(6, 30))
    kv.append(*random_kv(50_000, dim=64))
    start = time.perf_counter()
    forks = [kv.fork() for _ in range(1000)]
    assert time.perf_counter() - start < 0.5  # 1000 copies of 12 MB would take longer
    assert forks[-1].nbytes == kv.nbytes


def test_nbytes_counts_rows_and_index():
    lsh = LSHConfig(6, 10)
    kv = LayerKV(2, 2, 80, lsh)
    kv.append(*random_kv(1000, heads=2, dim=80))
    ids, offsets, norms, mean = 2 * 10 * 1000, 4 * 10 * (2**6 + 1), 4 * 1000, 4 * 80
    assert kv.nbytes.rows == 2 * 1000 * 2 * 80 * 2
    assert 2 * (ids + offsets + norms + mean) <= kv.nbytes.index
    assert kv.nbytes.index <= 2 * (ids + offsets + norms + mean + 4 * 64)


def test_short_segments_are_read_whole():
    kv = LayerKV(1, 1, 16, LSHConfig(6, 10))
    kv.append(*random_kv(63, dim=16))
    rows, logs = kv.sample(torch.randn(1, 16))
    assert rows[0].tolist() == list(range(63))
    assert logs[0].tolist() == [0.0] * 63
    assert kv.nbytes.index == 0
    kv.append(*random_kv(1000, dim=16))
    assert kv.nbytes.index > 0
