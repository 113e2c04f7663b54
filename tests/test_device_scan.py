"""Rows drawn by kernels in Triton: on a GPU, or interpreted."""

import pytest
import torch

from magicpig import LayerKV, ScanConfig, _native, reference
from magicpig.kv.base import LayerShape

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # infinities, interpreted
DEVICE = torch.device("cuda" if CUDA else "cpu")


def context(scan, segments, heads=(6, 2, 32), seed=0):
    torch.manual_seed(seed)
    num_heads, kv_heads, dim = heads
    kv = LayerKV(num_heads, kv_heads, dim, scan, torch.float32)
    offset = 2 * torch.randn(kv_heads, 1, dim)
    for tokens in segments:
        kv.append(torch.randn(kv_heads, tokens, dim) + offset, torch.randn(kv_heads, tokens, dim))
    return kv


def draw(kvs, queries, scale, tokens=None):
    from magicpig.kv.device_scan import DeviceCodes, DeviceScan

    kv = kvs[0]
    shape = LayerShape(kv.num_heads, kv.num_kv_heads, kv.head_dim, torch.float32, DEVICE)
    most = max(each.num_tokens for each in kvs)
    scan = DeviceScan(len(kvs), shape, kv.index, tokens or most)
    host, there = scan.new_table()
    codes = [DeviceCodes(each, DEVICE) for each in kvs]  # tables have addresses only
    assert scan.fill(host, codes)
    there.memory.copy_(host.memory)
    scan.draw(queries.to(DEVICE), there, scale)
    if CUDA:
        torch.cuda.synchronize()
    return scan


