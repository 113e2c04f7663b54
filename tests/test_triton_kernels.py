"""Kernels in Triton against plain torch: on a GPU, or interpreted."""

import time

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from magicpig import LSHConfig, _native, reference
from magicpig.attention.mass import attention_mass
from magicpig.attention.merge import merge
from magicpig.attention.scoring import Scoring, attend_to_all
from magicpig.kv import device_index
from magicpig.kv.device_index import hashed
from magicpig.nn.twins import ACTIVATIONS

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # infinities, interpreted
DEVICE = torch.device("cuda" if CUDA else "cpu")
DIRECTIONS = torch.bfloat16 if CUDA else torch.float32  # as it can multiply
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]


def on_device(*tensors):
    return [tensor.to(DEVICE) for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("span", [None, 64])
@pytest.mark.parametrize(
    ("heads", "lengths"),
    [((6, 2, 16), [5, 70]), ((4, 4, 80), [150]), ((9, 3, 64), [0, 1, 130]), ((32, 1, 24), [64])],
)
def test_a_step_over_windows(heads, lengths, span, softcap, dtype):
    from magicpig.attention.window_on_gpu import step

    torch.manual_seed(0)
    num_heads, kv_heads, dim = heads
    batch, capacity = len(lengths), 160
    queries = torch.randn(batch, num_heads, dim).to(dtype)
    keys, values = torch.randn(2, batch, kv_heads, capacity, dim).to(dtype)
    new_keys, new_values = torch.randn(2, batch, kv_heads, dim).to(dtype)
    there = on_device(queries, new_keys, new_values, keys, values)
    near = torch.empty_like(there[0], dtype=torch.float32), torch.empty(batch, num_heads).to(DEVICE)
    lengths_there = torch.tensor(lengths, dtype=torch.int32).to(DEVICE)
    addresses = [tensor.data_ptr() for tensor in (there[3], there[4], lengths_there)]
    place = torch.tensor([*addresses, capacity], device=DEVICE)
    step(*there[:3], place, 0.3, softcap, span, near)
    for i, length in enumerate(lengths):
        keys[i, :, length], values[i, :, length] = new_keys[i], new_values[i]
    assert torch.equal(there[3].cpu(), keys)
    assert torch.equal(there[4].cpu(), values)
    seen = torch.tensor(lengths)[:, None] + 1
    hidden = torch.arange(capacity) >= seen
    if span:
        hidden |= torch.arange(capacity) < seen - span
    expected = attend_to_all(queries.float(), keys, values, Scoring(0.3, softcap), hidden[:, None])
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for got, wanted in zip(near, expected, strict=True):
        torch.testing.assert_close(got.cpu(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 32, 128), (3, 9, 64), (2, 4, 80), (2, 3, 24)])
