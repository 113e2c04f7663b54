"""The eleven methods in whole models: the engine, the drop-in, contexts that are kept."""

import pytest
import torch
from specs import AT_100, EXACT, SPECS
from zoo import loaded, make_model

from magicpig import LLM, SamplingParams, WindowConfig, hf
from magicpig.attention.registry import methods, parse
from magicpig.context import Context, StoreError
from magicpig.document import Document

MODEL_WINDOW = WindowConfig(sinks=2, local=6, block=4)
PROMPTS = [list(range(5, 5 + length)) for length in (60, 1, 33)]
NEW = 14  # tokens: some become far
GREEDY = {"ignore_eos": True, "max_tokens": NEW}


def make_llm(name, spec, dtype=torch.float32):
    return LLM(loaded(name, dtype=dtype), method=spec, window=MODEL_WINDOW, dense_layers=[0])


def tokens_of(generation):
    return [completion.token_ids for completion in generation.completions]


def test_no_method_is_forgotten():
    assert sorted(spec.partition(":")[0] for spec in SPECS) == sorted(methods())


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3", "gemma2", "qwen3"])
def test_a_batch_gives_the_tokens_that_each_prompt_gives_alone(name, spec):
    # A query's bits decide what scan draws: in bfloat16 they do not depend on the batch.
    llm = make_llm(name, spec, torch.bfloat16 if spec.startswith("scan") else torch.float32)
    together = llm.generate(PROMPTS, SamplingParams(**GREEDY))
    alone = [llm.generate([prompt], SamplingParams(**GREEDY))[0] for prompt in PROMPTS]
    assert [tokens_of(g) for g in together] == [tokens_of(g) for g in alone]
    assert [len(tokens_of(g)[0]) for g in together] == [NEW] * 3
    usage, again = (g[0].completions[0].usage for g in (together, alone))
    assert usage.cost == again.cost
    assert (usage.cost.tokens > 0) == (name != "mistral-sliding")
    assert usage.share_read <= 1


@pytest.mark.parametrize("spec", [*EXACT, *AT_100])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2"])
def test_at_100_percent_a_model_says_what_transformers_says(name, spec):
    model = make_model(name)
    model.set_attn_implementation("eager")  # transformers' quick one has no soft caps
    llm = make_llm(name, spec)
    prompt = torch.randint(3, 250, (1, 50))
    ours = tokens_of(llm.generate([prompt[0].tolist()], SamplingParams(**GREEDY))[0])[0]
    model.generation_config.eos_token_id = None
    theirs = model.generate(prompt, max_new_tokens=NEW, do_sample=False)[0, 50:]
    assert ours == theirs.tolist()


@pytest.mark.parametrize("spec", SPECS)
def test_going_on_from_a_text_that_was_read(spec):
    llm = make_llm("llama", spec)
    known = llm.read(PROMPTS[0][:50])
    params = SamplingParams(n=2, **GREEDY)
    first, second = (llm.generate_from(PROMPTS[0], params, known) for _ in range(2))
    assert first.known_tokens == 50
    assert tokens_of(first) == tokens_of(second)
    assert len({tuple(tokens) for tokens in tokens_of(first)}) == 1  # greedy ones are alike
    one = llm.generate_from(PROMPTS[0][:51], SamplingParams(**GREEDY), known)
    assert len(tokens_of(one)[0]) == NEW
    warm = SamplingParams(n=2, temperature=1.5, seed=1, **GREEDY)
    different, again = (llm.generate_from(PROMPTS[0], warm, known) for _ in range(2))
    assert tokens_of(different) == tokens_of(again)
    assert len({tuple(tokens) for tokens in tokens_of(different)}) == 2
    if not llm.engine.runner.plan.method.keeps_all:
        assert known.layers[1].num_tokens < 50
        return
    whole = llm.generate([PROMPTS[0]], SamplingParams(**GREEDY))[0]
    if not spec.startswith(
        ("lsh", "scan")
    ):  # whose segments then have other borders, and other means
        assert tokens_of(first)[0] == tokens_of(whole)[0]


