"""Statistics of the native estimator over many draws of the projection."""

import pytest
import torch

from magicpig import LayerKV, LSHConfig
from tests.contexts import make_context

TOKENS = 400


def estimates(context, bits, tables, seeds, collisions=2):
    """Softmax denominators [seeds, heads] and numerators [seeds, heads, dim], in units of the exact
    denominator, and outputs."""
    _, exact_lse = context.kv.attend(context.queries, exact=True)
    keys, values = context.keys, context.values
    denominators, numerators, outs = [], [], []
    for seed in range(seeds):
        kv = LayerKV(
            4, 2, 32, LSHConfig(bits, tables, collisions, seed, exact_below=0), torch.float32
        )
        kv.append(keys, values)
        out, lse = kv.attend(context.queries)
        denominators.append((lse - exact_lse).exp())
        numerators.append(out * denominators[-1][:, None])
        outs.append(out)
    return torch.stack(denominators), torch.stack(numerators), torch.stack(outs)


@pytest.mark.parametrize(
    ("bits", "tables", "collisions"), [(3, 12, 2), (5, 40, 2), (3, 6, 1), (2, 20, 4)]
)
def test_numerator_and_denominator_are_unbiased(bits, tables, collisions):
    context = make_context(tokens=TOKENS, query_norm=1.5)
    exact_out, _ = context.kv.attend(context.queries, exact=True)
    seeds = 600
    denominator, numerator, _ = estimates(context, bits, tables, seeds, collisions)
    for estimate, truth in ((denominator, torch.ones(4)), (numerator, exact_out)):
        bias, standard_error = estimate.mean(0) - truth, estimate.std(0) / seeds**0.5
        assert (bias / standard_error).abs().max() < 4.5  # the largest of 128 normal deviates
        assert standard_error.max() < 0.012  # so that a bias worth the name would show
    assert denominator.std() > 0.02  # it was an estimate, not exact


def test_the_error_falls_as_tables_are_added():
    context = make_context(tokens=TOKENS)
    exact_out, _ = context.kv.attend(context.queries, exact=True)
    errors = []
    for tables in (20, 60, 180):
        _, _, outs = estimates(context, 6, tables, 40)
        errors.append(((outs - exact_out).norm(dim=-1) / exact_out.norm(dim=-1)).mean().item())
    assert errors[0] > 1.5 * errors[1] > 1.5**2 * errors[2]


def test_the_share_of_keys_read_is_the_mean_inclusion_probability():
    """Keys drawn over seeds = the sum of u: the figure a user plans with."""
    context = make_context(tokens=TOKENS)
    shares, expected = [], []
    for seed in range(100):
        kv = LayerKV(4, 2, 32, LSHConfig(5, 40, 2, seed, exact_below=0), torch.float32)
        kv.append(context.keys, context.values)
        rows, _ = kv.sample(context.queries)
        shares.append(sum(len(r) for r in rows) / (4 * TOKENS))
    from magicpig import reference

    for head in range(4):
        centred = reference.centre(context.keys[context.kv_head(head)])
        cos = reference.cosine(context.queries[head], centred)
        expected.append(
            reference.log_inclusion_probability(cos, LSHConfig(5, 40)).exp().mean().item()
        )
    assert sum(shares) / 100 == pytest.approx(sum(expected) / 4, rel=0.05)
