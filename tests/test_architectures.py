"""Architectures whose features change what the engine has to do, and those that are refused."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from zoo import COMMON, make_tokenizer

from magicpig import LLM, SamplingParams, WindowConfig
from magicpig.attention.plan import make_plan
from magicpig.config import UnsupportedModel
from magicpig.engine.longrope import LongRope
from magicpig.engine.runner import needs_of
from magicpig.evals.forced import force
from magicpig.evals.harness import Harness
from magicpig.models import LoadedModel
from magicpig.nn import PackedLinear, pack

BORDER, BORDER_CROSSING = 64, 50
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0],
    "original_max_position_embeddings": BORDER,
}
SMALL = {**COMMON, "max_position_embeddings": 512}
CONFIGS = {
    "phi3": {**SMALL, "rope_parameters": LONGROPE, "original_max_position_embeddings": BORDER},
    "llama": {**SMALL, "rope_parameters": LONGROPE},
    "bart": {
        "vocab_size": 300, "d_model": 64, "max_position_embeddings": 512, "pad_token_id": 0,
        **{f"{part}_layers": 3 for part in ("encoder", "decoder")},
        **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
        "decoder_ffn_dim": 96, "is_encoder_decoder": False, "is_decoder": True,
    },
    "afmoe": SMALL,
    "bamba": {
        **SMALL, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16,
        "mamba_d_state": 16, "mamba_n_groups": 1,
    },
    "hunyuan_v1_moe": {**SMALL, "num_experts": 4, "moe_topk": 2, "head_dim": 16},
}  # fmt: skip


def model_of(name):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **CONFIGS[name])
    return AutoModelForCausalLM.from_config(config).float().eval()


def llm_for(model, part_tokens=20):
    window = WindowConfig(sinks=2, local=6, block=16)
    llm = LLM(LoadedModel(model, make_tokenizer(), "x", Path()), method="full", window=window)
    llm.engine.runner.part_tokens = part_tokens
    return llm


def prompt_of(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (tokens,), generator=generator).tolist()


def expected_of(model, prompt):
    ids = torch.tensor([prompt])
    model.generation_config.forced_eos_token_id = None
    out = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None)
    return out[0, len(prompt) :].tolist()


def tokens_of(generations):
    return [generation.completions[0].token_ids for generation in generations]


@pytest.mark.parametrize("name", ["phi3", "llama"])
def test_long_sequences_have_rotary_embeddings_of_their_own(name):
    """From their first part on, whoever else is there; short ones have those of short ones."""
    prompts = [prompt_of(tokens, seed=tokens) for tokens in (300, BORDER - 9, 20, BORDER + 1)]
    expected = [expected_of(model_of(name), prompt) for prompt in prompts]
    llm = llm_for(model_of(name))
    assert tokens_of(llm.generate(prompts, PARAMS)) == expected
    assert [tokens_of(llm.generate(prompt, PARAMS)) for prompt in prompts] == [
        [each] for each in expected
    ]


def test_scales_that_differ_are_refused():
    model = model_of("llama")
    scales = {"short_mscale": 1.0, "long_mscale": 1.2}
    model.config.rope_parameters = {**model.config.rope_parameters, **scales}
    with pytest.raises(UnsupportedModel, match="another scale for long ones"):
        llm_for(model)
    assert model.config._attn_implementation == "sdpa"  # as it was


def test_sequences_that_become_long_are_so_from_the_beginning():
    prompt = prompt_of(BORDER_CROSSING)
    many = SamplingParams(max_tokens=30, ignore_eos=True)
    model = model_of("llama")
    rope = LongRope(model)
    rope.choose(rope.is_long(len(prompt), 30))
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None
    )[0, len(prompt) :].tolist()
    assert tokens_of(llm_for(model_of("llama")).generate(prompt, many)) == [expected]


def test_what_was_read_as_short_is_not_gone_on_from_as_long(tmp_path):
    llm, prompt = llm_for(model_of("phi3")), prompt_of(300)
    for read, total in ((BORDER - 20, BORDER - 9), (100, 300)):
        known = llm.read(prompt[:read])
        found = llm.generate_from(prompt[:total], PARAMS, known)
        assert tokens_of([found]) == [expected_of(model_of("phi3"), prompt[:total])]
    known = llm.read(prompt[: BORDER - 20])
    for total, new in ((BORDER + 1, 1), (BORDER - 8, 10)):
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        with pytest.raises(ValueError, match=f"read for sequences of up to {BORDER} tokens"):
            llm.generate_from(prompt[:total], params, known)
    assert not llm.engine.has_work


@pytest.mark.parametrize("name", ["bart", "afmoe"])
def test_batches_and_parts_of_prompts(name):
    """Of a model that is not told positions, and of one that looks at attention's output as it
    likes."""
    prompts = [prompt_of(tokens, seed=tokens) for tokens in (5, 60, 150)]
    expected = [expected_of(model_of(name), prompt) for prompt in prompts]
    assert tokens_of(llm_for(model_of(name)).generate(prompts, PARAMS)) == expected


@pytest.mark.parametrize("name", ["bamba", "hunyuan_v1_moe"])
def test_what_parents_ask_of_their_layers_is_left_to_them(name):
    """Norms with a gate, and weights that are not used by a call."""
    model = model_of(name).bfloat16()
    ids = torch.tensor([prompt_of(40)])
    with torch.inference_mode():
        expected = model(ids).logits
        pack(model)
        assert (model(ids).logits - expected).abs().mean() < 0.05 * expected.std()  # rounding
    assert any(isinstance(module, PackedLinear) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("jamba", {}, "forgets its state between parts of a prompt"),
        ("doge", {}, "makes masks of its own"),
        ("minimax", {}, "has a cache of its own"),
        ("recurrent_gemma", {}, "keeps its state outside of its cache"),
        ("deepseek_v3", {}, "latent attention"),
        ("bert", {}, "looks at tokens that follow"),
    ],
)
def test_what_cannot_be_followed_is_refused_at_once(name, fields, message):
    config = AutoConfig.for_model(name, num_hidden_layers=2, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModel, match=message):
        needs_of(model, make_plan("full", 2), WindowConfig())


def test_evaluations_go_on_beyond_the_border():
    """A text of 80 tokens, half of which is read: all of it has the long set."""
    ids, model = prompt_of(BORDER + 16), model_of("phi3")
    logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    harness = Harness(LoadedModel(model, make_tokenizer(), "x", Path()), ["full"])
    read = harness.read(ids[:40], len(ids) - 40)
    (forced,) = force(harness.step, read.kvs, [read.logits], [ids[40:]])
    expected = logits[torch.arange(39, len(ids) - 1), ids[40:]].double()
    torch.testing.assert_close(forced.logprobs, expected, atol=1e-3, rtol=0)
