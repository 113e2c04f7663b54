"""TensorLayer: windows and far contexts as NativeLayer has them; batches, forks and orders that
change nothing."""

import copy
import gc
import random

import pytest
import torch

from magicpig import WindowConfig
from magicpig.attention.registry import parse
from magicpig.kv.base import LayerShape
from magicpig.kv.cost import Cost
from magicpig.kv.far_tokens import FarTokens, _stacks
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.seats import ROOM, Seats
from magicpig.kv.sequence import SequenceKV, step
from magicpig.kv.tensor_layer import TensorLayer

HEADS, KV_HEADS, DIM = 6, 2, 16
SHAPE = LayerShape(HEADS, KV_HEADS, DIM, torch.float32)
SMALL = WindowConfig(sinks=2, local=4, block=8)
SPECS = ["kv-stream", "topk:20%", "oracle:20%", "quest:4:20%", "h2o:30%", "loki:25%:20%"]
SPECS += ["streaming"]


def make_layer(spec="topk:20%", prompt=0, window=SMALL):
    layer = parse(spec).new_layer(SHAPE, window, 1)
    if prompt:
        add(layer, prompt)
    return layer


def add(layer, tokens, generator=None):
    """Random tokens at once."""
    keys, values = torch.randn(2, KV_HEADS, tokens, DIM, generator=generator).unbind()
    mass = torch.rand(KV_HEADS, layer.num_tokens + tokens, generator=generator)
    layer.extend(keys, values, mass)


