"""Inputs of the analysis that are small."""

import torch

from magicpig.analysis.capture import LayerInput
from magicpig.analysis.settings import Settings

TEXT = "\n".join(f"Line {i} says {i * i % 97} and {'abcdefgh'[i % 8] * 3}." for i in range(60))
SMALL = Settings(
    tokens=300,
    inputs=3,
    positions=4,
    few_positions=2,
    sinks=4,
    local=16,
    budgets=(0.02, 0.1, 0.2, 1.0),
    tables=((4, 12), (6, 40)),
    code_bits=(2, 4),
    page=8,
    starts=6,
)


def given(tokens=200, positions=3, heads=4, kv_heads=2, dim=16, softcap=None):
    keys = torch.randn(kv_heads, tokens, dim) + torch.randn(kv_heads, 1, dim)
    values = torch.randn(kv_heads, tokens, dim)
    return LayerInput(0, 2 * torch.randn(positions, heads, dim), keys, values, 0.3, softcap)
