"""The reference against closed forms and simulation: it is the truth for all else."""

import math

import pytest
import torch

from magicpig import LSHConfig, reference

PUBLISHED = {0.0: 0.0097, 0.1: 0.031, 0.2: 0.087, 0.3: 0.214, 0.4: 0.443, 0.5: 0.736, 0.7: 0.998}


def test_inclusion_probability_has_the_known_values():
    cos = torch.tensor(list(PUBLISHED))
    u = reference.log_inclusion_probability(cos, LSHConfig(10, 150)).exp()
    torch.testing.assert_close(
        u, torch.tensor(list(PUBLISHED.values())).double(), rtol=0.03, atol=0
    )


def test_inclusion_probability_equals_the_formula_for_two_collisions():
    lsh = LSHConfig(6, 40)
    cos = torch.linspace(-0.9, 0.99, 50).double()
    b = (1 - torch.acos(cos) / math.pi) ** 6
    u = 1 - (1 - b) ** 40 - 40 * b * (1 - b) ** 39
    log_u = reference.log_inclusion_probability(cos, lsh)
    torch.testing.assert_close(log_u, u.log(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("min_collisions", [1, 2, 3])
def test_keys_are_drawn_as_often_as_the_formula_says(min_collisions):
    """One key and one query at a known angle, hashed with many projections."""
    cos, seeds = 0.4, 1500
    query = torch.tensor([1.0] + [0.0] * 15)
    key = torch.tensor([cos, math.sqrt(1 - cos**2)] + [0.0] * 14)
    hits = 0
    for seed in range(seeds):
        lsh = LSHConfig(4, 12, min_collisions, seed)
        codes = reference.codes(torch.stack([query, key]), lsh)
        hits += int(reference.collisions(codes[0], codes[1]) >= min_collisions)
    u = math.exp(reference.log_inclusion_probability(torch.tensor(cos), lsh))
    assert abs(hits / seeds - u) < 4 * math.sqrt(u * (1 - u) / seeds)


def test_projection_is_the_same_everywhere():
    directions = reference.projection(LSHConfig(2, 3, seed=5), 4)
    assert directions[0].tolist() == [
        0.44140625,
        -0.330078125,
        2.4375,
        -0.251953125,
        0.109375,
        1.5859375,
    ]
    assert torch.equal(directions, directions.bfloat16().float())


def test_keys_at_the_mean_are_always_drawn():
    keys = torch.full((3, 8), 2.5)
    assert torch.equal(reference.centre(keys), torch.zeros(3, 8))
    rows, log_u = reference.drawn(torch.randn(8), keys, LSHConfig(8, 3))
    assert rows.tolist() == [0, 1, 2]
    assert log_u.tolist() == [0, 0, 0]


def test_vectors_too_short_to_have_a_direction_are_hashed_like_zero():
    lsh = LSHConfig(3, 2)
    assert reference.codes(1e-13 * torch.randn(4, 8), lsh).unique().tolist() == [7]
    assert reference.codes(1e-11 * torch.randn(4, 8), lsh).unique().numel() > 1


def test_merging_equals_attention_over_the_union():
    query, keys, values = torch.randn(8), torch.randn(20, 8), torch.randn(20, 8)
    parts = [
        reference.exact_attention(query, keys[s], values[s], 0.3)
        for s in (slice(0, 7), slice(7, 20))
    ]
    whole = reference.exact_attention(query, keys, values, 0.3)
    merged = reference.merge(*parts[0], *parts[1])
    torch.testing.assert_close(merged[0], whole[0])
    torch.testing.assert_close(merged[1], whole[1])
