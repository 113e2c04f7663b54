"""What another device has found for the native core: signs of projections, and drawn rows."""

import threading
import time

import numpy as np
import pytest
import torch

from magicpig import LayerKV, LSHConfig, ScanConfig, _native, reference
from magicpig.kv.device_index import hash_keys, hashed

PIECE = 1024


def layer(index, segments, heads=(6, 2, 24), seed=0):
    torch.manual_seed(seed)
    kv = LayerKV(heads[0], heads[1], heads[2], index, torch.float32)
    for tokens in segments:
        kv.append(*torch.randn(2, heads[1], tokens, heads[2]))
    return kv


def attend(kvs, queries, signs=None, drawn=None, exact=False):
    batch, heads, dim = queries.shape
    out, lse = torch.empty(batch, heads, dim), torch.empty(batch, heads)
    rows, visited = torch.zeros(2, batch, heads, dtype=torch.int64)
    counts = out, lse, rows, visited, torch.zeros(batch, heads)
    natives = [kv._native for kv in kvs]
    _native.attend(natives, queries, 0.3, 0.0, exact, *counts, signs, drawn)
    return out, lse, rows


@pytest.mark.parametrize(("bits", "tables"), [(5, 30), (10, 150), (7, 21)])
def test_signs_of_queries_are_taken_as_they_are(bits, tables):
    lsh = LSHConfig(bits, tables, exact_below=0)
    kvs = [layer(lsh, [700, 300]), layer(lsh, [50], seed=1)]
    queries = torch.randn(2, 6, 24)
    directions = reference.projection(lsh, 24).double()
    found = hashed(queries.flatten(0, 1).double(), directions, bits * tables)
    signs = found.numpy().view(np.uint16)
    for mine, theirs in zip(attend(kvs, queries, signs), attend(kvs, queries), strict=True):
        assert torch.equal(mine, theirs)
    other = attend(kvs, queries, signs ^ np.uint16(0xFFFF))  # of the opposite queries
    assert not torch.equal(other[2], attend(kvs, queries)[2])


def test_signs_that_do_not_fit_are_refused():
    lsh = LSHConfig(5, 30, exact_below=0)
    queries = torch.randn(1, 6, 24)
    for shape in ((9, 6), (10, 5), (11, 6)):
        with pytest.raises(ValueError, match="signs must have shape"):
            attend([layer(lsh, [100])], queries, np.zeros(shape, np.uint16))
    with pytest.raises(ValueError, match="signs must have shape"):
        attend([layer(ScanConfig(), [100])], queries, np.zeros((10, 6), np.uint16))


def found_of(keys, lsh):
    means, inv_norms, signs = hash_keys(keys, lsh)
    return means, inv_norms, signs.numpy().view(np.uint16)


def test_segments_of_hashed_keys_are_the_cores_own():
    lsh = LSHConfig(6, 40, exact_below=0)
    keys, values = torch.randn(2, 2, 3000, 24)
    kv, own = layer(lsh, []), layer(lsh, [])
    own.append(keys, values)
    kv._native.append_hashed(keys, values, found_of(keys, lsh))
    mine, theirs = (each._native.segment_memory(0)[1] for each in (kv, own))
    assert (mine == theirs).mean() > 0.99  # but for projections that are all but zero
    queries = torch.randn(6, 24)
    torch.testing.assert_close(kv.attend(queries)[0], own.attend(queries)[0], atol=0.1, rtol=0.1)
    with pytest.raises(ValueError, match="a segment of hash tables"):
        kv._native.append_hashed(keys[:, :0], values[:, :0], found_of(keys, lsh))
    spoiled = keys.clone()
    spoiled[1, 5, 3] = torch.nan
    with pytest.raises(ValueError, match="token 5 is NaN"):
        kv._native.append_hashed(spoiled, values, found_of(keys, lsh))
    assert kv.num_tokens == 3000


