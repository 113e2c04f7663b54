"""What methods leave in memory and what they took, by one definition for all."""

import math

import pytest
import torch
from method_rules import (
    DIM,
    GROUP,
    HEADS,
    KV_HEADS,
    ROW,
    SCALE,
    Sequence,
    collisions,
    step_all,
)
from specs import SPECS

from magicpig import LSHConfig
from magicpig.kv.cost import Cost
from magicpig.kv.sequence import step


@pytest.mark.parametrize(("spec", "kept"), [("streaming", 0), ("h2o:25%", 0.25), ("topk", 1)])
def test_evicted_tokens_are_gone(spec, kept):
    sequence = Sequence(spec, 400)
    sequence.read_prompt(torch.rand(KV_HEADS, 400))
    for _ in range(40):
        step_all([sequence])
        sequence.settle()
        nbytes = sequence.layer.nbytes
        assert nbytes.rows == KV_HEADS * ROW * math.ceil(kept * sequence.num_far)
        assert nbytes.window <= KV_HEADS * ROW * (2 + 4 + 2 * 8)
        far = sequence.layer.far
        held = sum(x.untyped_storage().nbytes() for x in (far.keys, far.values))
        assert held == nbytes.rows
    assert sequence.layer.num_tokens == sum(x.shape[1] for x in sequence.layer.read()) // 2
    assert (sequence.layer.num_tokens < 440) == sequence.layer.evicts == (kept < 1)


def read_figures(spec, prompt=46, steps=3):
    """The cost of steps over 40 far tokens: of a batch of two, so that seats are shared."""
    sequences = [Sequence(spec, prompt), Sequence(spec, 20)]
    for sequence in sequences:
        sequence.read_prompt(torch.rand(KV_HEADS, sequence.keys.shape[1]))
    for _ in range(steps):
        step_all(sequences)
        for sequence in sequences:
            sequence.settle()
    assert sequences[0].num_far == 40
    return sequences[0].layer.cost


ALL = 3 * HEADS * 40  # three steps


@pytest.mark.parametrize(
    ("spec", "rows", "row_bytes", "search_bytes", "search_ops"),
    [
        ("full", ALL, 3 * KV_HEADS * 40 * ROW, 0, 0),
        ("cpu-dense", ALL, 3 * KV_HEADS * 40 * ROW, 0, 0),
        ("kv-stream", ALL, 3 * KV_HEADS * 40 * ROW, 0, 0),
        ("streaming", 0, 0, 0, 0),
        ("h2o:25%", 3 * HEADS * 10, 3 * KV_HEADS * 10 * ROW, 0, 0),
        # Every key once for a group; every query with every key.
        ("topk:10%", 3 * HEADS * 4, 3 * HEADS * 4 * ROW, 3 * KV_HEADS * 40 * 64, ALL * DIM),
        ("oracle:10%", None, None, 3 * KV_HEADS * 40 * 64, ALL * DIM),
        # Two bounds of five pages, of which two are read.
        ("quest:8:40%", 3 * HEADS * 16, 3 * HEADS * 16 * ROW, 3 * KV_HEADS * 640, 3 * HEADS * 160),
        # Keys in four dimensions, and the query's way there.
        ("loki:25%:10%", 72, 72 * ROW, 3 * KV_HEADS * 40 * 16, 3 * HEADS * 4 * (40 + DIM)),
        # Too short for an index: all rows, once for a group.
        ("lsh:10:150", ALL, 3 * KV_HEADS * 40 * ROW, 0, 0),
        ("scan", ALL, 3 * KV_HEADS * 40 * ROW, 0, 0),
    ],
)
def test_costs_are_what_one_computes_by_hand(spec, rows, row_bytes, search_bytes, search_ops):
    cost = read_figures(spec)
    if spec.startswith("oracle"):  # as many rows as draws at most; as few as one
        assert 3 * HEADS <= cost.rows < 3 * HEADS * 4
        rows, row_bytes = cost.rows, cost.rows * ROW
    assert cost == Cost(3, rows, ALL, row_bytes, search_bytes, search_ops)
    assert cost.share_read == rows / ALL


