"""Models on a GPU: the same numbers, with keys and values in CPU memory."""

import gc

import pytest
import torch
from test_found_elsewhere import assert_same as assert_same_context
from test_hf import EVERYTHING, SMALL, assert_same, padded_prompts, run
from zoo import loaded, make_model

from magicpig import LLM, LayerKV, LSHConfig, SamplingParams, WindowConfig, hf
from magicpig.attention.exact import exact_attention
from magicpig.attention.gpu import give_back_pinned
from magicpig.attention.mass import attention_mass
from magicpig.engine.memory import Memory
from magicpig.engine.runner import Runner
from magicpig.evals.harness import Harness
from magicpig.kv import segments, tray
from magicpig.kv.device_index import append_from
from magicpig.kv.hybrid_layer import HybridLayer
from magicpig.kv.seats import Seats
from magicpig.kv.sequence import SequenceKV
from magicpig.models import LoadedModel
from magicpig.nn import FusedMLP, Joint, RMSNorm, pack

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


ALL_READ = [
    "full",
    "lsh",
    "topk:100%",
    "oracle:100%",
    "quest:4:100%",
    "h2o:100%",
    "loki:100%:100%",
    "cpu-dense",
    "kv-stream",
]
SOME_READ = ["topk:10%", "oracle:10%", "quest:4:10%", "h2o:10%", "loki:25%:10%", "streaming"]


def steps(device, methods):
    """Logits of some steps of two prompts under every method, and the rows read."""
    here = loaded("llama")
    model = LoadedModel(here.model.to(device), here.tokenizer, "llama", here.path)
    harness = Harness(model, methods, window=SMALL, dense_layers=[])
    kvs = [
        kv
        for tokens in (150, 211)
        for kv in harness.read([i * 7 % 200 + 3 for i in range(tokens)]).kvs
    ]
    for _ in range(40):
        logits = harness.step(kvs, [5] * len(kvs))
    return logits.cpu(), [kv.cost for kv in kvs]


def test_every_method_gives_the_numbers_of_the_cpu():
    torch.backends.cuda.matmul.allow_tf32 = False
    methods = [*ALL_READ, *SOME_READ]
    (here, here_costs), (there, there_costs) = (steps(d, methods) for d in ("cpu", "cuda"))
    for prompt in range(2):
        first = prompt * len(methods)
        for i in range(len(ALL_READ)):
            assert torch.allclose(there[first + i], here[first], atol=5e-3), methods[i]
    for method, cpu, gpu in zip(methods * 2, here_costs, there_costs, strict=True):
        if not method.startswith(("lsh", "oracle")):
            assert cpu == gpu, method


def test_samples_are_drawn_alike_on_both():
    """A step after the prompt, before small differences make the sequences part."""
    for method in SOME_READ:
        outs = []
        for device in ("cpu", "cuda"):
            here = loaded("llama")
            model = LoadedModel(here.model.to(device), here.tokenizer, "llama", here.path)
            harness = Harness(model, [method], window=SMALL, dense_layers=[])
            kvs = harness.read([i * 7 % 200 + 3 for i in range(150)]).kvs
            outs.append(harness.step(kvs, [5]).cpu())
        assert torch.allclose(*outs, atol=2e-2), method


def test_an_index_made_on_the_gpu_draws_the_same():
    torch.manual_seed(0)
    keys = (torch.randn(2, 1, 64) + torch.randn(2, 20000, 64)).bfloat16()
    values = torch.randn(2, 20000, 64).bfloat16()
    here, there = (LayerKV(6, 2, 64, LSHConfig()) for _ in range(2))
    here.append(keys, values)
    append_from(torch.device("cuda"), there, keys.cuda(), values.cuda())
    query = torch.randn(6, 64)
    for ours, theirs in zip(here.sample(query)[0], there.sample(query)[0], strict=True):
        differing = set(ours.tolist()) ^ set(theirs.tolist())
        assert len(differing) <= max(1, 0.01 * len(ours))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 80), (8, 2, 128)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_parts_of_prompts(dtype, heads, softcap):
    """Queries that are the last tokens of many: attention, and what each token gets of it."""
    torch.manual_seed(0)
    num_heads, kv_heads, dim = heads
    queries = torch.randn(2, num_heads, 130, dim).to(dtype)
    keys, values = (torch.randn(2, kv_heads, 333, dim).to(dtype) for _ in range(2))
    there = [x.cuda() for x in (queries, keys, values)]
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    here = exact_attention(queries, keys, values, None, dim**-0.5, softcap)
    got = exact_attention(*there, None, dim**-0.5, softcap)
    torch.testing.assert_close(got.cpu(), here, atol=tolerance, rtol=tolerance)
    here = attention_mass(queries.float(), keys.float(), None, dim**-0.5, softcap)
    got = attention_mass(*there[:2], None, dim**-0.5, softcap)
    torch.testing.assert_close(got.cpu(), here, atol=1e-2, rtol=tolerance)


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
        llm.generate([[5, 6, 7] * 30, [9] * 50], params)
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] <= held[4] + 1e6


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


def test_the_limit_of_a_gpus_memory_is_kept():
    here = loaded("llama", dtype=torch.bfloat16)
    model = LoadedModel(here.model.cuda(), here.tokenizer, "llama", here.path)
    try:
        llm = LLM(model, method="scan", window=HYBRID, gpu_memory="2GB")
        assert 0 < llm.largest_batch(1000, 100) < 10**6
        tight = LLM(
            LoadedModel(loaded("llama").model.cuda(), here.tokenizer, "llama", here.path),
            method="full",
            gpu_memory="620MB",
        )
        with pytest.raises(MemoryError, match="of the GPU's memory"):
            tight.engine.add([5] * 4000, SamplingParams(max_tokens=10, n=60))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_pinned_memory_is_given_back_where_there_is_little():
    """Of a long prompt, before a short one is read that has no room beside it."""
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
    expected = cuda_llm().generate([[5, 6, 7] * 30], params)
    with pytest.warns(UserWarning, match="cannot be recorded"):
        got = llm.generate([[5, 6, 7] * 30], params)
    assert [g.text for g in got] == [g.text for g in expected]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_fused_models_give_the_same_numbers(name):
    """In half precision norms, MLPs and rotary embeddings are kernels of ours; q, k and v are one
    product."""
    model = make_model(name).to(torch.bfloat16).cuda()
    ids = torch.randint(3, 200, (2, 40)).cuda()
    with torch.no_grad():
        expected = model(ids).logits.float()
        pack(model)
        got = model(ids).logits.float()
    kinds = {type(module) for module in model.modules()}
    assert {FusedMLP, Joint, RMSNorm} <= kinds
    assert any("forward" in vars(module) for module in model.modules())
    assert (got - expected).norm() < 0.02 * expected.norm()