def test_what_is_found_of_keys_is_checked():
    lsh = LSHConfig(6, 40, exact_below=0)
    keys, values = torch.randn(2, 2, 100, 24)
    kv, found = layer(lsh, []), found_of(keys, lsh)
    names = "means", "inv_norms", "signs"
    for i, name in enumerate(names):
        for part in (slice(1), slice(2, 0)):
            bad = [*found]
            bad[i] = found[i][part]
            with pytest.raises(ValueError, match=f"{name} must have shape"):
                kv._native.append_hashed(keys, values, tuple(bad))
        short = [*found]
        short[i] = found[i][..., :-1].copy() if i == 2 else found[i][..., :-1].contiguous()
        with pytest.raises(ValueError, match=f"{name} must have shape"):
            kv._native.append_hashed(keys, values, tuple(short))
    for i, value in ((0, torch.nan), (0, torch.inf), (1, torch.nan), (1, -1.0), (1, 2e12)):
        spoiled = [found[0].clone(), found[1].clone(), found[2]]
        spoiled[i][1, 7] = value
        with pytest.raises(ValueError, match="must be numbers"):
            kv._native.append_hashed(keys, values, tuple(spoiled))
    for i, other in ((0, torch.float64), (1, torch.int32), (2, np.int64), (2, np.uint8)):
        converted = [*found]
        converted[i] = found[i].astype(other) if i == 2 else found[i].to(other)
        with pytest.raises(TypeError, match="incompatible"):
            kv._native.append_hashed(keys, values, tuple(converted))
    assert kv.num_tokens == 0


def test_equal_keys_have_equal_tables():
    """All of their memory, which goes to files; also what is between its parts."""
    lsh = LSHConfig(3, 3, exact_below=0)
    keys, values = torch.randn(2, 2, 101, 24)
    memories = []
    for _ in range(4):
        kv = layer(lsh, [])
        kv.append(keys, values)
        memories.append(bytes(kv._native.segment_memory(0)[1]))
        dirt = [np.full(size, 255, np.uint8) for size in range(1000, 9000, 100)]
        del dirt
    assert len(set(memories)) == 1


def test_keys_at_their_mean_are_found_to_have_no_direction():
    lsh = LSHConfig(4, 12, exact_below=0)
    keys, values = torch.randn(2, 1, 300, 16)
    keys[0, :5] = keys[0, 5:].mean(0)
    kv, own = (LayerKV(2, 1, 16, lsh, torch.float32) for _ in range(2))
    own.append(keys, values)
    found = found_of(keys, lsh)
    kv._native.append_hashed(keys, values, found)
    assert (found[1] == 0).nonzero()[:, 1].tolist() == list(range(5))
    for _ in range(20):
        for rows in kv.sample(torch.randn(2, 16))[0]:
            assert set(range(5)) <= set(rows.tolist())