def rows_of(scan, kv, row, head):
    """Numbers in the sequence, and log probabilities, of what was drawn for a head."""
    ids, logs, starts, counts = scan.drawn[0]
    rows, chances, piece, first = [], [], 0, 0
    for tokens in kv.segment_sizes:
        if tokens >= kv.index.shortest_indexed:
            for _ in range(-(-tokens // 1024)):
                start, count = starts[row, head, piece], counts[row, head, piece]
                rows += (ids[row, head, start : start + count].astype(int) + first).tolist()
                chances += logs[row, head, start : start + count].tolist()
                piece += 1
        first += tokens
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(chances)


def attend(kvs, queries, scale, drawn):
    heads, dim = kvs[0].num_heads, kvs[0].head_dim
    out, lse = torch.empty(len(kvs), heads, dim), torch.empty(len(kvs), heads)
    rows, visited = torch.zeros(2, len(kvs), heads, dtype=torch.int64)
    natives = [kv._native for kv in kvs]
    arrays = out, lse, rows, visited, lse.clone()
    _native.attend(natives, queries, scale, 0.0, False, *arrays, None, drawn)
    return out, lse, rows


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("heads", [(6, 2, 32), (4, 4, 80), (2, 1, 24)])
def test_probabilities_are_those_of_the_codes(bits, heads):
    """Budgets are kept about, and every row's probability is what its code says."""
    scan = ScanConfig(bits, 0.1, 4)
    kvs = [context(scan, [1500, 700], heads), context(scan, [300], heads, seed=1)]
    queries = torch.randn(2, heads[0], heads[2])
    done = draw(kvs, queries, 0.3)
    for i, kv in enumerate(kvs):
        keys, values = kv.read()
        for head in range(heads[0]):
            own = head // (heads[0] // heads[1])
            rows, logs = rows_of(done, kv, i, head)
            assert 0.03 * kv.num_tokens < len(rows) < 0.3 * kv.num_tokens
            expected, first = [], 0
            for tokens in kv.segment_sizes:
                part = slice(first, first + tokens)
                args = queries[i, head], keys[own, part], values[own, part]
                expected.append(reference.proposals(*args, scan, 0.3))
                first += tokens
            wanted = torch.cat(expected)[rows]
            below = logs < 0  # above the threshold, all are certain
            shift = (wanted - logs)[below]
            assert (
                shift.numel() == 0 or shift.max() - shift.min() < 0.02 + 0.02 * wanted.abs().max()
            )


def test_all_rows_where_the_budget_is_all():
    scan = ScanConfig(2, 1.0, 4)
    kvs = [context(scan, [1300, 50, 200]), context(scan, [70], seed=1)]
    queries = torch.randn(2, 6, 32)
    done = draw(kvs, queries, 0.3)
    out, lse, rows = attend(kvs, queries, 0.3, done.drawn[0])
    assert rows.tolist() == [[1550] * 6, [70] * 6]
    for i, kv in enumerate(kvs):
        exact, exact_lse = kv.attend(queries[i], exact=True, scale=0.3)
        torch.testing.assert_close(out[i], exact, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(lse[i], exact_lse, atol=1e-4, rtol=1e-4)


def test_the_cpu_reads_what_was_drawn():
    """And segments without codes as a whole."""
    scan = ScanConfig(2, 0.15, 4)
    kv = context(scan, [1300, 60, 200])
    for query in torch.randn(2, 1, 6, 32):
        done = draw([kv], query, 0.3)
        out, lse, counted = attend([kv], query, 0.3, done.drawn[0])
        for head in range(6):
            rows, logs = rows_of(done, kv, 0, head)
            whole = torch.arange(1300, 1360)
            assert counted[0, head] == len(rows) + 60
            keys, values = (x[head // 3] for x in kv.read())
            everything = torch.cat([rows, whole])
            chances = torch.cat([logs, torch.zeros(60)])
            scores = reference.scores(query[0, head], keys[everything], 0.3)
            wanted, wanted_lse = reference.attend(scores - chances, values[everything])
            torch.testing.assert_close(out[0, head], wanted.float(), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(lse[0, head], wanted_lse.float(), atol=1e-4, rtol=1e-4)


def test_rows_are_counted():
    scan = ScanConfig(2, 0.05, 4)
    kv = context(scan, [900])
    done = draw([kv], torch.randn(1, 6, 32), 0.3, tokens=900)
    (_, _, _, counts), totals = done.drawn
    assert (counts.sum(-1) == totals).all()
    assert (totals > 0).all()
    assert (totals <= done.room).all()


def test_codes_are_copied_once():
    from magicpig.kv.device_scan import DeviceCodes

    kv = context(ScanConfig(2, 0.05, 4), [900])
    first = DeviceCodes(kv, DEVICE)
    longer = kv.fork()
    longer.append(*torch.randn(2, 2, 300, 32))
    second = DeviceCodes(longer, DEVICE)
    forks = [DeviceCodes(kv.fork(), DEVICE) for _ in range(3)]
    assert all(fork.segments[0][0] is first.segments[0][0] for fork in forks)
    assert second.segments[0][0] is first.segments[0][0]
    assert len(second.segments) == len(longer.segment_sizes)


def test_scores_further_apart_than_floats_can_tell():
    """Rows are drawn from below what a float tells from the heaviest, as many as were asked for."""
    scan = ScanConfig(2, 0.1, 4)
    kv = context(scan, [2000])
    done = draw([kv], 100 * torch.randn(1, 6, 32), 0.3)
    _, totals = done.drawn
    assert abs(totals.mean() - 200) < 40


@pytest.mark.parametrize("heads", [(2, 1, 32), (6, 3, 32)])
def test_heads_that_ask_alike_draw_anew_for_another_query(heads):
    scan = ScanConfig(2, 0.1, 4)
    kv = context(scan, [2000], heads)
    one, change = torch.randn(2, 1, heads[1], 32).repeat_interleave(heads[0] // heads[1], 2)
    drawn = []
    for query in (one, one + 1e-6 * change):  # weights are the same
        done = draw([kv], query, 0.3)
        drawn.append({int(row) for row in rows_of(done, kv, 0, 0)[0]})
    assert len(drawn[0] & drawn[1]) < 0.5 * len(drawn[0] | drawn[1])


def test_thresholds_are_the_native_cores():
    """From the same keys: probabilities differ by how powers are interpolated, not on average."""
    kv = context(ScanConfig(2, 0.1, 4), [9000, 1500], (4, 2, 32))
    query = torch.randn(1, 4, 32)
    done = draw([kv], query, 0.3)
    for head, (rows, logs) in enumerate(zip(*kv.sample(query[0], 0.3), strict=True)):
        here = dict(zip(rows.tolist(), logs.tolist(), strict=True))
        there = zip(*(x.tolist() for x in rows_of(done, kv, 0, head)), strict=True)
        off = [log - here[row] for row, log in there if max(log, here.get(row, 0.0)) < -0.7]
        assert len(off) > 50
        assert abs(sum(off) / len(off)) < 0.008


def test_grids_are_no_larger_than_gpus_take():
    """Of batches that the engine may have: their second axis has 65,535 programs at the most."""
    from magicpig.attention import scan_on_gpu

    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    rotation = reference.rotation(ScanConfig(2), 32)[:, :32].float().contiguous()
    drawing = scan_on_gpu.Drawing(5000, 2, 1, rotation, 2, 0, 4, 2, 256)
    kernels = "_prepare", "_sample", "_threshold", "_draw"
    with pytest.MonkeyPatch.context() as patched:
        for name in kernels:
            patched.setattr(scan_on_gpu, name, Kernel())
        sizes = 1, 4, 4, 8
        table = scan_on_gpu.Table(torch.zeros(scan_on_gpu.Table.words(*sizes)).long(), *sizes)
        drawing.draw(torch.zeros(5000, 2, 32), table, 0.1)
    assert len(grids) == 4
    assert all(grid[1] <= 65535 for grid in grids if len(grid) > 1)
