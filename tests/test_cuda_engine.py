"""The engine on a GPU: halves, graphs, faults and memory."""

import gc
from queue import SimpleQueue

import pytest
import torch
from test_found_elsewhere import assert_same as assert_same_context
from test_leaks import resident
from zoo import loaded

from magicpig import LLM, LayerKV, LSHConfig, SamplingParams, WindowConfig
from magicpig.engine.memory import Memory
from magicpig.engine.runner import Runner
from magicpig.kv import courier, device_index, host_prompt, places, segments, tray
from magicpig.kv.hybrid_layer import HybridLayer
from magicpig.kv.places import give_back_pinned
from magicpig.kv.seats import Seats
from magicpig.kv.sequence import SequenceKV
from magicpig.models import LoadedModel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_segments_grow_with_prompts(monkeypatch):
    """Their tables are those of a segment that is made of all tokens when they are there."""
    prompt, found = [i * 7 % 200 + 3 for i in range(3000)], []
    for least in (256, 10_000):
        monkeypatch.setattr(segments, "LEAST_EARLY", least)
        llm = cuda_llm("lsh:4:12")
        llm.engine.runner.part_tokens = 300
        found.append(llm.read(prompt).layers[1].far)
    assert len(found[0].segment_sizes) == 1
    assert_same_context(*found)