def token(batch, generator=None):
    """A query, a key and a value for each of a batch."""
    return (
        torch.randn(batch, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )


def decode(layers, steps=1, generator=None):
    """Outputs [steps, batch, heads, dim]."""
    outs = []
    for _ in range(steps):
        outs.append(step(layers, *token(len(layers), generator), DIM**-0.5))
        for layer in layers:
            layer.settle()
    return torch.stack(outs)


def alike(layer, other):
    return all(map(torch.equal, layer.read(), other.read()))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("block", [1, 3, 8])
def test_the_same_tokens_are_near_and_far_as_in_a_native_layer(seed, block):
    """Through any order of prompts, steps and waits; outputs are the same, too."""
    choose = random.Random(seed)
    window = WindowConfig(sinks=choose.choice([0, 2]), local=4, block=block)
    ours, native = make_layer("kv-stream", window=window), NativeLayer(SHAPE, None, window)
    for _ in range(12):
        if choose.random() < 0.5:
            count = choose.choice([1, 2, 5, 8, 13, 40])
            tokens = torch.randn(2, KV_HEADS, count, DIM).unbind()
            for layer in (ours, native):
                layer.extend(*tokens)
        else:
            for _ in range(choose.choice([1, 4, 9, 30])):
                given = list(token(1))
                outs = [step([layer], *given, DIM**-0.5) for layer in (ours, native)]
                torch.testing.assert_close(*outs, atol=1e-5, rtol=0)
                for layer in (ours, native):
                    layer.settle()
                assert ours.far.num_tokens == native.far.num_tokens
        if choose.random() < 0.2:
            for layer in (ours, native):
                layer.settle(wait=True)
        assert ours.far.num_tokens == native.far.num_tokens == ours.far_seen
        assert ours.num_tokens == native.num_tokens
        assert all(map(torch.equal, ours.read_window(), native.read_window()))
        assert alike(ours, native)
        assert ours.reads == native.reads
        assert ours.cost == native.cost


@pytest.mark.parametrize("spec", SPECS)
def test_a_batch_equals_each_alone_as_sequences_come_and_go(spec):
    """Sequences join, leave, change places and are read on, while others step."""
    choose, random_numbers = random.Random(3), torch.Generator().manual_seed(3)
    pairs = [(layer, layer.fork()) for layer in (make_layer(spec, n) for n in (0, 5, 30, 61))]
    for round_ in range(8):
        chosen = choose.sample(pairs, choose.randint(1, len(pairs)))
        for _ in range(choose.choice([1, 6])):
            queries, keys, values = token(len(chosen), random_numbers)
            together = [pair[0] for pair in chosen]
            out = step(together, queries, keys, values, DIM**-0.5, 4.0)
            for i, (layer, alone) in enumerate(chosen):
                own = slice(i, i + 1)
                each = step([alone], queries[own], keys[own], values[own], DIM**-0.5, 4.0)
                torch.testing.assert_close(out[own], each, atol=1e-5, rtol=1e-5)
                layer.settle()
                alone.settle()
        if round_ == 4:
            numbers = random_numbers.get_state()
            for layer in pairs[2]:
                random_numbers.set_state(numbers)
                add(layer, 7, random_numbers)
    for layer, alone in pairs:
        assert alike(layer, alone)
        assert layer.cost == alone.cost
        assert layer.reads == alone.reads


@pytest.mark.parametrize("spec", SPECS)
def test_the_order_of_a_batch_may_change(spec):
    layers = [make_layer(spec, length) for length in (25, 40, 33)]
    alone = [layer.fork() for layer in layers]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        queries, keys, values = token(3)
        out = step([layers[i] for i in order], queries, keys, values, DIM**-0.5)
        for place, i in enumerate(order):
            own = slice(place, place + 1)
            each = step([alone[i]], queries[own], keys[own], values[own], DIM**-0.5)
            torch.testing.assert_close(out[own], each, atol=1e-5, rtol=1e-5)
    assert [layer.cost for layer in layers] == [layer.cost for layer in alone]


@pytest.mark.parametrize("spec", SPECS)
def test_a_fork_goes_its_own_way(spec):
    layer, neighbour = make_layer(spec, 45), make_layer(spec, 20)
    decode([layer, neighbour], 5)
    assert layer.cost.steps == 5  # asking for it takes over what the seats added up
    before, state = layer.read(), copy.deepcopy(layer.state)
    fork, twin = layer.fork(), layer.fork()
    assert fork.far is layer.far
    assert (fork.cost, fork.reads) == (Cost(), (0, 0))
    decode([fork, neighbour], 30)
    assert all(map(torch.equal, layer.read(), before))
    if spec.startswith("h2o"):
        assert torch.equal(layer.state.near, state.near)
        assert torch.equal(layer.state.far, state.far)
    assert fork.num_tokens != layer.num_tokens or fork.evicts
    seeds = [torch.Generator().manual_seed(1) for _ in range(2)]
    outs = [decode([each], 20, seed) for each, seed in zip((layer, twin), seeds, strict=True)]
    assert torch.equal(*outs)
    assert alike(layer, twin)


@pytest.mark.parametrize("spec", SPECS)
def test_forks_of_one_sequence_step_together(spec):
    layer = make_layer(spec, 45)
    queries, keys, values = (tensor.expand(3, -1, -1) for tensor in token(1))
    forks = [layer.fork() for _ in range(3)]
    out = step(forks, queries, keys, values, DIM**-0.5)
    for i in range(3):
        torch.testing.assert_close(out[i], out[0])
    assert len({fork.cost for fork in forks}) == 1


def test_layers_of_several_kinds_step_together():
    """In any order; each kind as a batch of its own."""
    specs = ["topk:20%", "full", "quest:4:20%", "topk:20%", "h2o:30%", "full"]
    layers = [make_layer(spec, 40) for spec in specs]
    alone = [layer.fork() for layer in layers]
    for _ in range(3):
        queries, keys, values = token(len(specs))
        out = step(layers, queries, keys, values, DIM**-0.5)
        for i, layer in enumerate(alone):
            own = slice(i, i + 1)
            each = step([layer], queries[own], keys[own], values[own], DIM**-0.5)
            torch.testing.assert_close(out[own], each, atol=1e-5, rtol=1e-5)
    assert layers[0].seats is layers[3].seats is not layers[2].seats


def test_settle_moves_a_block_at_a_time():
    layer = make_layer(prompt=6)
    lengths = []
    for _ in range(40):
        decode([layer])
        lengths.append((layer.far.num_tokens, len(layer.read_window()[0][0])))
    assert [far for far, _ in lengths] == [8 * max(0, i // 8 - 1) for i in range(1, 41)]
    assert max(near for _, near in lengths) < 2 + 4 + 2 * 8
    layer.settle(wait=True)
    assert layer.far.num_tokens == 40
    layer.settle(wait=True)
    assert (layer.far.num_tokens, layer.num_tokens) == (40, 46)


def test_extend_after_decode_moves_what_was_due_and_keeps_the_order():
    layer = make_layer(prompt=6)
    decode([layer], 10)
    before = layer.read()
    new = torch.randn(2, KV_HEADS, 3, DIM).unbind()
    layer.extend(*new)
    assert layer.far.num_tokens == 8  # a block, and not all that is not local
    for all_, old, more in zip(layer.read(), before, new, strict=True):
        assert torch.equal(all_, torch.cat([old, more], 1))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("spec", SPECS)
def test_works_in_every_mode_of_torch(spec, mode):
    """Made in one, going on in another; what comes out is of the caller's."""
    with mode():
        layer = make_layer(spec, 30)
        decode([layer, make_layer(spec, 9)], 3)
    for other in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with other():
            out = decode([layer], 20)
            assert out.is_inference() == (other is torch.inference_mode)
            assert not out.requires_grad
            add(layer, 3)
            fork = layer.fork()
            decode([fork, layer], 2)
            assert layer.cost.steps > 0


def test_output_has_the_queries_dtype_and_rows_the_layers():
    shape = LayerShape(HEADS, KV_HEADS, DIM, torch.bfloat16)
    layer = parse("topk:50%").new_layer(shape, SMALL, 0)
    layer.extend(*torch.randn(2, KV_HEADS, 40, DIM).unbind())
    queries, keys, values = (tensor.bfloat16() for tensor in token(1))
    assert step([layer], queries, keys, values, 1.0).dtype == torch.bfloat16
    assert {tensor.dtype for tensor in layer.read()} == {torch.bfloat16}
    assert layer.nbytes.rows == 34 * KV_HEADS * shape.row_bytes == layer.far.nbytes


def test_a_sequence_counts_only_the_layers_that_the_method_is_for():
    layers = [make_layer("topk:20%", 46), make_layer("full", 46), make_layer("topk:20%", 46), None]
    layers[2].dense = True
    sliding = NativeLayer(SHAPE, None, SMALL, span=5)
    add(sliding, 46)
    sequence = SequenceKV([*layers, sliding])
    for layer in sequence.attention_layers:
        decode([layer], 2)
    assert sequence.cost == layers[0].cost + layers[1].cost
    assert sequence.cost.steps == 2
    assert sequence.cost.tokens == 2 * 2 * HEADS * 40
    reads = [layer.reads for layer in sequence.attention_layers]
    assert sequence.share_read == sum(a for a, _ in reads) / sum(b for _, b in reads)
    window = 2 * (47 + 48) // 2 - 2 * 40  # two steps' windows
    assert layers[0].reads == (2 * HEADS * 8 + HEADS * window, 2 * HEADS * 40 + HEADS * window)


# FarTokens


def far_tokens(*lengths):
    return [FarTokens(*torch.randn(2, 1, KV_HEADS, length, DIM).unbind()) for length in lengths]


def test_a_stack_is_padded_and_made_once():
    parts = far_tokens(5, 0, 9)
    stacked = FarTokens.stack(parts)
    assert FarTokens.stack(parts) is stacked
    assert FarTokens.stack(parts[::-1]) is not stacked
    assert FarTokens.stack(parts[:1]) is parts[0]
    assert stacked.lengths == [5, 0, 9]
    assert stacked.num_tokens == 9
    assert stacked.hidden.sum((1, 2)).tolist() == [4, 9, 0]
    for i, part in enumerate(parts):
        length = part.num_tokens
        assert torch.equal(stacked.keys[i, :, :length], part.keys[0])
        assert torch.equal(stacked.values[i, :, :length], part.values[0])
        assert not stacked.keys[i, :, length:].any()
    assert FarTokens.stack(far_tokens(4, 4)).hidden is None


def test_stacks_do_not_outlive_their_users():
    gc.collect()
    before = len(_stacks)
    parts = far_tokens(3, 4)
    stacked = FarTokens.stack(parts)
    assert len(_stacks) == before + 1
    del stacked
    gc.collect()
    assert len(_stacks) == before


def test_what_is_derived_is_derived_once_for_each_sequence():
    parts = far_tokens(6, 3)
    calls = []

    def halves(keys):
        calls.append(keys.shape[1])
        return keys[:, ::2], keys.sum(1)

    stacked = FarTokens.stack(parts)
    for _ in range(2):
        even, sums = stacked.derived("halves", halves)
    assert even.shape == (2, KV_HEADS, 3, DIM)
    assert torch.equal(even[1, :, :2], parts[1].keys[0, :, ::2])
    assert not even[1, :, 2:].any()
    assert torch.equal(sums[0], parts[0].keys[0].sum(1))
    alone, _ = parts[0].derived("halves", halves)
    assert torch.equal(alone, even[:1])
    assert calls == [6, 3]
    assert parts[0].derived_nbytes == (3 + 1) * KV_HEADS * DIM * 4


def test_methods_of_one_text_share_its_rows():
    tokens = torch.randn(2, KV_HEADS, 40, DIM).unbind()
    layers = [parse(spec).new_layer(SHAPE, SMALL, 0) for spec in ("topk", "h2o", "quest", "full")]
    for i, layer in enumerate(layers):
        layer.extend(*tokens, torch.rand(KV_HEADS, 40))
        if isinstance(layer, TensorLayer):
            layer.share(layers[:i])
    topk, h2o, quest, _ = layers
    assert quest.far is topk.far is not h2o.far
    decode([quest], 20)
    assert quest.far is not topk.far
    assert topk.num_tokens == 40


# Seats


def test_seats_grow_and_let_go():
    windows = [torch.randn(2, KV_HEADS, length, DIM).unbind() for length in (3, 0, 7)]
    seats = Seats(windows)
    kept = [[side.clone() for side in window] for window in windows]
    for _ in range(2 * ROOM):
        new = torch.randn(2, 3, KV_HEADS, DIM).unbind()
        seats.append(*new)
        for i in range(3):
            kept[i] = [
                torch.cat([old, side[i][:, None]], 1)
                for old, side in zip(kept[i], new, strict=True)
            ]
    seats.drop(0, 2, 5)
    kept[0] = [torch.cat([side[:, :2], side[:, 7:]], 1) for side in kept[0]]
    for i in range(3):
        assert all(map(torch.equal, seats.window(i), kept[i]))
    keys, values, hidden = seats.tokens
    assert keys.shape == values.shape == (3, KV_HEADS, 7 + 2 * ROOM, DIM)
    assert (~hidden).sum((1, 2)).tolist() == seats.lengths == [2 * ROOM - 2, 2 * ROOM, 2 * ROOM + 7]
    assert Seats(windows[:1]).tokens[2] is None
