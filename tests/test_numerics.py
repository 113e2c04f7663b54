"""The kernels' own functions, at their edges, on every instruction set."""

import math

import pytest
import torch

from magicpig import LSHConfig, _native, reference
from tests.contexts import make_context


def native_exp(values):
    x = torch.tensor(values, dtype=torch.float32)
    padded = torch.nn.functional.pad(x, (0, -len(x) % 16))
    out = torch.full_like(padded, math.nan)
    _native.exp(padded, out)
    return out[: len(x)]


def test_exp_at_its_edges(every_isa):
    nan = math.nan
    out = native_exp([0.0, -0.0, -math.inf, -100.0, -1e30, -87.4, -3e38, nan, 1e-30])
    assert out[:7].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert math.isnan(out[7])
    assert out[8] == 1.0


def test_exp_keeps_its_error_bound(every_isa):
    x = torch.linspace(-87.3, 0, 20_000)
    error = (native_exp(x.tolist()).double() / x.double().exp() - 1).abs().max()
    assert error < 2e-7


@pytest.mark.parametrize(
    ("bits", "tables", "collisions"), [(10, 150, 2), (1, 1, 1), (16, 10, 2), (8, 300, 3)]
)
def test_native_log_u_equals_the_reference(bits, tables, collisions):
    lsh = LSHConfig(bits, tables, collisions)
    for t in (0.0, 1e-6, 0.01, 0.25, 0.5, 0.75, 0.9, 0.999):
        native = _native.log_inclusion_probability(t, bits, tables, collisions)
        expected = reference.log_inclusion_probability(
            torch.tensor(math.cos(math.pi * t), dtype=torch.float64), lsh
        )
        assert native == pytest.approx(expected.item(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("bits", "tables"), [(1, 2), (4, 30), (8, 60), (2, 300)])
@pytest.mark.parametrize("norm", [1e-20, 1e-11, 1.0, 1e10])
def test_drawn_rows_carry_the_reference_probability(every_isa, bits, tables, norm):
    lsh = LSHConfig(bits, tables, exact_below=0)
    context = make_context(tokens=500, index=lsh, query_norm=norm)
    all_rows, all_logs = context.kv.sample(context.queries)
    for head, (rows, logs) in enumerate(zip(all_rows, all_logs, strict=True)):
        keys = context.keys[context.kv_head(head)]
        cos = reference.cosine(context.queries[head], reference.centre(keys)[rows.long()])
        assert (logs - reference.log_inclusion_probability(cos, lsh)).abs().max() < 2e-4