HYBRID = WindowConfig(4, 8, 16)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("method", ["lsh:4:12", "scan:2:100%", "cpu-dense", "kv-stream"])
def test_windows_and_prompts_where_they_belong(halved, name, method):
    """Windows on the GPU, prompts and far contexts in host memory."""
    prompts = [[i * k % 200 + 3 for i in range(100 * k)] for k in (1, 3, 5)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    tokens = []
    for device in ("cpu", "cuda"):
        here = loaded(name)
        model = LoadedModel(here.model.to(device), here.tokenizer, name, here.path)
        llm = LLM(model, method=method, window=HYBRID, dense_layers=[])
        assert (llm.engine.runner.halves is not None) == (device == "cuda")
        tokens.append([g.completions[0].token_ids for g in llm.generate(prompts, params)])
    pairs = [zip(one, other, strict=True) for one, other in zip(*tokens, strict=True)]
    same = [a == b for pair in pairs for a, b in pair]
    assert sum(same) > 0.9 * len(same)  # a token may differ where two are nearly as likely


@pytest.fixture(params=[True, False], ids=["halves", "whole"])
def halved(request, monkeypatch):
    """Batches of two and more in two halves, or never, whatever pays."""
    monkeypatch.setattr(Runner, "_halving_pays", lambda *_: request.param)
    return request.param


def cuda_llm(method="lsh:4:12"):
    here = loaded("llama", dtype=torch.bfloat16)
    model = LoadedModel(here.model.cuda(), here.tokenizer, "llama", here.path)
    return LLM(model, method=method, window=HYBRID)


@pytest.mark.parametrize("method", ["lsh:4:12", "scan:2:10%", "full"])
def test_a_thousand_steps_leave_nothing_behind(halved, method):
    llm = cuda_llm(method)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    held = []
    for _ in range(20):
        llm.generate([[5, 6, 7] * 30, [9] * 50, [11, 12] * 1000], params)
        gc.collect()
        torch.cuda.synchronize()
        pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        held.append((torch.cuda.memory_allocated(), pinned, resident()))
    for first, last, more in zip(held[7], held[-1], (1e6, 1e6, 16e6), strict=True):
        assert last <= first + more


@pytest.mark.parametrize("calls", [30, 31])
def test_an_interrupt_in_the_middle_of_a_step(halved, monkeypatch, calls):
    """Of either half."""
    llm = cuda_llm()
    serve, left = tray._native.serve, [calls]

    def interrupted(*arguments):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return serve(*arguments)

    params = SamplingParams(max_tokens=30, ignore_eos=True)
    expected = cuda_llm().generate([[5, 6, 7] * 30, [9] * 50], params)
    with monkeypatch.context() as patched:
        patched.setattr(tray._native, "serve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6, 7] * 30, [9] * 50], params)
    again = llm.generate([[5, 6, 7] * 30, [9] * 50], params)
    assert [g.text for g in again] == [g.text for g in expected]


@pytest.mark.parametrize("place", ["prepare", "serve"])
def test_a_step_that_fails_lets_go_of_its_sequences(halved, monkeypatch, place):
    """Before its graphs run, or while they do."""
    llm = cuda_llm("scan:2:10%")
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    llm.generate([[5, 6, 7] * 30, [9] * 50], params)  # steps are recorded
    from magicpig.engine.recorded import SeatedAttention  # which needs Triton

    where, name = (tray._native, "serve") if place == "serve" else (SeatedAttention, "prepare")
    real, left = getattr(where, name), [30]

    def failing(*arguments):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("out of luck")
        return real(*arguments)

    requests = [llm.engine.add(ids, params) for ids in ([5, 6, 7] * 30, [9] * 50)]
    monkeypatch.setattr(where, name, failing)
    errors = [event.error for event in llm.run(requests) if event.error]
    assert [str(error) for error in errors] == ["out of luck"] * 2
    del requests
    gc.collect()
    kinds = SequenceKV, HybridLayer, Seats
    assert not [x for x in gc.get_objects() if type(x) in kinds]


def test_a_step_that_has_no_memory_for_graphs_goes_without(halved, monkeypatch):
    from magicpig.engine.recorded import SeatedAttention  # which needs Triton

    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = [[5, 6, 7] * 30, [9] * 50]
    expected = [g.completions[0].token_ids for g in cuda_llm("lsh:4:12").generate(prompts, params)]
    llm = cuda_llm("lsh:4:12")
    real, left = SeatedAttention.prepare, [30]

    def failing(*arguments):
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        real(*arguments)

    monkeypatch.setattr(SeatedAttention, "prepare", failing)
    assert [g.completions[0].token_ids for g in llm.generate(prompts, params)] == expected
    assert left[0] <= 0
    llm.generate(prompts, SamplingParams(max_tokens=250, ignore_eos=True))
    assert any(each._kept for each in llm.engine.runner.graphs)  # they come again


def test_a_callers_stream_is_kept_to():
    """Prompts are made far by threads, in the order of the caller's stream."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompts = [[i * k % 200 + 3 for i in range(300)] for k in (3, 5)]
    expected = [g.completions[0].token_ids for g in cuda_llm("lsh:4:12").generate(prompts, params)]
    with torch.cuda.stream(torch.cuda.Stream()):
        found = [g.completions[0].token_ids for g in cuda_llm("lsh:4:12").generate(prompts, params)]
    torch.cuda.synchronize()
    assert found == expected


def test_streams_differ_from_those_that_work_goes_beside():
    device = torch.device("cuda", 0)
    taken = courier._beside(device).cuda_stream, courier.courier(device).stream_number
    assert not any(courier.own_stream(device).cuda_stream in taken for _ in range(100))


def test_copies_that_are_interrupted_keep_their_memory():
    """Until they are done: what is asked of the GPU next may have it."""
    one = courier.Courier(torch.device("cuda", 0))
    here = one.host_memory((1 << 20,), torch.float32).fill_(1)
    there = [torch.zeros(1 << 20, device="cuda")]

    def copies():
        torch.cuda._sleep(10**8)
        yield here, there.pop()
        raise KeyboardInterrupt

    torch.cuda.synchronize()
    with pytest.raises(KeyboardInterrupt):
        one.send(copies())
    gc.collect()
    following = torch.full((1 << 20,), 7.0, device="cuda")
    torch.cuda.synchronize()
    assert (following == 7).all()


def test_keys_are_hashed_between_the_steps_of_others(halved, monkeypatch):
    """By threads that ask the GPU for memory, which others have to wait for in recorded steps."""
    monkeypatch.setattr(segments, "LEAST_EARLY", 64)
    monkeypatch.setattr(segments, "LONGEST", 256)
    monkeypatch.setattr(places, "free", SimpleQueue())  # none is hashed ahead
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    prompts = [[i * k % 200 + 3 for i in range(n)] for k, n in ((3, 90), (5, 120), (7, 3000))]
    found = []
    for recorded in (False, True):
        runner = (llm := cuda_llm("lsh:4:12")).engine.runner
        runner.part_tokens = 50
        if not recorded:
            runner.graphs = []
        found.append([g.completions[0].token_ids for g in llm.generate(prompts, params)])
    assert found[0] == found[1]


def test_the_limit_of_a_gpus_memory_is_kept():
    here = loaded("llama", dtype=torch.bfloat16)
    model = LoadedModel(here.model.cuda(), here.tokenizer, "llama", here.path)
    try:
        llm = LLM(model, method="scan", window=HYBRID, gpu_memory="2GB")
        assert 0 < llm.largest_batch(1000, 100) < 10**6
        tight = LLM(
            LoadedModel(loaded("llama").model.cuda(), here.tokenizer, "llama", here.path),
            method="full",
            gpu_memory="1170MB",
        )
        with pytest.raises(MemoryError, match="of the GPU's memory"):
            tight.engine.add([5] * 4000, SamplingParams(max_tokens=10, n=60))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_pinned_memory_is_given_back_where_there_is_little(monkeypatch):
    """Of a long prompt, before a short one is read that has no room beside it."""
    monkeypatch.setattr(host_prompt, "BLOCK", 1 << 16)
    monkeypatch.setattr(host_prompt, "SMALL_BLOCK", 1 << 12)
    llm = cuda_llm("scan:2:10%")
    needs, scheduler = llm.engine.runner.needs, llm.engine.scheduler
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    pinned = {tokens: needs.reading(tokens).host for tokens in (3000, 400)}
    gc.collect()
    give_back_pinned()
    held = []
    for tokens in (3000, 400):
        assert llm.generate([[7] * tokens], params)[0].completions[0].token_ids
        torch.cuda.synchronize()
        held.append(torch.cuda.host_memory_stats()["allocated_bytes.current"])
        little = needs.of(400, 10).host + sum(pinned.values()) - 1
        scheduler.budget = Memory(little, scheduler.budget.device)
    assert held[0] >= pinned[3000] > held[1]


def test_memory_of_places_is_given_back_while_others_are_copied():
    """A prompt may have ended in an error, with copies still to come."""
    device, keys = torch.device("cuda", 0), torch.randn(2, 60_000, 16, device="cuda")
    kv = LayerKV(4, 2, 16, LSHConfig(8, 40), torch.float32)
    gc.collect()
    torch.cuda.synchronize()
    give_back_pinned()

    def held():
        return torch.cuda.host_memory_stats()["allocated_bytes.current"]

    before = held()
    for _ in range(segments.MOST_AHEAD):
        growing = device_index.GrowingSegment(kv.fork(), 60_000)
        growing.add(keys.cpu(), keys.cpu())
        growing.hash_ahead(keys)
        growing.finish_from(device)
    assert held() - before >= segments.MOST_AHEAD * 2 * 2 * 40 * 60_000
    here, there = torch.empty(1 << 20, pin_memory=True), torch.ones(1 << 20, device="cuda")
    for _ in range(2):
        torch.cuda._sleep(100_000_000)
        courier.courier(device).send([(there, here)])
    give_back_pinned()
    assert held() - before == 4 << 20
    assert places.free.qsize() == segments.MOST_AHEAD


def test_forks_of_one_prompt(halved):
    """They share far contexts, dense layers' included."""
    here = loaded("llama")
    prompt, tokens = [i * 3 % 200 + 3 for i in range(400)], []
    for device in ("cpu", "cuda"):
        model = LoadedModel(loaded("llama").model.to(device), here.tokenizer, "llama", here.path)
        llm = LLM(model, method="scan:2:100%", window=HYBRID)
        params = SamplingParams(max_tokens=30, n=4, temperature=1.0, seed=3, ignore_eos=True)
        tokens.append([c.token_ids for c in llm.generate(prompt, params)[0].completions])
    same = [a == b for x, y in zip(*tokens, strict=True) for a, b in zip(x, y, strict=True)]
    assert sum(same) > 0.8 * len(same)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("method", ["lsh:4:12", "scan:2:100%", "cpu-dense", "kv-stream", "full"])
def test_recorded_steps_give_the_same_numbers(halved, name, method):
    """Sequences of other lengths come and go; windows grow and become far."""
    prompts = [[i * k % 200 + 3 for i in range(90 * k)] for k in (1, 2, 3, 5)]
    lengths = 60, 25, 60, 40
    found = []
    for recorded in (False, True):
        here = loaded(name)
        model = LoadedModel(here.model.cuda(), here.tokenizer, name, here.path)
        llm = LLM(model, method=method, window=HYBRID)
        graphs = llm.engine.runner.graphs
        if not recorded:
            llm.engine.runner.graphs = []
        requests = [
            llm.engine.add(prompt, SamplingParams(max_tokens=n, ignore_eos=True))
            for prompt, n in zip(prompts, lengths, strict=True)
        ]
        while llm.engine.has_work:
            llm.engine.step()
        found.append([request.sequences[0].token_ids for request in requests])
        two = halved and llm.engine.runner.halves is not None
        assert [bool(each._kept) for each in graphs] == [recorded, recorded and two]
    assert found[0] == found[1]


def test_models_that_cannot_be_recorded_go_on(monkeypatch):
    llm = cuda_llm()
    embed = llm.engine.runner.model.get_input_embeddings()
    embed.register_forward_hook(lambda *_: torch.cuda.current_stream().synchronize())
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    prompts = [[5, 6, 7] * 30, [9] * 50]
    expected = cuda_llm().generate(prompts, params)
    with pytest.warns(UserWarning, match="cannot be recorded") as warned:
        got = llm.generate(prompts, params)
    assert len(warned) == 1  # and not for each half
    assert [g.text for g in got] == [g.text for g in expected]
    there = torch.cuda.memory_reserved()
    some = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    some.record_stream(torch.cuda.Stream())
    del some
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= there  # torch gives back what is freed
