"""Segments: how they are cut, merged, shared and counted."""

import itertools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magicpig import LayerKV, LSHConfig, ScanConfig

FULL = 65_536
INDEXES = [LSHConfig(4, 20), ScanConfig(budget=0.1)]


def random_kv(tokens, heads=1, dim=8, dtype=torch.bfloat16):
    return torch.randn(heads, tokens, dim).to(dtype), torch.randn(heads, tokens, dim).to(dtype)


@pytest.mark.parametrize(
    "index", [LSHConfig(3, 10, exact_below=0), ScanConfig(min_rows=8, exact_below=0)]
)
@given(cuts=st.lists(st.integers(0, 300), max_size=6))
def test_appends_in_any_split_give_the_same_exact_attention(index, cuts):
    torch.manual_seed(1)
    keys, values = random_kv(300, heads=2, dim=16, dtype=torch.float32)
    whole, pieces = (LayerKV(4, 2, 16, index, torch.float32) for _ in range(2))
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
@pytest.mark.parametrize("index", [LSHConfig(4, 3, exact_below=0), ScanConfig(exact_below=0)])
def test_long_input_is_cut_at_the_largest_segment(tokens, index):
    kv = LayerKV(1, 1, 8, index)
    kv.append(*random_kv(tokens))
    sizes = kv.segment_sizes
    assert sum(sizes) == tokens
    assert sizes == [FULL] * (tokens // FULL) + ([tokens % FULL] if tokens % FULL else [])
    rows, _ = kv.sample(torch.randn(1, 8))
    assert rows[0].max() > tokens * 0.9
    assert rows[0].unique().numel() == rows[0].numel()


def test_the_last_row_of_a_full_segment_is_read_right(every_isa):
    """Row ids are 16 bits wide: the highest must not be taken for a negative number."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        keys = 0.01 * torch.randn(1, FULL + 2, 8)
        values = torch.zeros(1, FULL + 2, 8)
        wanted = [0, 32_767, 32_768, FULL - 1, FULL, FULL + 1]
        for i, token in enumerate(wanted):
            keys[0, token] = 30 * torch.nn.functional.one_hot(torch.tensor(i), 8)
            values[0, token, i] = 1.0
        kv = LayerKV(6, 1, 8, LSHConfig(2, 40, exact_below=0), dtype)
        kv.append(keys, values)
        out, _ = kv.attend(30 * torch.eye(6, 8))
        torch.testing.assert_close(out, torch.eye(6, 8), rtol=0, atol=1e-2)


def append_many(kv, appends):
    """Seconds of CPU time for appends of one to three tokens."""
    generator = torch.Generator().manual_seed(0)
    keys, values = random_kv(3, dim=32)
    sizes = torch.randint(1, 4, (appends,), generator=generator).tolist()
    start = time.process_time()
    for tokens in sizes:
        kv.append(keys[:, :tokens], values[:, :tokens])
    return time.process_time() - start, sum(sizes)


@pytest.mark.parametrize("index", [LSHConfig(8, 20), ScanConfig()])
def test_ten_thousand_small_appends_leave_a_short_list_at_a_cost_that_does_not_grow(index):
    after_nothing, after_a_prompt = (LayerKV(2, 1, 32, index) for _ in range(2))
    after_a_prompt.append(*random_kv(240_000, dim=32))
    base, _ = append_many(after_nothing, 10_000)
    seconds, appended = append_many(after_a_prompt, 10_000)
    assert after_a_prompt.num_tokens == 240_000 + appended
    assert len(after_a_prompt.segment_sizes) <= 3 + 27
    assert max(after_a_prompt.segment_sizes) <= FULL
    assert seconds < 2.5 * base + 0.5  # the prompt's 240,000 tokens are not touched again


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


@pytest.mark.parametrize("index", INDEXES)
def test_forks_share_memory_and_do_not_see_each_other(index):
    keys, values = random_kv(500, heads=2, dim=16)
    kv = LayerKV(4, 2, 16, index)
    kv.append(keys, values)
    queries = torch.randn(4, 16)
    before = kv.attend(queries)
    fork = kv.fork()
    fork.append(*random_kv(300, heads=2, dim=16))
    second = fork.fork()
    kv.append(*random_kv(2, heads=2, dim=16))
    assert (kv.num_tokens, fork.num_tokens, second.num_tokens) == (502, 800, 800)
    again = LayerKV(4, 2, 16, index)
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
