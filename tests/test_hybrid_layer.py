"""Layers with their windows on the model's device: here the CPU, in the code that GPUs run."""

import pytest
import torch

from magicpig import LSHConfig, ScanConfig, WindowConfig
from magicpig.attention.plan import make_plan
from magicpig.kv.base import LayerShape
from magicpig.kv.cost import Cost
from magicpig.kv.hybrid_layer import HybridLayer, new_layer
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.sequence import SequenceKV, step

SHAPE = LayerShape(4, 2, 16, torch.float32, torch.device("cpu"))
WINDOW = WindowConfig(sinks=3, local=8, block=16)
INDEXES = [
    None,
    LSHConfig(4, 12, exact_below=0),
    ScanConfig(2, 0.2, 4, exact_below=0),
]


def layer_of(kind, index, tokens=0, span=None, seed=0):
    torch.manual_seed(seed)
    layer = kind(SHAPE, index, WINDOW, span)
    if tokens:
        layer.extend(*torch.randn(2, 2, tokens, 16))
    return layer


def both(index, lengths, steps, span=None, softcap=None):
    """Outputs of steps of sequences of these lengths, and the layers, for each kind."""
    found = []
    for kind in (NativeLayer, HybridLayer):
        layers = [layer_of(kind, index, n, span, seed=n) for n in lengths]
        torch.manual_seed(1)
        outs = []
        for _ in range(steps):
            queries = torch.randn(len(lengths), 4, 16)
            keys, values = torch.randn(2, len(lengths), 2, 16)
            outs.append(step(layers, queries, keys, values, 0.3, softcap))
            for layer in layers:
                layer.settle()
        found.append((torch.stack(outs), layers))
    return found


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("lengths", [[0], [200], [5, 150, 40]])
def test_steps_are_those_of_the_native_layer(index, lengths, softcap):
    (expected, natives), (got, hybrids) = both(index, lengths, 60, softcap=softcap)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    for native, hybrid in zip(natives, hybrids, strict=True):
        assert hybrid.num_tokens == native.num_tokens
        assert hybrid.window.num_tokens == native.window.num_tokens
        assert hybrid.far.segment_sizes == native.far.segment_sizes
        assert hybrid.cost == native.cost
        assert hybrid.reads == native.reads
        for mine, theirs in zip(hybrid.read(), native.read(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("lengths", [[3], [100], [4, 70, 20]])
def test_sliding_layers(lengths):
    (expected, natives), (got, hybrids) = both(None, lengths, 50, span=24)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    for native, hybrid in zip(natives, hybrids, strict=True):
        assert hybrid.num_tokens == native.num_tokens


@pytest.mark.parametrize("index", INDEXES)
def test_forks_go_their_own_way(index):
    layer = layer_of(HybridLayer, index, 100)
    step([layer], torch.randn(1, 4, 16), *torch.randn(2, 1, 2, 16), 0.3)
    other = layer.fork()
    assert (other.cost, other.reads) == (Cost(), (0, 0))
    new = torch.randn(3, 1, 4, 16)
    first = step([layer], new[0], new[1, :, :2], new[2, :, :2], 0.3)
    assert (layer.num_tokens, other.num_tokens) == (102, 101)
    assert torch.equal(first, step([other], new[0], new[1, :, :2], new[2, :, :2], 0.3))
    keys, values = torch.randn(2, 2, 2, 16)
    together = step([layer, other], torch.randn(2, 4, 16), keys, values, 0.3)
    assert together.isfinite().all()
    assert (layer.num_tokens, other.num_tokens) == (103, 103)


def test_sequences_leave_and_come_back():
    """Whoever steps together, results are those of a step alone."""
    layers = [layer_of(HybridLayer, INDEXES[1], n, seed=n) for n in (50, 120, 33)]
    alone = [layer.fork() for layer in layers]
    torch.manual_seed(2)
    for who in ([0, 1, 2], [2, 0], [1], [0, 1, 2], [1, 2]):
        queries = torch.randn(len(who), 4, 16)
        keys, values = torch.randn(2, len(who), 2, 16)
        out = step([layers[i] for i in who], queries, keys, values, 0.3)
        for j, i in enumerate(who):
            single = slice(j, j + 1)
            expected = step([alone[i]], queries[single], keys[single], values[single], 0.3)
            torch.testing.assert_close(out[single], expected, atol=1e-5, rtol=1e-5)


def test_numbers_that_are_not_finite_are_refused():
    layer = layer_of(HybridLayer, None)
    keys, values = torch.randn(2, 2, 5, 16)
    keys[1, 3, 7] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite"):
        layer.extend(keys, values)
    assert layer.num_tokens <= 3


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_bad_numbers_stay_in_their_sequence(index, bad):
    layers = [layer_of(HybridLayer, index, n, seed=n) for n in (150, 120, 5)]
    queries = torch.randn(3, 4, 16)
    keys, values = torch.randn(2, 3, 2, 16)
    single = slice(0, 1)
    alone = layers[0].fork()
    queries[1, 2, 3] = bad
    out = step(layers, queries, keys, values, 0.3)
    assert out[1].isnan().any()
    assert out[[0, 2]].isfinite().all()
    expected = step([alone], queries[single], keys[single], values[single], 0.3)
    torch.testing.assert_close(out[single], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", ["lsh:4:12", "scan:2:20%", "cpu-dense"])
def test_a_plan_moves_windows_between_devices(spec):
    """What was read elsewhere goes on where the model is; rows are shared."""
    plan = make_plan(spec, 1, dense_layers=())
    index = getattr(plan.method, "index", None)
    native = layer_of(NativeLayer, index, 200)
    [there] = plan.adopt(SequenceKV([native], 200), torch.device("meta")).layers
    assert type(there) is HybridLayer
    assert there.shape.device.type == "meta"
    assert there.num_tokens == 200
    assert there.far.nbytes == native.far.nbytes


@pytest.mark.parametrize("kind", [NativeLayer, HybridLayer])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 7e4])
def test_windows_refuse_what_they_cannot_hold(kind, bad):
    layer = kind(LayerShape(4, 2, 16, torch.float16, torch.device("cpu")), None, WINDOW)
    keys = torch.randn(2, 10, 16)
    for i in range(2):
        tokens = [keys.clone(), keys.clone()]
        tokens[i][1, 2, 3] = bad
        with pytest.raises(ValueError, match="exceeds 1e18 or the range of float16"):
            layer.extend(*tokens)
        assert layer.num_tokens == 0
    layer.extend(keys, keys)
    assert layer.num_tokens == 10


def test_devices_choose_the_kind():
    assert type(new_layer(SHAPE, None, WINDOW)) is NativeLayer
    elsewhere = LayerShape(4, 2, 16, torch.float32, torch.device("meta"))
    assert type(new_layer(elsewhere, None, WINDOW)) is HybridLayer
