"""Long outputs: generated tokens leave the window, become segments, and stay visible."""

import torch

from magicpig import LSHConfig, WindowConfig
from magicpig.kv.sequence import SequenceLayer, step

HEADS, KV_HEADS, DIM = 4, 2, 64
WINDOW = WindowConfig()
BOUND = WINDOW.sinks + WINDOW.local + 2 * WINDOW.block


def test_a_fact_stated_in_the_output_is_found_3000_tokens_later():
    """4,000 tokens after a prompt of 6,000; the fact is a key that a later query points at."""
    torch.manual_seed(3)
    layer = SequenceLayer(HEADS, KV_HEADS, DIM, torch.bfloat16, LSHConfig(), WINDOW)
    keys, values = torch.randn(2, KV_HEADS, 10_000, DIM).bfloat16().unbind()
    fact = 7_000
    keys[:, fact] *= 4
    layer.extend(keys[:, :6_000], values[:, :6_000])
    queries = torch.randn(10_000, HEADS, DIM).bfloat16()
    queries[9_999] = keys[:, fact].repeat_interleave(HEADS // KV_HEADS, 0)
    most = 0
    for i in range(6_000, 10_000):
        out = step([layer], queries[None, i], keys[None, :, i], values[None, :, i], DIM**-0.5)
        layer.settle()
        most = max(most, layer.window.num_tokens)
    assert most < BOUND
    assert layer.num_tokens == 10_000
    assert len(layer.far.segment_sizes) < 12
    weights = (queries[9_999].view(KV_HEADS, -1, DIM).float() @ keys.float().mT) * DIM**-0.5
    exact = (weights.softmax(-1) @ values.float()).view(HEADS, DIM)
    assert weights.softmax(-1)[..., fact].min() > 0.9  # the fact is what there is to attend to
    assert (out[0].float() - exact).norm() < 0.1 * exact.norm()
    assert layer.window.reads[0] < 0.35 * layer.window.reads[1]
