"""Models on a GPU: the same numbers, with keys and values in CPU memory."""

import pytest
import torch
from test_hf import EVERYTHING, LENGTHS, SMALL, assert_same, padded_prompts, run
from transformers import DynamicCache
from zoo import loaded, make_model

from magicpig import LLM, LayerKV, LSHConfig, SamplingParams, hf
from magicpig.attention.exact import exact_attention
from magicpig.attention.in_torch import attention_in_torch
from magicpig.attention.mass import attention_mass
from magicpig.evals.harness import Harness
from magicpig.kv import device_index
from magicpig.kv.device_index import append_from
from magicpig.models import LoadedModel
from magicpig.nn import FusedMLP, Joint, RMSNorm, pack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("method", ["full", "lsh", "scan:2:100%"])
@pytest.mark.parametrize("lengths", [LENGTHS, [70]])  # prompts of one are kept in host memory
def test_the_drop_in_gives_transformers_numbers(name, method, lengths):
    model = make_model(name).cuda()
    ids, mask = (tensor.cuda() for tensor in padded_prompts(lengths))
    theirs, _ = run(model, ids, mask)
    with hf.enable(model, method, lsh=EVERYTHING, window=SMALL, dense_layers=[]):
        ours, _ = run(model, ids, mask)
    assert_same(ours, theirs, mask, 2e-3)  # GPUs sum in another order


@pytest.mark.parametrize("how", [{}, {"prefill_chunk_size": 16}, {"num_beams": 3}], ids=str)
def test_the_drop_in_generates(how):
    model = make_model("llama").cuda()
    ids = torch.tensor([[5, 6, 7, 8] * 25]).cuda()
    arguments = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, **how}
    expected = model.generate(ids, **arguments)
    with hf.enable(model, "scan:2:100%", window=SMALL, dense_layers=[]):
        got = model.generate(ids, **arguments)
    assert (got == expected).float().mean() > 0.9  # where two are nearly as likely


def test_the_drop_in_keeps_no_prompts_on_the_gpu():
    model = make_model("llama", torch.bfloat16).cuda()
    config, tokens = model.config, 20_000
    ids = torch.randint(3, 200, (1, tokens)).cuda()
    with hf.enable(model, "scan:2:1%", dense_layers=[]), torch.no_grad():
        model(ids[:, :100])  # cuBLAS takes its work space
        held = torch.cuda.memory_allocated()
        cache = DynamicCache(config=config)
        model(ids, past_key_values=cache, logits_to_keep=1)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() < held + 1e6
        for _ in range(3):
            logits = model(ids[:, :1], past_key_values=cache, logits_to_keep=1).logits
    assert logits.isfinite().all()
    row = cache.layers[0].rows[0]
    assert row.far.num_tokens > 19_000
    assert 0.005 < row.cost.rows / row.cost.tokens < 0.02


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("method", ["full", "lsh"])
def test_the_drop_in_on_a_gpu_that_is_not_the_current_one(method):
    model = make_model("llama").to("cuda:1")
    ids, mask = (tensor.to("cuda:1") for tensor in padded_prompts())
    theirs, _ = run(model, ids, mask)
    with hf.enable(model, method, lsh=EVERYTHING, window=SMALL, dense_layers=[]):
        ours, _ = run(model, ids, mask)
    assert_same(ours, theirs, mask, 2e-3)


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
        for kv in harness.read([i * 7 % 200 + 3 for i in range(tokens)], 20).kvs
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
            kvs = harness.read([i * 7 % 200 + 3 for i in range(150)], 20).kvs
            outs.append(harness.step(kvs, [5]).cpu())
        assert torch.allclose(*outs, atol=2e-2), method


def test_an_index_made_on_the_gpu_draws_the_same():
    torch.manual_seed(0)
    keys = (torch.randn(2, 1, 64) + torch.randn(2, 20000, 64)).bfloat16()
    values = torch.randn(2, 20000, 64).bfloat16()
    here, there = (LayerKV(6, 2, 64, LSHConfig()) for _ in range(2))
    here.append(keys, values)
    append_from(torch.device("cuda"), there, keys.cuda(), values.cuda())
    assert len(device_index.found_of(keys.cuda(), LSHConfig())) == 4  # tables, not signs
    query = torch.randn(6, 64)
    for ours, theirs in zip(here.sample(query)[0], there.sample(query)[0], strict=True):
        differing = set(ours.tolist()) ^ set(theirs.tolist())
        assert len(differing) <= max(1, 0.01 * len(ours))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("span", [None, 30])
@pytest.mark.parametrize("seen", [0, 50])
def test_attention_of_prompts_is_the_cpus(dtype, span, seen):
    torch.manual_seed(0)
    queries = torch.randn(1, 6, 70, 32).to(dtype)
    keys, values = torch.randn(2, 1, 2, 70 + seen, 32).to(dtype)
    expected = attention_in_torch(
        *(x.float() for x in (queries, keys, values)), None, 0.2, None, span
    )
    there = [x.cuda() for x in (queries, keys, values)]
    found = attention_in_torch(*there, None, 0.2, None, span).cpu().float()
    assert (found - expected).norm() < 0.02 * expected.norm()
    mask = torch.rand(1, 1, 70, 70 + seen) < 0.5
    mask[..., 0] = True
    expected = attention_in_torch(*(x.float() for x in (queries, keys, values)), mask, 0.2)
    found = attention_in_torch(*there, mask.cuda(), 0.2).cpu().float()
    assert (found - expected).norm() < 0.02 * expected.norm()


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
