"""The engine: requests together give what each gives alone, and none can spoil another."""

from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from zoo import CONFIGS, loaded, make_model, make_tokenizer

from magicpig import LSHConfig
from magicpig.config import UnsupportedModel
from magicpig.engine.params import SamplingParams
from magicpig.engine.sequence import Finish
from magicpig.llm import LLM
from magicpig.models import LoadedModel
from tests.engines import PROMPTS, collect, greedy, make_llm


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gemma2"])
def test_equals_transformers_generate(name, short_parts):
    model = loaded(name).model
    expected = [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    generations = make_llm(name).generate(PROMPTS, greedy())
    assert [g.completions[0].token_ids for g in generations] == expected


def test_requests_join_and_leave_at_any_step(short_parts):
    llm = make_llm(method="lsh", lsh=LSHConfig(4, 30, exact_below=16))
    params = [
        SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True, n=n)
        for tokens, seed, n in ((40, 1, 1), (3, 2, 2), (60, 3, 1), (25, 4, 3))
    ]
    alone = [
        collect(llm, [llm.engine.add(prompt, each)])[0]
        for prompt, each in zip(PROMPTS, params, strict=True)
    ]
    requests = []
    for prompt, each in zip(PROMPTS, params, strict=True):
        requests.append(llm.engine.add(prompt, each))
        for _ in range(2):
            llm.engine.step()
    while llm.engine.has_work:
        llm.engine.step()
    assert [[s.token_ids for s in request.sequences] for request in requests] == alone
    assert len({tuple(tokens) for tokens in alone[3]}) == 3  # the n completions differ
    assert not llm.engine.scheduler.running


def test_no_more_run_than_may(short_parts):
    llm = make_llm(max_sequences=2)
    requests = [llm.engine.add(prompt, greedy()) for prompt in PROMPTS]
    most = 0
    while llm.engine.has_work:
        llm.engine.step()
        most = max(most, len(llm.engine.scheduler.running))
    assert most == 2
    assert all(request.sequences[0].finish == Finish.LENGTH for request in requests)


def test_abort_at_any_time(short_parts):
    llm = make_llm()
    expected = collect(llm, [llm.engine.add(PROMPTS[0], greedy())])
    for steps in range(12):  # waiting, while its prompt is read, while it decodes
        other = llm.engine.add(PROMPTS[0], greedy())
        doomed = llm.engine.add(PROMPTS[2], greedy(n=2))
        for _ in range(steps):
            llm.engine.step()
        llm.engine.abort(doomed.id)
        llm.engine.abort(doomed.id)
        events = llm.engine.step()
        finishes = [event.finish for event in events if event.request_id == doomed.id]
        assert finishes == [Finish.ABORT, Finish.ABORT]
        assert collect(llm, [other]) == expected
        assert not llm.engine.has_work


def test_bad_requests_are_refused_with_numbers():
    llm = make_llm(memory_bytes=6_000_000)
    add = llm.engine.add
    with pytest.raises(ValueError, match="prompt is empty"):
        add([], greedy())
    with pytest.raises(ValueError, match=r"has 5000 tokens; the model's context holds 4096"):
        add([5] * 5000, greedy())
    with pytest.raises(ValueError, match="prompt token 300 is not from 0 to 299"):
        add([5, 300], greedy())
    with pytest.raises(MemoryError, match=r"may need \d+\.\d\d MB .* 6\.00 MB are there"):
        add([5] * 4000, greedy(n=60))
    with pytest.raises(ValueError, match=r"n must be at most 2 \(max_sequences\), not 3"):
        make_llm(max_sequences=2).engine.add([5], greedy(n=3))


def test_the_end_of_the_context_ends_the_completion():
    llm = make_llm()
    request = llm.engine.add([5] * 4090, greedy(max_tokens=100))
    assert len(collect(llm, [request])[0][0]) == 6
    assert request.sequences[0].finish == Finish.LENGTH


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_goes_on_from_a_prompt_read_before(name, short_parts):
    llm = make_llm(name)
    ids = PROMPTS[2]
    expected = collect(llm, [llm.engine.add(ids, greedy())])
    first = llm.engine.add(ids[:150], greedy(max_tokens=1), keep_prompt=True)
    collect(llm, [first])
    for _ in range(2):  # it is not used up
        assert first.prompt.num_tokens == 150
        request = llm.engine.add(ids, greedy(), known=first.prompt)
        assert collect(llm, [request]) == expected
    with pytest.raises(ValueError, match="one at least must be new"):
        llm.engine.add(ids[:150], greedy(), known=first.prompt)


def test_completions_of_one_prompt_share_its_memory():
    llm = make_llm(method="lsh", lsh=LSHConfig(6, 20))
    request = llm.engine.add([5, 6, 7, 8] * 500, greedy(n=8, temperature=1.0))
    while not request.sequences or len(request.sequences[0].token_ids) < 20:
        llm.engine.step()
    layers = [s.kv.layers[1] for s in request.sequences]
    segments = {tuple(layer.far.segment_sizes) for layer in layers}
    assert len(segments) == 1
    shared = layers[0].far.nbytes.rows + layers[0].far.nbytes.index
    own = sum(layer.window.nbytes for layer in layers)
    assert own < 0.3 * (shared + layers[0].window.nbytes)