def test_what_goes_to_the_cpu_and_comes_back(sizes, dtype):
    from magicpig.attention import exchange_on_gpu

    torch.manual_seed(0)
    batch, heads, dim = sizes
    queries = torch.randn(sizes).to(dtype)
    queries[0, 1, 2], queries[-1, 0, 0] = torch.nan, 1e19
    there = queries.to(DEVICE)
    fine = torch.ones(batch, heads, dtype=torch.bool)
    fine[0, 1] = fine[-1, 0] = False
    asked = torch.full(sizes, 7.0, dtype=dtype, pin_memory=CUDA)
    exchange_on_gpu.ask(there, asked)
    lsh = LSHConfig(5, 30)
    exact = reference.projection(lsh, dim)
    directions = exact.to(DEVICE, DIRECTIONS)
    words = torch.full((10, batch * heads), 7, dtype=torch.int16, pin_memory=CUDA)
    flat = there.flatten(0, 1)
    exchange_on_gpu.hash_signs(flat, exchange_on_gpu.padded(directions), 150, words)
    near = [torch.randn(sizes).to(DEVICE), torch.randn(batch, heads).to(DEVICE)]
    far = torch.randn(sizes), torch.randn(batch, heads)
    far[1][0, 0] = -torch.inf
    if CUDA:
        far = far[0].pin_memory(), far[1].pin_memory()
    lengths = torch.tensor([5] * batch, dtype=torch.int32).to(DEVICE)
    place = torch.tensor([0, 0, lengths.data_ptr(), 0], device=DEVICE)
    out = exchange_on_gpu.answer(there, near, far, place).cpu()
    assert lengths.tolist() == [6] * batch
    alone = exchange_on_gpu.answer(there, near, None).cpu()
    assert torch.equal(asked, torch.where(fine[..., None], queries, 0.0))
    expected = hashed(torch.where(fine[..., None], queries, 0.0).flatten(0, 1), exact, 150)
    differing = (words[:, fine.flatten()] ^ expected[:, fine.flatten()]).int() & 0xFFFF
    flipped = sum(bin(word).count("1") for word in differing.flatten().tolist())
    assert flipped <= 0.002 * fine.sum() * 150  # where a projection is all but zero
    wanted, _ = merge(*(part.cpu() for part in near), *far)
    torch.testing.assert_close(out[fine].float(), wanted[fine], atol=1e-2, rtol=1e-2)
    assert out[~fine].isnan().all()
    torch.testing.assert_close(alone[fine].float(), near[0].cpu()[fine], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("dim", "dtype", "tokens"),
    [
        (64, torch.bfloat16, 300),
        (128, torch.bfloat16, 64),
        (80, torch.float32, 129),
        (256, torch.float16, 33),
        (16, torch.bfloat16, 1),
    ],
)
def test_keys_hashed_for_tables(dim, dtype, tokens):
    from magicpig.attention.exchange_on_gpu import padded
    from magicpig.kv.hash_on_gpu import hash_keys

    torch.manual_seed(0)
    lsh = LSHConfig(5, 21)
    keys = torch.randn(tokens, 3, dim) + torch.linspace(-2, 2, dim)
    keys[:, 1] = keys[:1, 1]  # all of them at the mean
    keys = keys.to(dtype).transpose(0, 1)
    if tokens > 100:
        keys[0, 7, 3] = torch.nan  # which the native core refuses
    directions = reference.projection(lsh, dim).to(DEVICE, DIRECTIONS)
    mine = hash_keys(keys.to(DEVICE), padded(directions), 105)
    means, inv_norms, signs = (found.cpu() for found in mine)
    expected = device_index.hash_keys(keys, lsh)
    heads = [1, 2] if tokens > 100 else [0, 1, 2]
    torch.testing.assert_close(means[heads], expected[0][heads], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(inv_norms, expected[1], atol=1e-6, rtol=1e-5)
    assert not inv_norms[1].any()
    differing = ((signs ^ expected[2])[heads].int() & 0xFFFF).flatten().tolist()
    flipped = sum(bin(word).count("1") for word in differing)
    assert flipped <= 0.002 * 3 * tokens * 105  # where a projection is all but zero


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(
    ("bits", "tables", "tokens"),
    [(10, 5, 2048), (5, 13, 1000), (11, 3, 257), (1, 9, 33), (12, 2, 1), (7, 4, 256)],
)
def test_keys_sorted_into_tables(bits, tables, tokens, alike, monkeypatch):
    from magicpig.kv.tables_on_gpu import sort

    monkeypatch.setattr(device_index, "PART", 100)  # of them, so that there are some
    torch.manual_seed(0)
    signs = torch.randint(-(2**15), 2**15, (2, -(-bits * tables // 16), tokens)).short()
    if alike:  # most keys share their buckets, in runs
        signs[:, :, : 2 * tokens // 3] = signs[:, :, :1]
        signs[:, :, ::5] = signs[:, :, -1:].clone()
    expected = reference.sorted_into_tables(signs, tables, bits)
    for mine, theirs in zip(sort(signs.to(DEVICE), tables, bits), expected, strict=True):
        assert torch.equal(mine.cpu(), theirs.to(mine.dtype))


@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU: interpreted it takes minutes")
@pytest.mark.parametrize("tokens", [65_536, 32_700, 5000])
def test_many_long_tables(tokens):
    """As many as warps, and more, work side by side: again and again the same."""
    from magicpig.kv.tables_on_gpu import sort

    torch.manual_seed(tokens)
    signs = torch.randint(-(2**15), 2**15, (8, 94, tokens)).short()
    signs[:, ::3, 100:4000] = signs[:, ::3, 99:100]
    expected = reference.sorted_into_tables(signs, 150, 10)
    there = signs.to(DEVICE)
    for _ in range(5):
        for mine, theirs in zip(sort(there, 150, 10), expected, strict=True):
            assert torch.equal(mine.cpu(), theirs.to(mine.dtype))


def test_each_waits_for_the_other():
    from magicpig.attention import exchange_on_gpu

    ticket = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    arrived, answered = torch.zeros(2, 1, dtype=torch.int64, pin_memory=CUDA)
    stamps = torch.zeros(3, dtype=torch.int64, device=DEVICE) if CUDA else None
    for number in (1, 2**40):
        ticket.fill_(number - 1)
        answered.fill_(number - 1 if CUDA else number)
        exchange_on_gpu.send(ticket, arrived, None if stamps is None else stamps[:1])
        exchange_on_gpu.await_answer(ticket, answered, None if stamps is None else stamps[1:])
        if CUDA:
            time.sleep(0.05)
            assert not torch.cuda.current_stream().query()
            _native.tell(answered.numpy(), number)
            torch.cuda.synchronize()
            sent, began, ended = stamps.tolist()
            assert sent <= began <= ended - 0.04e9 < sent + 10e9
        assert ticket.item() == arrived.item() == number


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    "sizes", [(2, 6, 2, 9, 13, 16), (1, 6, 2, 100, 300, 24), (1, 4, 4, 130, 131, 80)]
)
def test_what_tokens_get_of_attention(sizes, softcap):
    from magicpig.attention.mass_on_gpu import causal_mass

    torch.manual_seed(0)
    batch, heads, kv_heads, num_queries, tokens, dim = sizes
    queries = torch.randn(batch, heads, num_queries, dim)
    keys = torch.randn(batch, kv_heads, tokens, dim)
    expected = attention_mass(queries, keys, None, 0.3, softcap)
    got = causal_mass(*on_device(queries, keys), 0.3, softcap).cpu()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    ("heads", "lengths"),
    [((6, 2, 16), [5, 700, 0]), ((4, 4, 80), [150]), ((9, 3, 64), [333, 1]), ((32, 8, 128), [300])],
)
def test_a_step_over_whole_contexts(heads, lengths, softcap, dtype):
    from magicpig.attention import whole_on_gpu

    torch.manual_seed(0)
    num_heads, kv_heads, dim = heads
    queries = torch.randn(len(lengths), num_heads, dim).to(dtype)
    tensors = [torch.randn(1, kv_heads, n, dim).to(dtype) for n in lengths for _ in range(2)]
    there = on_device(*tensors)
    rows = [(*(x.data_ptr() for x in there[2 * i : 2 * i + 2]), n) for i, n in enumerate(lengths)]
    contexts = torch.tensor(rows, device=DEVICE)
    out, lse = whole_on_gpu.attend(*on_device(queries), contexts, kv_heads, dtype, 0.3, softcap)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for i in range(len(lengths)):
        keys, values = tensors[2 * i : 2 * i + 2]
        one = queries[i : i + 1].float()
        if not lengths[i]:
            assert torch.equal(out[i].cpu(), torch.zeros(num_heads, dim))
            assert (lse[i] == -torch.inf).all()
            continue
        expected = attend_to_all(one, keys, values, Scoring(0.3, softcap), None)
        torch.testing.assert_close(out[i].cpu(), expected[0][0], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[i].cpu(), expected[1][0], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 100)])
def test_what_lies_between_products(shape, dtype):
    from magicpig.nn import on_gpu

    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    unit = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    for one_plus, scale in ((False, weight.float()), (True, 1 + weight.float())):
        got = on_gpu.rms_norm(*on_device(x, weight), 1e-3, one_plus).cpu().float()
        torch.testing.assert_close(got, unit * scale, atol=tolerance, rtol=tolerance)
    both = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)
    gate, up = both.float().chunk(2, -1)
    for name, activation in ACTIVATIONS.items():
        got = on_gpu.gate(*on_device(both), name).cpu().float()
        torch.testing.assert_close(got, activation(gate) * up, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 24, 128])
def test_rotary_embeddings(dim, dtype):
    from magicpig.nn import on_gpu

    torch.manual_seed(0)
    x = torch.randn(3, 5, 6, dim).to(dtype)
    q, k = x[:, :, :4].transpose(1, 2), x[:, :, 4:].transpose(1, 2)
    cos, sin = torch.randn(2, 3, 5, dim).to(dtype)
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    got = on_gpu.rotary(*on_device(q, k, cos, sin))
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine.cpu(), theirs)
        assert mine.shape == theirs.shape
