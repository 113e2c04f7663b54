"""What the drop-in does on GPUs, here in the code that they run: prompts in host memory, rows that
the device draws."""

import copy

import pytest
import torch
from test_hf import EVERYTHING, SMALL, assert_same, padded_prompts, run
from transformers import DynamicCache
from zoo import make_model

from magicpig import ScanConfig, WindowConfig, hf
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


def enabled(model, method="lsh"):
    return hf.enable(model, method, lsh=EVERYTHING, window=SMALL, dense_layers=[])


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
        assert [layer.following() for layer in layers] == layers[1:] + layers[:1]


def test_gradients_come_back_from_a_prompt(on_host):
    model = make_model("llama")
    ids, _ = padded_prompts([70])
    weights = model.lm_head.weight, model.model.layers[0].self_attn.k_proj.weight
    model(ids).logits.square().sum().backward()
    expected = [weight.grad.clone() for weight in weights]
    model.zero_grad()
    with enabled(model):
        cache = DynamicCache(config=model.config)
        model(ids[:, :40], past_key_values=cache)
        assert kinds(cache) == {Prompt}
        model.zero_grad()
        model(ids).logits.square().sum().backward()
    for weight, theirs in zip(weights, expected, strict=True):
        assert theirs.norm() > 0
        assert (weight.grad - theirs).norm() < 1e-3 * theirs.norm()


@pytest.mark.parametrize("method", ["lsh", "cpu-dense", "kv-stream"])
def test_padding_of_a_single_prompt(on_host, method):
    model = make_model("llama")
    ids, mask = padded_prompts([70, 41])
    ids, mask = ids[1:], mask[1:]
    theirs, _ = run(model, ids, mask)
    with enabled(model, method):
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


MODES = [torch.inference_mode, torch.no_grad, torch.enable_grad]


@pytest.mark.parametrize("then", MODES)
@pytest.mark.parametrize(
    ("first", "copied"), [*((mode, False) for mode in MODES), *((mode, True) for mode in MODES[:2])]
)
def test_prompts_go_on_in_any_mode(on_host, first, then, copied):
    model = make_model("llama")
    ids = torch.randint(3, 200, (1, 60))
    with torch.no_grad():
        expected = model(ids).logits[:, 37:]
    with enabled(model):
        past = DynamicCache(config=model.config)
        with first():
            model(ids[:, :37], past_key_values=past)
            past = copy.deepcopy(past) if copied else past
        with then():
            got = model(ids[:, 37:], past_key_values=past).logits
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_a_batch_goes_on_from_a_prompt_of_one(on_host):
    """As it does from a prompt on the device; or it begins anew."""
    model = make_model("llama")
    ids = torch.randint(3, 200, (2, 60))
    ids[1, :40] = ids[0, :40]
    expected = model(ids).logits
    with enabled(model):
        past = DynamicCache(config=model.config)
        model(ids[:1, :40], past_key_values=past)
        got = model(ids[:, 40:], past_key_values=past).logits
        torch.testing.assert_close(got, expected[:, 40:], atol=2e-4, rtol=2e-4)
        past = DynamicCache(config=model.config)
        model(ids[:1], past_key_values=past)
        past.crop(-60)
        empty = copy.deepcopy(past)
        got = model(ids[1:], past_key_values=past).logits
        torch.testing.assert_close(got, expected[1:], atol=2e-4, rtol=2e-4)
        empty.batch_repeat_interleave(2)
        got = model(ids, past_key_values=empty).logits
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


def test_who_tries_tokens_has_the_prompt_on_the_device(on_host, monkeypatch):
    model, fetched, fetch = make_model("llama"), [], HostPrompt.fetch

    def counted(self, room):
        fetched.append(bool(self._blocks) and self._on_device is None)
        fetch(self, room)

    monkeypatch.setattr(HostPrompt, "fetch", counted)
    ids = torch.tensor([[5, 6, 7, 8] * 25])
    with enabled(model):
        model.generate(ids, prompt_lookup_num_tokens=3, max_new_tokens=30, eos_token_id=None)
    assert sum(fetched) <= 3 * len(model.model.layers)


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


WINDOW = WindowConfig(sinks=2, local=6, block=4)
CUDA = torch.cuda.is_available()
DEVICE, TOLERANCE = ("cuda", 2e-3) if CUDA else ("cpu", 1e-4)


def batch_layer(index, lengths, keys=None):
    """Rows that are there, as the drop-in has them; keys: of one."""
    torch.manual_seed(3)
    layer = BatchLayer(lambda shape: HybridLayer(shape, index, WINDOW), draws_there=True)
    longest = max(lengths)
    random, values = torch.randn(2, len(lengths), 2, longest, 16).to(DEVICE)
    keys = random if keys is None else keys.to(DEVICE)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    layer.num_heads = 4
    layer.fill(keys, values)
    layer.to_rows(keys, mask)
    return layer