def assert_same(one, other):
    """The same rows, in the same buckets, drawn with the same chances."""
    for mine, theirs in zip(one.read(), other.read(), strict=True):
        assert torch.equal(mine, theirs)
    for head in range(one.num_kv_heads):
        mine, theirs = (kv._native.segment_codes(0, head) for kv in (one, other))
        assert torch.equal(mine, theirs)
    queries = torch.randn(one.num_heads, one.head_dim)
    for mine, theirs in zip(one.attend(queries), other.attend(queries), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("tokens", [1, 63, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_growing_segments_are_those_that_come_whole(tokens, dtype):
    lsh = LSHConfig(6, 40, exact_below=0)
    keys, values = torch.randn(2, 2, tokens, 24).to(dtype)
    found = found_of(keys, lsh)
    kv, whole = (LayerKV(6, 2, 24, lsh, dtype) for _ in range(2))
    whole._native.append_hashed(keys, values, found)
    growing = _native.GrowingSegment(kv._native, tokens)
    for part in (slice(0, 1), slice(1, 1), slice(1, 1000), slice(1000, 1001), slice(1001, None)):
        assert kv.num_tokens == 0
        growing.add(keys[:, part], values[:, part])
    growing.finish(found)
    assert kv.segment_sizes == [tokens]
    assert_same(kv, whole)


@pytest.mark.parametrize("index", [None, ScanConfig(), LSHConfig(6, 40, exact_below=0)])
@pytest.mark.parametrize("tokens", [10, 3000])
def test_segments_of_any_index_grow(index, tokens):
    keys, values = torch.randn(2, 2, tokens, 24)
    kv, whole = layer(index, []), layer(index, [])
    whole.append(keys, values)
    growing = _native.GrowingSegment(kv._native, tokens)
    for part in (slice(0, 7), slice(7, 2000), slice(2000, None)):
        growing.add(keys[:, part], values[:, part])
    growing.finish()
    queries = torch.randn(6, 24)
    for mine, theirs in zip(kv.attend(queries), whole.attend(queries), strict=True):
        assert torch.equal(mine, theirs)


def test_growing_segments_take_what_fits_and_no_more():
    lsh = LSHConfig(6, 40, exact_below=0)
    keys, values = torch.randn(2, 2, 100, 24)
    found = found_of(keys, lsh)
    kv = layer(lsh, [])
    growing = _native.GrowingSegment(kv._native, 100)
    growing.add(keys[:, :60], values[:, :60])
    with pytest.raises(ValueError, match="no room"):
        growing.add(keys[:, :41], values[:, :41])
    with pytest.raises(ValueError, match="as many tokens as keys"):
        growing.add(keys[:, 60:], values[:, 61:])
    with pytest.raises(ValueError, match="lacks tokens"):
        growing.finish(found)
    with pytest.raises(ValueError, match="inv_norms must have shape"):
        growing.finish(found_of(keys[:, :60], lsh))
    growing.add(keys[:, 60:], values[:, 60:])
    growing.finish(found)
    assert kv.num_tokens == 100
    for again in (lambda: growing.finish(found), lambda: growing.add(keys[:, :0], values[:, :0])):
        with pytest.raises(ValueError, match=r"is finished|no room"):
            again()
    for tokens in (0, 65_537):
        with pytest.raises(ValueError, match="from 1 to 65,536 tokens"):
            _native.GrowingSegment(kv._native, tokens)
    other = _native.GrowingSegment(layer(ScanConfig(), [])._native, 100)
    other.add(keys, values)
    with pytest.raises(ValueError, match="a segment of hash tables"):
        other.finish(found)
    other.finish()
    spoiled = keys.clone()
    spoiled[1, 5, 3] = torch.nan
    with pytest.raises(ValueError, match="token 5 is NaN"):
        _native.GrowingSegment(kv._native, 100).add(spoiled, values)


@pytest.mark.parametrize("tokens", [4000, 40_000])
def test_growing_segments_take_tokens_of_one_thread_at_a_time(tokens):
    part = 3 * tokens // 5  # two do not fit
    keys = torch.zeros(1, part, 8)
    for _ in range(20):
        growing = _native.GrowingSegment(layer(None, [], (1, 1, 8))._native, tokens)
        refused = []

        def add(growing=growing, refused=refused):
            try:
                growing.add(keys, keys)
            except ValueError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=add) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(refused) == 2
        assert all("no room" in each for each in refused)


def pieces_of(kvs, samples, room=4000):
    """Rows as `sample` gives them, in the form in which another device gives them."""
    heads = kvs[0].num_heads
    ids = np.zeros((len(kvs), heads, room), np.uint16)
    logs = np.zeros((len(kvs), heads, room), np.float32)
    pieces = max(sum(-(-n // PIECE) for n in kv.segment_sizes) for kv in kvs)
    starts, counts = np.zeros((2, len(kvs), heads, pieces), np.int32)
    for i, (kv, (rows, chances)) in enumerate(zip(kvs, samples, strict=True)):
        for head in range(heads):
            first = piece = 0
            at = room  # from the end: pieces may lie anywhere
            for tokens in kv.segment_sizes:
                if tokens >= kv.index.shortest_indexed:
                    for begin in range(first, first + tokens, PIECE):
                        end = min(begin + PIECE, first + tokens)
                        own = ((rows[head] >= begin) & (rows[head] < end)).numpy()
                        count = int(own.sum())
                        at -= count
                        ids[i, head, at : at + count] = rows[head].numpy()[own] - first
                        logs[i, head, at : at + count] = chances[head].numpy()[own]
                        starts[i, head, piece], counts[i, head, piece] = at, count
                        piece += 1
                first += tokens
    return ids, logs, starts, counts


def test_drawn_rows_are_read_and_no_others():
    scan = ScanConfig(2, 0.1, 4, exact_below=128)
    kvs = [layer(scan, [9000, 60, 1500]), layer(scan, [300], seed=1), layer(scan, [20], seed=2)]
    queries = torch.randn(3, 6, 24)
    samples = [kv.sample(query, 0.3) for kv, query in zip(kvs, queries, strict=True)]
    got = attend(kvs, queries, drawn=pieces_of(kvs, samples))
    for mine, theirs in zip(got, attend(kvs, queries), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_drawn_rows_that_are_not_there_are_refused():
    scan = ScanConfig(2, 0.1, 4)
    kvs = [layer(scan, [1500])]
    queries = torch.randn(1, 6, 24)
    ids, logs, starts, counts = pieces_of(kvs, [kvs[0].sample(queries[0], 0.3)])

    def refused(match, *drawn, kv=kvs[0], **named):
        with pytest.raises(ValueError, match=match):
            attend([kv], queries, drawn=drawn, **named)

    for bad in (1500, 65535):
        far = ids.copy()
        far[0, 3, starts[0, 3, 1]] = bad
        refused("is not among the", far, logs, starts, counts)
    for start, count in ((-1, 1), (3999, 2), (0, -1), (2**31 - 1, 2**31 - 1)):
        where, many = starts.copy(), counts.copy()
        where[0, 2, 0], many[0, 2, 0] = start, count
        refused("beyond the room", ids, logs, where, many)
    refused("fewer pieces", ids, logs, starts[:, :, :1].copy(), counts[:, :, :1].copy())
    refused("drawn must be", ids[:, :5].copy(), logs, starts, counts)
    refused("drawn must be", ids, logs[:, :, :7].copy(), starts, counts)
    refused("drawn is for an index of codes", ids, logs, starts, counts, exact=True)
    refused("drawn is for an index of codes", ids, logs, starts, counts, kv=layer(None, [50]))


def serve(kvs, queries, ticket=5, patience=10.0, arrived=None, drawn=None, totals=None):
    batch, heads, dim = queries.shape
    out, lse = torch.full((batch, heads, dim), torch.nan), torch.empty(batch, heads)
    rows, visited = torch.zeros(2, batch, heads, dtype=torch.int64)
    counts = out, lse, rows, visited, torch.zeros(batch, heads)
    if arrived is None:
        arrived = np.full(1, ticket)
    answered = np.zeros(1, np.int64)
    natives = [kv._native for kv in kvs]
    asked = natives, queries, 0.3, 0.0, *counts, None, drawn, totals
    found = _native.serve(arrived, ticket, patience, answered, *asked)
    return found, answered[0], (out, lse, rows)


def test_another_device_is_served_when_it_asks():
    """What it asks is looked at when its ticket is there, and not before."""
    kvs = [layer(LSHConfig(5, 30, exact_below=0), [700, 300])]
    queries, arrived, large = torch.zeros(1, 6, 24), np.zeros(1, np.int64), 2**40
    found, answered, filled = serve(kvs, queries, 1, 0.01, arrived)
    assert found is None
    assert answered == 0
    assert filled[0].isnan().all()

    def ask():
        time.sleep(0.1)
        queries.copy_(torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(1)))
        _native.tell(arrived, large)

    threading.Thread(target=ask).start()
    begin = time.perf_counter()
    (took, (*_, tokens)), answered, filled = serve(kvs, queries, large, 10.0, arrived)
    assert 0 < took < time.perf_counter() - begin - 0.05  # without the wait
    assert tokens == [1000]
    assert answered == large
    for mine, theirs in zip(filled, attend(kvs, queries), strict=True):
        assert torch.equal(mine, theirs)


def test_more_drawn_rows_than_fit_are_drawn_anew():
    kvs = [layer(ScanConfig(2, 0.1, 4), [1500])]
    queries = torch.randn(1, 6, 24)
    none = [torch.zeros(0, dtype=torch.int64)] * 6, [torch.zeros(0)] * 6
    nothing = pieces_of(kvs, [none], room=300)
    totals = np.zeros((1, 6), np.int32)
    _, _, (_, lse, rows) = serve(kvs, queries, drawn=nothing, totals=totals)
    assert rows.sum() == 0
    assert (lse == -torch.inf).all()
    totals[0, 4] = 301
    _, answered, filled = serve(kvs, queries, drawn=nothing, totals=totals)
    assert answered == 5
    for mine, theirs in zip(filled, attend(kvs, queries), strict=True):
        assert torch.equal(mine, theirs)


def test_bad_arguments_are_refused():
    kvs, queries = [layer(None, [50])], torch.randn(1, 6, 24)
    empty = np.zeros(0, np.int64)
    with pytest.raises(ValueError, match="must not be empty"):
        serve(kvs, queries, arrived=empty)
    with pytest.raises(ValueError, match="must not be empty"):
        _native.tell(empty, 1)
    queries[0, 2, 3] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        serve(kvs, queries)
