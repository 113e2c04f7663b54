"""A sequence: whatever was added is attended to, in the window or behind it; nothing is lost."""

import os
from concurrent.futures import Future

import pytest
import torch
from contexts import tolerance

from magicpig import LSHConfig, WindowConfig, reference
from magicpig.kv.base import LayerShape
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.sequence import SequenceKV, step

HEADS, KV_HEADS, DIM = 6, 2, 32
SMALL = WindowConfig(sinks=2, local=4, block=8)
EVERYTHING = LSHConfig(1, 512, min_collisions=1, exact_below=0)  # all keys collide: no sampling


def make_layer(window=SMALL, index=None, dtype=torch.float32, span=None):
    return NativeLayer(LayerShape(HEADS, KV_HEADS, DIM, dtype), index, window, span)


def rows(tokens):
    return torch.randn(KV_HEADS, tokens, DIM), torch.randn(KV_HEADS, tokens, DIM)


def decode(layer, tokens):
    """Steps with random tokens: their keys and values, and the output of the last."""
    keys, values = rows(tokens)
    for i in range(tokens):
        query = torch.randn(1, HEADS, DIM)
        out = step([layer], query, keys[None, :, i], values[None, :, i], DIM**-0.5)
        layer.settle()
    return keys, values, query[0], out[0]


def exact(query, keys, values, softcap=None):
    group = HEADS // KV_HEADS
    return torch.stack(
        [
            reference.exact_attention(
                query[h], keys[h // group], values[h // group], DIM**-0.5, softcap
            )[0]
            for h in range(HEADS)
        ]
    ).float()


@pytest.mark.parametrize("prompt", [0, 1, 2, 5, 13, 14, 15, 100])
@pytest.mark.parametrize("steps", [1, 7, 40])
@pytest.mark.parametrize("index", [None, EVERYTHING])
def test_all_tokens_are_seen(prompt, steps, index):
    layer = make_layer(index=index)
    keys, values = rows(prompt)
    layer.extend(keys, values)
    new_keys, new_values, query, out = decode(layer, steps)
    keys, values = torch.cat([keys, new_keys], 1), torch.cat([values, new_values], 1)
    assert torch.allclose(out, exact(query, keys, values), atol=3e-5)
    assert layer.num_tokens == prompt + steps
    assert all(map(torch.equal, layer.read(), (keys, values)))


def test_window_stays_small_and_every_block_arrives():
    layer = make_layer()
    most = 0
    for _ in range(60):
        decode(layer, 1)
        most = max(most, layer.window.num_tokens)
    assert most < SMALL.sinks + SMALL.local + 2 * SMALL.block
    assert layer.far.num_tokens in range(32, 60, SMALL.block)


def test_prompts_come_in_any_pieces():
    keys, values = rows(90)
    whole, pieces = make_layer(), make_layer()
    whole.extend(keys, values)
    for part in torch.arange(90).split([1, 2, 30, 3, 20, 34]):
        pieces.extend(keys[:, part], values[:, part])
    query = torch.randn(1, HEADS, DIM)
    new_keys, new_values = torch.randn(2, 1, KV_HEADS, DIM).unbind()
    outs = [step([layer], query, new_keys, new_values, DIM**-0.5) for layer in (whole, pieces)]
    assert torch.allclose(*outs, atol=3e-5)
    assert all(map(torch.equal, whole.read(), pieces.read()))


def test_batch_equals_each_alone(every_isa):
    lengths = [3, 60, 0, 200]
    layers = [make_layer(index=LSHConfig(4, 20, exact_below=16)) for _ in lengths]
    for layer, length in zip(layers, lengths, strict=True):
        layer.extend(*rows(length))
    alone = [layer.fork() for layer in layers]
    for _ in range(20):
        query = torch.randn(len(lengths), HEADS, DIM)
        keys, values = torch.randn(2, len(lengths), KV_HEADS, DIM).unbind()
        out = step(layers, query, keys, values, DIM**-0.5, softcap=5.0)
        for i, layer in enumerate(alone):
            each = step(
                [layer], query[i : i + 1], keys[i : i + 1], values[i : i + 1], DIM**-0.5, 5.0
            )
            assert torch.equal(each[0], out[i])
        for layer in layers + alone:
            layer.settle()


def test_a_fork_goes_its_own_way():
    layer = make_layer()
    layer.extend(*rows(50))
    decode(layer, 9)  # a block is under way
    other = layer.fork()
    before = layer.read()
    decode(other, 30)
    assert all(map(torch.equal, layer.read(), before))
    decode(layer, 5)
    assert (layer.num_tokens, other.num_tokens) == (64, 89)
    assert torch.equal(layer.read()[0][:, :59], other.read()[0][:, :59])


@pytest.mark.parametrize("prompt", [0, 3, 30])
def test_sliding_layers_see_their_span(prompt):
    layer = make_layer(span=10)
    keys, values = rows(prompt)
    layer.extend(keys, values)
    new_keys, new_values, query, out = decode(layer, 45)
    keys, values = torch.cat([keys, new_keys], 1), torch.cat([values, new_values], 1)
    assert torch.allclose(out, exact(query, keys[:, -10:], values[:, -10:]), atol=3e-5)
    assert layer.window.num_tokens <= 10 + SMALL.block


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [8, 40, 64])
def test_output_has_the_queries_dtype(dtype, dim, every_isa):
    layer = NativeLayer(LayerShape(2, 1, dim, dtype), None, SMALL)
    keys, values = torch.randn(2, 1, 20, dim).to(dtype).unbind()
    layer.extend(keys, values)
    query, key, value = torch.randn(3, 1, 2, dim).to(dtype).unbind()
    out = step([layer], query, key[:, :1], value[:, :1], dim**-0.5)
    keys, values = torch.cat([keys, key[:, :1]], 1), torch.cat([values, value[:, :1]], 1)
    for head in range(2):
        expected, _ = reference.exact_attention(query[0, head], keys[0], values[0], dim**-0.5)
        assert out.dtype == dtype
        assert torch.allclose(out[0, head].double(), expected, atol=tolerance(dtype) + 1e-2)


