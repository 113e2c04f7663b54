"""Long outputs: generated tokens leave the window, become segments, and stay visible."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from zoo import COMMON, make_tokenizer

from magicpig import LLM, LSHConfig, SamplingParams, WindowConfig
from magicpig.kv.base import LayerShape
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.sequence import step
from magicpig.models import LoadedModel

HEADS, KV_HEADS, DIM = 4, 2, 64
WINDOW = WindowConfig()
BOUND = WINDOW.sinks + WINDOW.local + 2 * WINDOW.block


def test_a_fact_stated_in_the_output_is_found_3000_tokens_later():
    """4,000 tokens after a prompt of 6,000; the fact is a key that a later query points at."""
    torch.manual_seed(3)
    layer = NativeLayer(LayerShape(HEADS, KV_HEADS, DIM, torch.bfloat16), LSHConfig(), WINDOW)
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


def test_4000_tokens_after_a_prompt_of_6000():
    config = LlamaConfig(**{**COMMON, "num_hidden_layers": 2, "max_position_embeddings": 16_384})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    llm = LLM(LoadedModel(model, make_tokenizer(), "long", Path()), lsh=LSHConfig(8, 40))
    prompt = torch.randint(3, 300, (6_000,)).tolist()
    params = SamplingParams(max_tokens=4_000, temperature=1.0, seed=1, ignore_eos=True)
    request = llm.engine.add(prompt, params)
    most = 0
    while llm.engine.has_work:
        llm.engine.step()
        if request.sequences and not request.finished:
            layers = request.sequences[0].kv.attention_layers
            most = max(most, *(layer.window.num_tokens for layer in layers))
    assert len(request.sequences[0].token_ids) == 4_000
    assert most < BOUND
    assert request.sequences[0].usage.nbytes.window < 2 * 2 * BOUND * 2 * 16 * 2 * 2
