"""What the drop-in does on GPUs, here in the code that they run: prompts in host memory, rows that
the device draws."""

import copy

import pytest
import torch
from test_hf import EVERYTHING, SMALL, assert_same, padded_prompts, run
from transformers import DynamicCache
from zoo import make_model

from magicpig import ScanConfig, hf
from magicpig.hf import cache
from magicpig.hf.cache import BatchLayer
from magicpig.kv import host_prompt
from magicpig.kv.host_prompt import HostPrompt
from magicpig.kv.hybrid_layer import HybridLayer
from magicpig.kv.prompt import Prompt


@pytest.fixture
def on_host(monkeypatch):
    """Keeps prompts in host memory, in blocks of a few tokens."""
    adopt = hf._Enabled.adopt

    def adopted(self, cache):
        self.prompts_on_host = True
        adopt(self, cache)

    monkeypatch.setattr(hf._Enabled, "adopt", adopted)
    monkeypatch.setattr(host_prompt, "SMALL_BLOCK", 1024)


def enabled(model, **more):
    return hf.enable(model, "lsh", lsh=EVERYTHING, window=SMALL, dense_layers=[], **more)


def kinds(cache):
    return {type(layer.prompt) for layer in cache.layers if isinstance(layer, BatchLayer)}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("lengths", [[70], [70, 5, 41]])
def test_prompts_of_one_are_kept_in_host_memory(on_host, name, lengths):
    model = make_model(name)
    ids, mask = padded_prompts(lengths)
    theirs, _ = run(model, ids, mask)
    with enabled(model):
        ours, _ = run(model, ids, mask)
        assert_same(ours, theirs, mask, 2e-4)
        _, unread = run(model, ids, mask, steps=0)
        assert kinds(unread) == {HostPrompt if len(lengths) == 1 else Prompt}
        layers = [layer for layer in unread.layers if isinstance(layer, BatchLayer)]
        assert all(layer.following() in layers for layer in layers if layer.on_host)


def test_padding_of_a_single_prompt(on_host):
    model = make_model("llama")
    ids, mask = padded_prompts([70, 41])
    ids, mask = ids[1:], mask[1:]
    theirs, _ = run(model, ids, mask)
    with enabled(model):
        ours, _ = run(model, ids, mask)
    assert_same(ours, theirs, mask, 2e-4)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"prefill_chunk_size": 16},
        {"prompt_lookup_num_tokens": 3},
        {"num_beams": 3},
        {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
    ],
    ids=str,
)
def test_all_ways_to_generate(on_host, how):
    model = make_model("llama")
    ids = torch.tensor([[5, 6, 7, 8] * 25])
    arguments = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, **how}
    expected = model.generate(ids, **arguments)
    with enabled(model):
        assert torch.equal(model.generate(ids, **arguments), expected)


def test_a_prompt_that_was_read_is_copied_and_repeated(on_host):
    model = make_model("llama")
    ids, mask = padded_prompts([70])
    new = torch.tensor([[9], [9]])
    with enabled(model), torch.no_grad():
        _, read = run(model, ids, mask, steps=0)
        copied, repeated = copy.deepcopy(read), copy.deepcopy(read)
        one = model(new[:1], past_key_values=copied).logits
        repeated.batch_repeat_interleave(2)
        assert kinds(repeated) == {Prompt}
        two = model(new, past_key_values=repeated).logits
        more = model(torch.tensor([[9, 8, 7]]), past_key_values=read).logits
        assert [c.get_seq_length() for c in (copied, repeated, read)] == [71, 71, 73]
    torch.testing.assert_close(two, one.expand(2, -1, -1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(more[:, :1], one, atol=2e-4, rtol=2e-4)


@pytest.fixture
def drawing(monkeypatch):
    """Devices draw rows, in Triton's interpreter where there is no GPU."""
    pytest.importorskip("triton", reason="needs Triton")
    from magicpig.kv.device_scan import LayerScan

    monkeypatch.setattr(cache, "has_triton", lambda _: True)
    drawn, draw = [], LayerScan.draw

    def noted(self, queries, scale):
        drawn.append(len(queries))
        draw(self, queries, scale)

    monkeypatch.setattr(LayerScan, "draw", noted)
    return drawn


def batch_layer(index, lengths):
    """Of rows that are there, and a copy of theirs."""
    torch.manual_seed(3)
    layer = BatchLayer(lambda shape: HybridLayer(shape, index, SMALL))
    longest = max(lengths)
    keys, values = torch.randn(2, len(lengths), 2, longest, 16)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    layer.num_heads = 4
    layer.fill(keys, values)
    layer.to_rows(keys, mask)
    return layer


def one_step(layer, batch=1):
    """Its output, and what went in."""
    queries, (keys, values) = torch.randn(batch, 4, 1, 16), torch.randn(2, batch, 2, 1, 16)
    given = layer.update(keys, values)
    layer.receive(*given)
    return layer.attend(queries, *given, None, 0.3), (queries, keys, values)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("lengths", [[200], [150, 90]])
def test_rows_are_drawn_by_the_device(drawing, lengths):
    """All of them, where the budget is all; contexts grow meanwhile."""
    layer = batch_layer(ScanConfig(2, 1.0, 4, exact_below=0), lengths)
    plain = [row.fork() for row in layer.rows]
    for _ in range(24):
        got, tensors = one_step(layer, len(lengths))
        expected = cache.step(plain, *(x.squeeze(2) for x in tensors), 0.3, None)
        torch.testing.assert_close(got[:, 0], expected, atol=1e-4, rtol=1e-4)
        for row in plain:
            row.settle()
    assert drawing == [len(lengths)] * 24
    assert [row.cost for row in layer.rows] == [row.cost for row in plain]


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_a_budget_is_kept_by_the_device(drawing):
    layer = batch_layer(ScanConfig(2, 0.1, 4, exact_below=0), [2000])
    for _ in range(4):
        one_step(layer)
    assert len(drawing) == 4
    cost = layer.rows[0].cost
    assert 0.05 < cost.rows / cost.tokens < 0.2


def test_hash_tables_are_looked_up_by_the_native_core(drawing):
    layer = batch_layer(EVERYTHING, [200])
    one_step(layer)
    assert not drawing


def test_a_copied_cache_has_tables_of_its_own(drawing):
    layer = batch_layer(ScanConfig(2, 0.1, 4, exact_below=0), [300])
    one_step(layer)
    other = copy.deepcopy(layer)
    assert layer.scan is not None
    assert other.scan is None


def test_a_prompt_in_a_cache_of_transformers_own_is_taken_over(on_host):
    model = make_model("llama")
    ids, _ = padded_prompts([50])
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=past)
        expected = model(ids[:, :7], past_key_values=copy.deepcopy(past)).logits
        with enabled(model):
            got = model(ids[:, :7], past_key_values=past).logits
            assert kinds(past) == {HostPrompt}
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)
