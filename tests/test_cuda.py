"""Models on a GPU: the same numbers, with keys and values in CPU memory."""

import pytest
import torch
from test_hf import EVERYTHING, SMALL, assert_same, padded_prompts, run
from zoo import loaded, make_model

from magicpig import LLM, SamplingParams, hf
from magicpig.models import LoadedModel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("method", ["full", "lsh"])
def test_the_drop_in_gives_transformers_numbers(name, method):
    model = make_model(name).cuda()
    ids, mask = (tensor.cuda() for tensor in padded_prompts())
    theirs, _ = run(model, ids, mask)
    with hf.enable(model, method, lsh=EVERYTHING, window=SMALL, dense_layers=[]):
        ours, _ = run(model, ids, mask)
    assert_same(ours, theirs, mask, 2e-3)  # GPUs sum in another order


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_the_engine_gives_transformers_tokens(name):
    here = loaded(name)
    prompts = [[5, 6, 7] * 20, [9], list(range(10, 250))]
    model = make_model(name).cuda()
    expected = [
        model.generate(
            torch.tensor([prompt]).cuda(), max_new_tokens=20, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    llm = LLM(LoadedModel(here.model.cuda(), here.tokenizer, name, here.path), method="full")
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert [g.completions[0].token_ids for g in llm.generate(prompts, params)] == expected


def test_long_outputs_in_half_precision():
    here = loaded("llama", dtype=torch.bfloat16)
    llm = LLM(
        LoadedModel(here.model.cuda(), here.tokenizer, "llama", here.path),
        lsh=EVERYTHING,
        window=SMALL,
    )
    params = SamplingParams(max_tokens=100, temperature=1.0, seed=1, n=3, ignore_eos=True)
    first, second = (llm.generate("A beginning, and then", params)[0] for _ in range(2))
    assert [c.token_ids for c in first.completions] == [c.token_ids for c in second.completions]
    assert first.completions[0].usage.nbytes.index > 0