def test_streams_can_be_read_in_turns():
    llm = make_llm()
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    alone = ["".join(llm.stream(text, params)) for text in ("one text", "another")]
    streams = [llm.stream(text, params) for text in ("one text", "another")]
    texts = ["", ""]
    for pieces in zip_longest(*streams, fillvalue=""):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    assert texts == alone
    half = llm.stream("one text", params)
    next(half)
    half.close()
    assert not llm.engine.has_work


def test_threads_may_share_an_llm():
    llm = make_llm(method="lsh", lsh=LSHConfig(4, 30, exact_below=16))
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5, ignore_eos=True)

    def answer(prompt):
        completion = llm.generate([prompt], params)[0].completions[0]
        assert len(completion.token_ids) == 30
        return completion.text, completion.token_ids

    expected = [answer(prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(answer, PROMPTS * 4)) == expected * 4
    assert not llm.engine.has_work


def test_news_of_a_request_wait_until_it_is_asked_for():
    """Another thread may step before a request's own one does."""
    llm = make_llm()
    expected = "".join(llm.stream("one text", greedy()))
    request = llm._add(llm.encode("one text"), greedy())
    for _ in range(5):
        llm._deliver(llm.engine.step())
    assert "".join(event.text for event in llm.run([request])) == expected
    assert not llm._inboxes


def test_a_request_may_be_ended_by_its_own_events():
    llm = make_llm()
    for prompt, after in ((PROMPTS[2] * 5, 0), (PROMPTS[0], 5)):
        seen = []

        def end(event, seen=seen, after=after):
            seen.append(event)
            if len(seen) > after:
                llm.engine.abort(event.request_id)

        generation = llm.generate([prompt], greedy(n=2), end)[0]
        assert [c.finish for c in generation.completions] == [Finish.ABORT] * 2
        assert not llm.engine.has_work


def test_prompts_are_read_in_parts_of_bounded_size():
    llm = make_llm()
    for tokens in (1, 2, 512, 513, 1025, 1400):
        sizes, last = [], 0
        for event in llm.run([llm.engine.add([7] * tokens, greedy(max_tokens=1))]):
            if event.prefilled:
                sizes.append(event.prefilled - last)
                last = event.prefilled
        assert sum(sizes) == tokens
        assert max(sizes) <= 512
        assert min(sizes) > 1 or tokens == 1


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("method", ["full", "lsh"])
def test_what_is_held_was_estimated(name, method):
    llm = make_llm(name, method=method, lsh=LSHConfig(5, 40, exact_below=0))
    request = llm.engine.add([5, 6, 7, 8] * 400, greedy(max_tokens=300, n=4, temperature=1.0))
    held = 0
    while llm.engine.has_work:
        llm.engine.step()
        if request.sequences and not request.finished:
            sizes = [s.usage.nbytes for s in request.sequences]
            shared = sizes[0].rows + sizes[0].index
            held = max(held, shared + sum(size.window for size in sizes))
    needed = request.needed.own + request.needed.windows * 4
    assert held <= needed.host < 8 * held
    assert needed.device == 0


def test_rotary_embeddings_that_know_the_batch_are_run_alone():
    def llm():
        model = make_model("llama")
        config = model.config
        config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        config.max_position_embeddings = 100
        fresh = type(model)(config).eval()
        fresh.load_state_dict(model.state_dict())
        return LLM(LoadedModel(fresh, make_tokenizer(), "dynamic", Path()), method="full")

    prompts = [list(range(5, 45)), list(range(5, 90))]
    alone = [llm().generate([prompt], greedy(8))[0].completions[0].token_ids for prompt in prompts]
    together = llm().generate(prompts, greedy(8))
    assert [g.completions[0].token_ids for g in together] == alone


def test_models_that_cannot_be_followed_are_refused():
    model = make_model("llama")
    model.config.layer_types = ["chunked_attention"] * 4
    model.config.attention_chunk_size = 16
    with pytest.raises(UnsupportedModel, match="chunked attention"):
        LLM(LoadedModel(model, make_tokenizer(), "chunked", Path()))
    taken = loaded("llama")
    LLM(taken)
    with pytest.raises(ValueError, match="belongs to another LLM"):
        LLM(taken)
    mended = loaded("llama")
    for wrong in ({"cpu_memory": "much"}, {"gpu_memory": "1GB"}, {"cpu_memory": -1}):
        with pytest.raises(ValueError, match="_memory"):
            LLM(mended, **wrong)
    assert LLM(mended).generate([[5, 6, 7]], greedy(2))  # which was not taken
    with pytest.raises(TypeError, match="not a LlamaForCausalLM"):
        LLM(make_model("llama"))