@pytest.mark.parametrize("bad", ["query", "key", "value"])
def test_numbers_that_are_not_finite_stay_in_their_sequence(bad):
    layers = [make_layer() for _ in range(3)]
    for layer in layers:
        layer.extend(*rows(30))
    tensors = {
        "query": torch.randn(3, HEADS, DIM),
        "key": torch.randn(3, KV_HEADS, DIM),
        "value": torch.randn(3, KV_HEADS, DIM),
    }
    fine = step([layer.fork() for layer in layers], *tensors.values(), DIM**-0.5)
    tensors[bad][1, 1, 3] = float("nan")
    out = step(layers, *tensors.values(), DIM**-0.5)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], fine[[0, 2]])


def test_counts_what_was_read():
    sequence = SequenceKV([make_layer(index=LSHConfig(6, 10, exact_below=64)), None, make_layer()])
    assert sequence.share_read == 1.0
    for layer in sequence.attention_layers:
        layer.extend(*rows(1000))
        decode(layer, 5)
    sampled, _, dense = sequence.layers
    assert dense.window.reads == (5 * HEADS * 1003, 5 * HEADS * 1003)
    assert sampled.window.reads[1] == 5 * HEADS * 1003 > sampled.window.reads[0]
    assert 0.5 < sequence.share_read < 1
    assert sequence.nbytes.index == sampled.far.nbytes.index > 0
    assert sequence.fork().nbytes.rows == sequence.nbytes.rows


def test_a_failed_segment_loses_no_token(monkeypatch):
    layer = make_layer()
    layer.extend(*rows(13))
    monkeypatch.setattr("magicpig.kv.native_layer._extended", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decode(layer, 12)
    before = layer.num_tokens
    monkeypatch.undo()
    decode(layer, 30)
    assert layer.num_tokens == before + 30 > layer.window.num_tokens


def test_refuses_what_does_not_fit():
    layer, other = make_layer(), make_layer(dtype=torch.bfloat16)
    query, key = torch.randn(2, HEADS, DIM), torch.randn(2, KV_HEADS, DIM)
    with pytest.raises(ValueError, match="windows must differ"):
        step([layer, layer], query, key, key, 1.0)
    with pytest.raises(ValueError, match="agree in heads"):
        step([layer, other], query, key, key, 1.0)
    with pytest.raises(ValueError, match="queries must have shape"):
        step([layer], query, key, key, 1.0)
    with pytest.raises(ValueError, match="keys must have shape"):
        step([layer], query[:1], key, key, 1.0)
    with pytest.raises(ValueError, match="scale"):
        step([layer], query[:1], key[:1], key[:1], 0.0)
    with pytest.raises(ValueError, match="NaN"):
        layer.extend(*(torch.full((KV_HEADS, 2, DIM), float("nan")) for _ in range(2)))
    assert layer.num_tokens == 0
    with pytest.raises(ValueError, match="not all in the window"):
        layer.window.drop(0, 99)
    with pytest.raises(ValueError, match="not all among"):
        layer.far.read(0, 1)


def test_a_forked_process_builds_its_own_segments(monkeypatch):
    layer = make_layer()
    decode(layer, SMALL.sinks + SMALL.local + SMALL.block)  # a segment is begun
    started = layer._next_far
    assert started is not None
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    layer._next_far = Future()  # which nobody will ever complete
    decode(layer, 40)
    assert layer.far.num_tokens >= 32
    assert layer.num_tokens == SMALL.sinks + SMALL.local + SMALL.block + 40