def test_the_cost_of_lsh():
    """Rows with their norms, once for each query head; ids and borders of the buckets; hashing."""
    config = LSHConfig(3, 12, exact_below=0)
    sequence = Sequence("lsh:3:12:exact_below=0", 46)
    sequence.read_prompt()
    rows = visited = 0
    for _ in range(3):
        queries, _ = step_all([sequence])
        for head in range(HEADS):
            keys = sequence.keys[head // GROUP, 2:42].double().numpy()
            met = collisions(queries[0, head].double().numpy(), keys, config)
            visited += sum(met)
            rows += sum(count >= 2 for count in met)
    hashed = 3 * HEADS * 36 * DIM
    borders = 3 * HEADS * 12 * 2 * 4
    expected = Cost(3, rows, ALL, rows * (ROW + 4), 2 * visited + borders, hashed)
    assert sequence.layer.cost == expected


@pytest.mark.parametrize(("bits", "code"), [(1, 10), (2, 12), (4, 16)])
def test_the_cost_of_scan(bits, code):
    """Rows, once for each query head; codes with factor and bias, once for a group; rotations."""
    sequence = Sequence(f"scan:{bits}:10%:min_rows=4:exact_below=0", 46)
    sequence.read_prompt()
    rows = 0
    for _ in range(3):
        queries, _ = step_all([sequence])
        drawn, _ = sequence.layer.far.sample(queries[0], SCALE)
        rows += sum(map(len, drawn))
    searched = 3 * KV_HEADS * 40 * code
    expected = Cost(3, rows, ALL, rows * ROW, searched, 3 * HEADS * (40 + DIM) * DIM)
    assert sequence.layer.cost == expected


@pytest.mark.parametrize("spec", [*SPECS, "lsh:3:12:exact_below=24", "h2o:100%"])
def test_costs_add_up_step_by_step(spec):
    """What a step took does not change when the far context grows, gets an index or is forked."""
    sequence = Sequence(spec, 15)
    sequence.read_prompt(torch.rand(KV_HEADS, 15))
    before, far = sequence.layer.cost.as_dict(), set()
    for _ in range(60):
        step_all([sequence])
        cost = sequence.layer.cost
        one = {name: value - before[name] for name, value in cost.as_dict().items()}
        assert one["steps"] == 1
        assert one["tokens"] == HEADS * sequence.num_far
        assert 0 <= one["rows"] <= one["tokens"]
        assert min(one.values()) >= 0
        if one["rows"] == one["tokens"] and not one["search_bytes"]:
            assert one["row_bytes"] == KV_HEADS * sequence.num_far * ROW
        far.add(sequence.num_far)
        sequence.settle()
        assert sequence.layer.fork().cost == Cost()
        assert sequence.layer.cost == cost
        before = cost.as_dict()
    assert len(far) > 3
    mass = torch.rand(KV_HEADS, sequence.layer.num_tokens + 40)
    sequence.layer.extend(*torch.randn(2, KV_HEADS, 40, DIM).unbind(), mass)
    assert sequence.layer.cost == cost


@pytest.mark.parametrize("spec", SPECS)
def test_nan_stays_in_its_sequence(spec):
    """Also when it has become far, where the others are neither touched nor held up."""
    clean = [Sequence(spec, length) for length in (30, 41, 30)]
    for sequence in clean:
        sequence.read_prompt(torch.rand(KV_HEADS, sequence.keys.shape[1]))
    layers = [sequence.layer for sequence in clean]
    spoiled = [layer.fork() for layer in layers]
    for i in range(30):
        queries = torch.randn(3, HEADS, DIM)
        keys, values = torch.randn(2, 3, KV_HEADS, DIM).unbind()
        fine = step(layers, queries, keys, values, SCALE)
        if i == 2:
            keys[1, :, 3] = math.nan
        out = step(spoiled, queries, keys, values, SCALE)
        assert torch.equal(out[[0, 2]], fine[[0, 2]])
        if 2 <= i < 10:
            assert out[1].isnan().all()
        for layer in [*layers, *spoiled]:
            layer.settle()