def one_step(layer, batch=1, queries=None):
    """Its output, and what went in."""
    queries = (torch.randn(batch, 4, 1, 16) if queries is None else queries).to(DEVICE)
    keys, values = torch.randn(2, batch, 2, 1, 16).to(DEVICE)
    given = layer.update(keys, values)
    layer.receive(*given)
    return layer.attend(queries, *given, None, 0.3), (queries, keys, values)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("lengths", [[100], [90, 60]])
def test_rows_are_drawn_by_the_device(drawing, lengths):
    """All of them, where the budget is all; contexts grow meanwhile."""
    layer = batch_layer(ScanConfig(2, 1.0, 4, exact_below=0), lengths)
    plain = [row.fork() for row in layer.rows]
    first = [row.far.num_tokens for row in plain]
    for _ in range(14):
        got, tensors = one_step(layer, len(lengths))
        expected = cache.step(plain, *(x.squeeze(2) for x in tensors), 0.3, None)
        torch.testing.assert_close(got[:, 0], expected, atol=TOLERANCE, rtol=TOLERANCE)
        for row in plain:
            row.settle()  # as the drop-in does
        for row in (*plain, *layer.rows):
            row.settle(wait=True)
    assert drawing == [len(lengths)] * 14
    assert all(row.far.num_tokens > n + 5 for row, n in zip(layer.rows, first, strict=True))
    assert [row.cost for row in layer.rows] == [row.cost for row in plain]


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_what_the_device_draws_is_what_counts(drawing):
    """Few rows, by their codes: a few keys that are like the query are among them."""
    heavy, keys = [300, 700, 1500], torch.randn(1, 2, 2000, 16)
    queries = 3 * torch.randn(2, 16)
    keys[0, :, heavy] = 1.5 * queries[:, None]
    layer = batch_layer(ScanConfig(4, 0.05, 4, exact_below=0), [2000], keys)
    exact = batch_layer(ScanConfig(4, 1.0, 4, exact_below=0), [2000], keys)
    queries = queries.repeat_interleave(2, 0)[None, :, None]
    read = 0
    for _ in range(4):
        torch.manual_seed(5)
        got, _ = one_step(layer, queries=queries)
        drawn = int(layer.scan.scan._totals.sum())
        torch.manual_seed(5)
        expected, _ = one_step(exact, queries=queries)
        assert (got - expected).norm() < 0.02 * expected.norm()
        rows = layer.rows[0].cost.rows
        assert rows - read == drawn
        read = rows
    cost = layer.rows[0].cost
    assert 0.02 < cost.rows / cost.tokens < 0.1


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_tables_stay_while_segments_do(drawing, monkeypatch):
    """Of forks too, as beams are at every token."""
    from magicpig.kv.device_scan import DeviceScan

    filled, fill = [], DeviceScan.fill

    def counted(self, table, codes):
        filled.append(len(codes))
        return fill(self, table, codes)

    monkeypatch.setattr(DeviceScan, "fill", counted)
    layer = batch_layer(ScanConfig(2, 0.1, 4, exact_below=0), [100, 100])
    for _ in range(3):
        one_step(layer, 2)
        layer.batch_select_indices(torch.tensor([0, 0]))
    assert 1 <= len(filled) <= 2  # the second beam was another


def test_tables_that_were_not_filled_are_not_drawn_by(drawing, monkeypatch):
    """Ctrl-C in the middle: the next step fills them."""
    from magicpig.kv.device_scan import DeviceScan, LayerScan

    layer = batch_layer(ScanConfig(2, 0.1, 4, exact_below=0), [100])
    other = batch_layer(ScanConfig(2, 0.1, 4, exact_below=0), [100])
    one_step(layer)
    codes, before = ([row.codes_there for row in each.rows] for each in (layer, other))
    scan, fill = LayerScan(layer.scan.scan), DeviceScan.fill
    scan.prepare(before)
    filled = []

    def interrupted(self, table, codes):
        filled.append(codes)
        if len(filled) == 1:
            raise KeyboardInterrupt
        return fill(self, table, codes)

    monkeypatch.setattr(DeviceScan, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scan.prepare(codes)
    assert scan.drawn is None
    for again in (codes, before):
        scan.prepare(again)
        assert scan.drawn is not None
    assert filled == [codes, codes, before]


@pytest.mark.parametrize("index", [EVERYTHING, ScanConfig(2, 0.5, 4, exact_below=0)])
def test_steps_with_gradients(index):
    layer = BatchLayer(lambda shape: HybridLayer(shape, index, WINDOW))
    keys, values = torch.randn(2, 1, 2, 200, 16, device=DEVICE, requires_grad=True)
    layer.num_heads = 4
    layer.fill(keys, values)
    got, _ = one_step(layer)
    assert got.isfinite().all()
    assert layer.rows[0].far.num_tokens > 150


def test_hash_tables_are_looked_up_by_the_native_core(drawing):
    layer = batch_layer(EVERYTHING, [200])
    one_step(layer)
    assert not drawing


def test_a_copied_cache_has_tables_of_its_own(drawing):
    layer = batch_layer(ScanConfig(2, 0.1, 4, exact_below=0), [100])
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
