"""The drop-in: transformers models give transformers' own numbers, and are left as they were."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache
from zoo import CONFIGS, make_model

import magicpig
from magicpig import LSHConfig, WindowConfig, hf
from magicpig.config import UnsupportedModel
from magicpig.hf.cache import BatchLayer

SMALL = WindowConfig(sinks=2, local=6, block=16)
EVERYTHING = LSHConfig(1, 512, min_collisions=1, exact_below=0)  # all keys collide: no sampling
LENGTHS = [70, 5, 41]
STEPS = 64


def padded_prompts(lengths=LENGTHS):
    """Left-padded ids and mask [batch, longest]."""
    ids = torch.randint(3, 211, (len(lengths), max(lengths)))
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return ids.masked_fill(~mask, 0), mask.long()


@torch.no_grad()
def run(model, ids, mask, steps=STEPS):
    """Logits [batch, tokens, vocab] of a prefill and of decode steps with given tokens."""
    cache = DynamicCache(config=model.config)
    torch.manual_seed(1)
    new = torch.randint(3, 211, (len(ids), steps)).to(ids.device)
    logits = [model(ids, attention_mask=mask, past_key_values=cache).logits]
    for i in range(steps):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        out = model(new[:, i : i + 1], attention_mask=mask, past_key_values=cache)
        logits.append(out.logits)
    return logits, cache


def assert_same(ours, theirs, mask, tolerance):
    visible = mask.bool()
    assert (ours[0] - theirs[0])[visible].abs().max() < tolerance
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        assert (mine - other).abs().max() < tolerance


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("method", ["full", "lsh"])
def test_logits_equal_transformers_own(name, method):
    model = make_model(name)
    if name == "gemma2":
        model.set_attn_implementation("eager")  # transformers' own quick one cannot soft-cap
    ids, mask = padded_prompts()
    theirs, _ = run(model, ids, mask)
    with hf.enable(model, method, lsh=EVERYTHING, window=SMALL, dense_layers=[]):
        ours, cache = run(model, ids, mask)
    assert_same(ours, theirs, mask, 2e-4)
    layers = [layer for layer in cache.layers if isinstance(layer, BatchLayer)]
    full = getattr(model.config, "layer_types", None) or ["full_attention"] * 4
    if name == "mistral-sliding":
        full = []
    assert len(layers) == full.count("full_attention")
    for layer in layers:
        assert [row.num_tokens for row in layer.rows] == [length + STEPS for length in LENGTHS]
        assert all(row.far.num_tokens > 0 for row in layer.rows)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("method", ["full", "lsh"])
def test_bfloat16_is_as_good_as_transformers(name, method):
    """Both are compared with float32: rounding differs, its size does not."""
    model, truth = make_model(name, torch.bfloat16), make_model(name, torch.bfloat16).float()
    ids, mask = padded_prompts()
    exact, theirs = run(truth, ids, mask)[0], run(model, ids, mask)[0]
    with hf.enable(model, method, lsh=EVERYTHING, window=SMALL):
        ours = run(model, ids, mask)[0]

    def error(logits):
        errors = [(a.float() - b)[:, -1].square() for a, b in zip(logits, exact, strict=True)]
        return torch.stack(errors).mean().sqrt()

    assert error(ours) < 1.2 * error(theirs)


def test_generate_and_restore():
    model = make_model("llama")
    ids, mask = padded_prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    before = model.generate(ids, **arguments)
    with magicpig.hf.enable(model, method="full", window=SMALL) as enabled:
        assert enabled is model
        assert torch.equal(model.generate(ids, **arguments), before)
        assert torch.equal(model.generate(ids, **arguments, prefill_chunk_size=16), before)
        beams = model.generate(ids, **arguments, num_beams=3)
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks
    assert torch.equal(model.generate(ids, **arguments), before)
    assert torch.equal(model.generate(ids, **arguments, num_beams=3), beams)


def test_restores_after_an_error():
    model = make_model("llama")
    with pytest.raises(KeyError), hf.enable(model):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks


def test_turns_of_a_conversation_share_a_cache():
    """Single tokens, then several at once, then single ones: tokens move back and forth."""
    model = make_model("llama")
    ids = torch.randint(3, 211, (2, 150))

    @torch.no_grad()
    def last_logits(cache):
        logits = []
        for part in ids.split([40, 1, 1, 30, 1, 50, 1, 26], 1):
            logits.append(model(part, past_key_values=cache).logits[:, -1])
        return torch.stack(logits)

    theirs = last_logits(DynamicCache(config=model.config))
    with hf.enable(model, "full", window=SMALL):
        assert torch.allclose(last_logits(DynamicCache(config=model.config)), theirs, atol=2e-4)


def test_crop_and_prompt_lookup():
    model = make_model("llama")
    ids = torch.randint(3, 20, (1, 90))
    plain = model.generate(ids, max_new_tokens=30, do_sample=False)
    with hf.enable(model, "full", window=SMALL):
        looked_up = model.generate(
            ids, max_new_tokens=30, do_sample=False, prompt_lookup_num_tokens=4
        )
    assert torch.equal(plain, looked_up)


def test_a_filled_cache_is_taken_over():
    model = make_model("gemma3")
    ids = torch.randint(3, 211, (2, 60))
    cache, own = (DynamicCache(config=model.config) for _ in range(2))
    with torch.no_grad():
        for filled in (cache, own):
            model(ids, past_key_values=filled)
        expected = model(ids[:, :1], past_key_values=own).logits
        with hf.enable(model, "full", window=SMALL):
            out = model(ids[:, :1], past_key_values=cache).logits
    assert torch.allclose(out, expected, atol=2e-4)


def test_caches_do_not_outlive_the_context():
    model = make_model("llama")
    ids = torch.randint(3, 211, (1, 9))
    with torch.no_grad(), hf.enable(model):
        cache = model(ids).past_key_values
    with torch.no_grad(), pytest.raises(RuntimeError, match="no longer in force"):
        model(ids[:, :1], past_key_values=cache)


def test_bad_arguments():
    model = make_model("llama")
    ids = torch.randint(3, 211, (1, 9))
    for arguments, message in (
        ({"method": "quest2"}, "method must be one of full, lsh, .*kv-stream, not 'quest2'"),
        ({"dense_layers": [4]}, "dense_layers must be from 0 to 3, not 4"),
        ({"lsh": 3}, "lsh must be an LSHConfig"),
    ):
        with pytest.raises((ValueError, TypeError), match=message), hf.enable(model, **arguments):
            pass
    with pytest.raises(TypeError, match="PreTrainedModel"), hf.enable(torch.nn.Linear(2, 2)):
        pass
    with hf.enable(model), pytest.raises(ValueError, match="StaticCache"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=20))
    shown = torch.ones(1, 10, dtype=torch.long)
    with hf.enable(model), torch.no_grad():
        cache = model(ids).past_key_values
        model(ids[:, :1], past_key_values=cache, attention_mask=shown)
        hidden = torch.ones(1, 11, dtype=torch.long)
        hidden[0, 3] = 0
        with pytest.raises(ValueError, match="must stay so"):
            model(ids[:, :1], past_key_values=cache, attention_mask=hidden)


def test_importing_registers_nothing():
    from processes import run_python

    out = run_python(
        "from transformers import AttentionInterface\n"
        "import magicpig, magicpig.hf\n"
        "print('magicpig' in AttentionInterface().valid_keys())"
    )
    assert out.stdout.strip() == "False"


def test_the_default_model_gives_transformers_logits(default_model):
    """In float32; sampled with tables in which everything collides."""
    model = default_model.model
    text = "The keeper wrote down the weather and the ships that passed. " * 40
    prompts = [default_model.tokenizer(text[:length])["input_ids"] for length in (900, 150)]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
    theirs, _ = run(model, ids, mask)
    for method in ("full", "lsh"):
        with hf.enable(model, method, lsh=EVERYTHING, window=SMALL):
            ours, cache = run(model, ids, mask)
        assert_same(ours, theirs, mask, 1e-4 * theirs[-1].abs().max())
        assert cache.layers[1].rows[0].far.num_tokens > longest


def test_models_that_touch_keys_after_the_cache_are_refused():
    model = make_model("llama")
    ids = torch.randint(3, 211, (1, 30))

    class Touched(type(model.model.layers[1].self_attn)):
        def forward(self, *args, past_key_values, **kwargs):
            touched = type("Cache", (), {"update": lambda _, *a: _double(past_key_values, *a)})
            return super().forward(*args, past_key_values=touched(), **kwargs)

    def _double(cache, *arguments):
        keys, values = cache.update(*arguments)
        return keys * 1.0, values

    model.model.layers[1].self_attn.__class__ = Touched
    with hf.enable(model), pytest.raises(UnsupportedModel, match="cannot follow"):
        model.generate(ids, max_new_tokens=5)
    plain = make_model("llama")  # what went wrong before does not linger
    with hf.enable(plain):
        plain.generate(ids, max_new_tokens=5)


def test_attention_that_takes_more_is_refused():
    model = make_model("llama")
    ids = torch.randint(3, 211, (1, 30))
    with hf.enable(model):
        with pytest.raises(UnsupportedModel, match="takes 's_aux'"):
            model(ids, s_aux=torch.zeros(4))
        with pytest.raises(RuntimeError, match="enabled for this model already"), hf.enable(model):
            pass
        assert model(ids, None, None, None).past_key_values.get_seq_length() == 30
    model.model.layers[1].self_attn.is_causal = False
    with hf.enable(model), pytest.raises(UnsupportedModel, match="causal attention only"):
        model(ids)
    model.model.layers[1].self_attn.is_causal = True
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with hf.enable(model), pytest.raises(UnsupportedModel, match="dropout"):
        model(ids)


@pytest.mark.parametrize("decoded", [0, 3])
def test_a_copied_cache_is_a_cache_of_its_own(decoded):
    model = make_model("llama")
    ids = torch.randint(3, 211, (1, 60))
    with torch.no_grad(), hf.enable(model, "full", window=SMALL):
        cache = model(ids).past_key_values
        for _ in range(decoded):
            model(ids[:, :1], past_key_values=cache)
        other = copy.deepcopy(cache)
        outs = [model(ids[:, :1], past_key_values=each).logits for each in (cache, other, other)]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[1], outs[2])
    with torch.no_grad(), pytest.raises(RuntimeError, match="no longer in force"):
        model(ids[:, :1], past_key_values=other)


def test_a_row_that_is_not_finite_leaves_the_others_alone():
    model = make_model("llama")
    ids = torch.randint(3, 211, (2, 60))
    with torch.no_grad(), hf.enable(model, "full", window=SMALL):
        cache = model(ids).past_key_values
        clean = copy.deepcopy(cache)
        for step in range(60):
            token = ids[:, step : step + 1]
            embeds = model.get_input_embeddings()(token)
            fine = model(inputs_embeds=embeds, past_key_values=clean).logits
            if step == 4:
                embeds[1] = float("nan")
            out = model(inputs_embeds=embeds, past_key_values=cache).logits
    assert torch.equal(out[0], fine[0])
    assert out[1].isnan().all()