# In float32 padding changes the last bits of a query, and with them what scan draws: it is here at
# 100 % alone.
@pytest.mark.parametrize("spec", [*SPECS[:4], *SPECS[5:], *AT_100])
def test_the_drop_in_with_padding_equals_each_prompt_alone(spec):
    model = make_model("llama")
    lengths = [50, 3, 31]
    ids = torch.randint(3, 211, (3, 50))
    mask = torch.arange(50) >= 50 - torch.tensor(lengths)[:, None]
    new = torch.randint(3, 211, (3, NEW))

    @torch.no_grad()
    def logits(ids, mask, new):
        outs, cache = [], None
        for part in (ids, *new.split(1, 1)):
            mask = mask if cache is None else torch.cat([mask, torch.ones_like(part)], 1)
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -part.shape[1] :]
            out = model(part, attention_mask=mask, position_ids=positions, past_key_values=cache)
            cache = out.past_key_values
            outs.append(out.logits[:, -1])
        return torch.stack(outs)

    with hf.enable(model, spec, window=MODEL_WINDOW, dense_layers=[0]):
        together = logits(ids.masked_fill(~mask, 0), mask.long(), new)
        for i, length in enumerate(lengths):
            own = slice(i, i + 1)
            alone = logits(ids[own, -length:], torch.ones(1, length).long(), new[own])
            torch.testing.assert_close(together[:, own], alone, atol=2e-4, rtol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_the_drop_in_takes_turns_of_a_conversation(spec):
    model = make_model("llama")
    ids = torch.randint(3, 211, (2, 90))
    outs = []
    with hf.enable(model, spec, window=MODEL_WINDOW), torch.no_grad():
        cache = None
        for part in ids.split([40, 1, 1, 20, 1, 27], 1):
            out = model(part, past_key_values=cache)
            cache = out.past_key_values
            outs.append(out.logits[:, -1])
    outs = torch.stack(outs)
    assert outs.isfinite().all()
    if parse(spec).exact:
        with torch.no_grad():
            truth = model(ids).logits[:, [39, 40, 41, 61, 62, 89]]
        torch.testing.assert_close(outs, truth.transpose(0, 1), atol=2e-4, rtol=0)


def test_the_drop_in_refuses_turns_of_padded_conversations_with_evictions():
    model = make_model("llama")
    ids, mask = torch.randint(3, 211, (2, 40)), torch.ones(2, 40).long()
    mask[0, :9] = 0
    with hf.enable(model, "streaming", window=MODEL_WINDOW), torch.no_grad():
        cache = model(ids, attention_mask=mask).past_key_values
        for count, message in ((1, None), (1, None), (5, "were evicted: such a cache takes")):
            mask = torch.cat([mask, torch.ones(2, count).long()], 1)
            more = {"attention_mask": mask, "past_key_values": cache}
            if message is None:
                assert model(ids[:, :count], **more).logits.isfinite().all()
                continue
            with pytest.raises(ValueError, match=message):
                model(ids[:, :count], **more)


@pytest.mark.parametrize("spec", ["topk:20%", "h2o:30%", "quest:4:20%"])
def test_the_drop_in_works_where_gradients_are_on(spec):
    model = make_model("llama")
    ids = torch.randint(3, 211, (1, 40))
    with hf.enable(model, spec, window=MODEL_WINDOW):
        cache = model(ids).past_key_values
        for _ in range(3):
            logits = model(ids[:, :1], past_key_values=cache).logits
    logits.sum().backward()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("spec", ["topk:100%", "h2o:100%"])
def test_generate_with_the_drop_in(spec, beams):
    model = make_model("llama")
    ids = torch.randint(3, 211, (2, 40))
    arguments = {"max_new_tokens": 20, "do_sample": False, "num_beams": beams}
    mask = torch.ones_like(ids)
    truth = model.generate(ids, attention_mask=mask, **arguments)
    with hf.enable(model, spec, window=MODEL_WINDOW):
        assert torch.equal(model.generate(ids, attention_mask=mask, **arguments), truth)


TEXT = Document("The quick brown fox jumps over the lazy dog. " * 2, raw=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A context under each of four methods that keep all tokens."""
    folder = tmp_path_factory.mktemp("contexts")
    for name, spec in zip("abcd", ("topk:20%", SPECS[3], "kv-stream", SPECS[4]), strict=True):
        llm = make_llm("llama", spec)
        Context.read(llm, TEXT).save(llm, folder / f"{name}.pig")
    return folder


@pytest.mark.parametrize(
    ("file", "spec"),
    [
        *(("a.pig", spec) for spec in SPECS),
        *(("b.pig", spec) for spec in ("topk:20%", SPECS[4])),
        *(("c.pig", spec) for spec in (SPECS[3], SPECS[4])),
        *(("d.pig", spec) for spec in ("full", SPECS[3], SPECS[4])),
    ],
)
def test_contexts_are_saved_by_one_method_and_loaded_by_another(saved, file, spec):
    llm = make_llm("llama", spec)
    if spec.startswith("h2o"):
        with pytest.raises(ValueError, match="h2o needs the attention that a prompt's tokens got"):
            Context.load(llm, saved / file)
        return
    texts = []
    for context in (Context.load(llm, saved / file), Context.read(llm, TEXT)):
        ids = context.prompt_ids(llm, "Which?")
        texts.append(tokens_of(llm.generate_from(ids, SamplingParams(**GREEDY), context.kv)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("spec", ["h2o:30%", "streaming"])
def test_contexts_with_evictions_are_not_saved(tmp_path, spec):
    llm = make_llm("llama", spec)
    context = Context.read(llm, TEXT)
    with pytest.raises(StoreError, match=r"a\.pig' cannot be written: .* evicted"):
        context.save(llm, tmp_path / "a.pig")
    assert not list(tmp_path.iterdir())
