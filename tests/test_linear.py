"""Packed linear layers, gated MLPs and norms against torch in higher precision."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import magicpig
from magicpig import _native
from magicpig.nn import GatedMLP, PackedEmbedding, PackedLinear, RMSNorm

SIZES = [(1, 1), (16, 32), (17, 33), (70, 5), (100, 1201)]  # (out, in)


def linear(out_features, in_features, bias=True):
    return nn.Linear(in_features, out_features, bias=bias, dtype=torch.bfloat16)


def assert_rounded_once(out, truth, in_features):
    """Within half a bfloat16 step of the truth, but for what float32 sums may add."""
    error = (out.double() - truth).abs()
    assert (error <= truth.abs() * 2**-8 + 1e-5 * in_features**0.5).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_linear_is_the_product_rounded_once(every_isa, size, bias):
    layer = linear(*size, bias)
    packed = PackedLinear(layer)
    for shape in [(), (1,), (2, 3), (13,), (0, 4), (3, 1, 70)]:
        x = torch.randn(*shape, size[1], dtype=torch.bfloat16)
        out = packed(x)
        assert out.shape == (*shape, size[0])
        assert out.dtype == torch.bfloat16
        double = [None if p is None else p.double() for p in (layer.weight, layer.bias)]
        assert_rounded_once(out, functional.linear(x.double(), *double), size[1])


def test_a_row_does_not_depend_on_the_others_or_on_threads(every_isa):
    rows = 40 if every_isa == "scalar" else 1000
    packed = PackedLinear(linear(75, 1030))
    mlp = GatedMLP(linear(33, 90), linear(33, 90), linear(20, 33))
    before = magicpig.num_threads()
    try:
        for layer in (packed, mlp):
            x = torch.randn(rows, layer.in_features, dtype=torch.bfloat16)
            magicpig.set_num_threads(1)
            truth = layer(x)
            for threads in (1, 2, 3):
                magicpig.set_num_threads(threads)
                assert torch.equal(layer(x), truth)
                for count in (1, 2, 5, 12, 13, 16, 30):
                    assert torch.equal(layer(x[-count:]), truth[-count:])
    finally:
        magicpig.set_num_threads(before)


def test_a_view_is_as_good_as_a_copy():
    packed = PackedLinear(linear(20, 40))
    x = torch.randn(6, 8, 80, dtype=torch.bfloat16)
    for view in (x[:, -1:, :40], x[..., ::2], x.transpose(0, 1)[..., 40:]):
        assert torch.equal(packed(view), packed(view.clone(memory_format=torch.contiguous_format)))


def test_rows_of_the_weight_come_back():
    layer = linear(100, 33, bias=False)
    embedding = PackedEmbedding(PackedLinear(layer))
    ids = torch.randint(0, 100, (3, 50))
    for kind in (torch.int64, torch.int32):
        assert torch.equal(embedding(ids.to(kind)), layer.weight[ids])
    scaled = PackedEmbedding(PackedLinear(layer), scale=33**0.5)
    factor = torch.tensor(33**0.5).bfloat16()
    assert torch.equal(scaled(ids), layer.weight[ids] * factor)


@pytest.mark.parametrize("bad", [-1, 100, 2**62])
def test_ids_out_of_range_are_refused(bad):
    embedding = PackedEmbedding(PackedLinear(linear(100, 8)))
    with pytest.raises(ValueError, match=f"ids must be from 0 to 99, not {bad}"):
        embedding(torch.tensor([3, bad]))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("hidden", [1, 16, 75])
def test_gated_mlp(every_isa, activation, hidden):
    gate, up, down = linear(hidden, 50), linear(hidden, 50), linear(30, hidden)
    mlp = GatedMLP(gate, up, down, activation)
    x = torch.randn(4, 9, 50, dtype=torch.bfloat16)
    act = {"silu": functional.silu, "gelu_tanh": nn.GELU(approximate="tanh")}[activation]

    def through(layer, x):
        return functional.linear(x, layer.weight.double(), layer.bias.double())

    inner = (act(through(gate, x.double())) * through(up, x.double())).bfloat16()
    assert_rounded_once(mlp(x), through(down, inner.double()), 400)


def llama_norm(x, weight, eps):
    inner = x.float()
    inner = inner * torch.rsqrt(inner.pow(2).mean(-1, keepdim=True) + eps)
    return weight * inner.bfloat16()


def gemma_norm(x, weight, eps):
    inner = x.float()
    inner = inner * torch.rsqrt(inner.pow(2).mean(-1, keepdim=True) + eps)
    return (inner * (1.0 + weight.float())).bfloat16()


@pytest.mark.parametrize("dim", [1, 5, 64, 576, 1000])
@pytest.mark.parametrize("truth", [llama_norm, gemma_norm])
def test_norm_rounds_where_the_model_does(every_isa, truth, dim):
    weight = torch.randn(dim, dtype=torch.bfloat16)
    norm = RMSNorm(weight, 1e-5, one_plus_weight=truth is gemma_norm)
    x = torch.randn(30, 7, dim).mul(torch.logspace(-3, 3, 30)[:, None, None]).bfloat16()
    out, expected = norm(x), truth(x, weight, 1e-5)
    assert (out != expected).float().mean() < 0.003  # where a float32 sum in another order tips it
    assert torch.allclose(out.float(), expected.float(), rtol=2**-6, atol=0)


def test_nan_stays_in_its_row(every_isa):
    packed = PackedLinear(linear(40, 60))
    x = torch.randn(15, 60, dtype=torch.bfloat16)
    clean = packed(x)
    x[7, 3] = float("nan")
    out = packed(x)
    assert out[7].isnan().all()
    keep = torch.arange(15) != 7
    assert torch.equal(out[keep], clean[keep])


def tensor(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((tensor(2, 8, dtype=torch.float32), tensor(2, 4)), TypeError, "x must be bfloat16"),
        ((tensor(2, 7), tensor(2, 4)), ValueError, "x must have 8 elements"),
        ((tensor(), tensor(2, 4)), ValueError, "x must have 8 elements"),
        ((tensor(8, 2).T, tensor(2, 4)), ValueError, "x must be contiguous"),
        ((tensor(1, 8).expand(2, 8), tensor(2, 4)), ValueError, "x must be contiguous"),
        ((tensor(2, 8), tensor(3, 4)), ValueError, "out must have as many rows"),
        ((tensor(2, 8), tensor(2, 5)), ValueError, "out must have 4 elements"),
        ((tensor(2, 8), tensor(4, 2).T), ValueError, "out must be contiguous"),
        ((tensor(2, 8), tensor(2, 4, dtype=torch.float16)), TypeError, "out must be bfloat16"),
        ((tensor(2, 8).to("meta"), tensor(2, 4)), TypeError, "incompatible"),
        ((tensor(2, 8).to_sparse(), tensor(2, 4)), TypeError, "incompatible"),
        ((None, tensor(2, 4)), TypeError, "incompatible"),
        (([[0.0] * 8], tensor(2, 4)), TypeError, "incompatible"),
    ],
)
def test_the_border_refuses_what_it_cannot_read(arguments, error, message):
    with pytest.raises(error, match=message):
        _native.PackedLinear(tensor(4, 8)).forward(*arguments)


def test_odd_weights_are_refused():
    for weight in (tensor(4), tensor(0, 8), tensor(8, 0), tensor(2, 2, 2)):
        with pytest.raises(ValueError, match="weight must have shape"):
            _native.PackedLinear(weight)
    with pytest.raises(TypeError, match="weight must be bfloat16"):
        _native.PackedLinear(tensor(4, 8, dtype=torch.float32))
    with pytest.raises(ValueError, match="bias must have shape"):
        _native.PackedLinear(tensor(4, 8), tensor(5))
    with pytest.raises(ValueError, match="activation must be silu or gelu_tanh, not relu"):
        _native.GatedMLP(tensor(4, 8), tensor(4, 8), tensor(8, 4), "relu")
    with pytest.raises(ValueError, match="up_weight"):
        _native.GatedMLP(tensor(4, 8), tensor(4, 9), tensor(8, 4), "silu")
    with pytest.raises(ValueError, match="down_weight"):
        _native.GatedMLP(tensor(4, 8), tensor(4, 8), tensor(8, 5), "silu")
    with pytest.raises(ValueError, match="eps"):
        _native.rms_norm(tensor(1, 4), tensor(4), -1.0, False, tensor(1, 4))


def test_other_libraries_arrays_are_read_too():
    """numpy has no table of C functions for the exchange; its arrays come another way."""
    layer = _native.PackedLinear(torch.arange(8).bfloat16()[:, None])
    out = tensor(3, 1)
    layer.lookup(torch.tensor([5, 0, 7]).numpy(), out)
    assert out.flatten().tolist() == [5, 0, 7]


def test_a_lost_gradient_is_an_error():
    packed = PackedLinear(linear(4, 8))
    x = torch.zeros(1, 8, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match="no gradient"):
        packed(x)
    with torch.no_grad():
        assert packed(x).shape == (1, 4)
