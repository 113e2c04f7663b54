"""Prompts that are kept in host memory while they are read: here in the code that GPUs run."""

import copy

import pytest
import torch
from zoo import loaded

from magicpig import LLM, SamplingParams, WindowConfig
from magicpig.kv import host_prompt
from magicpig.kv.courier import Courier
from magicpig.kv.host_prompt import HostPrompt
from magicpig.kv.prompt import Prompt

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch):
    """Of eight tokens of the models here."""
    monkeypatch.setattr(host_prompt, "SMALL_BLOCK", 1024)


@pytest.mark.parametrize("expected", [0, 10, 100])
@pytest.mark.parametrize("block", [50, 96, 1000, 1 << 20])  # bytes; a token takes 96
def test_it_holds_what_a_prompt_holds(monkeypatch, expected, block):
    monkeypatch.setattr(host_prompt, "SMALL_BLOCK", block)
    plain, on_host = Prompt(), HostPrompt(expected)
    for tokens in (7, 1, 20, 3):
        keys, values = torch.randn(2, 1, 3, tokens, 8)
        for prompt in (plain, on_host):
            prompt.append(keys, values)
        for mine, theirs in zip(on_host.tensors, plain.tensors, strict=True):
            assert torch.equal(mine, theirs)
        if tokens != 20:
            on_host.release()
        on_host.fetch(on_host.num_tokens + 5)
        for first in (2, on_host.num_tokens):
            rows = on_host.row(0, first, None), plain.row(0, first, None)
            for mine, theirs in zip(*rows, strict=True):
                assert torch.equal(mine, theirs)
                assert mine.transpose(0, 1).is_contiguous()
            for mine, theirs in zip(on_host.there(0, first), plain.row(0, 0, None), strict=True):
                assert torch.equal(mine, theirs[:, :first])
    assert on_host.like.shape == plain.like.shape == (1, 3, 0, 8)
    shown = torch.rand(31) < 0.5
    for mine, theirs in zip(on_host.row(0, 3, shown), plain.row(0, 3, shown), strict=True):
        assert torch.equal(mine, theirs)
    other, before = copy.deepcopy(on_host), [x.clone() for x in on_host.tensors]
    other.append(*torch.randn(2, 1, 3, 9, 8))
    on_host.append(keys, values)
    for mine, theirs, new in zip(on_host.tensors, before, (keys, values), strict=True):
        assert torch.equal(mine, torch.cat([theirs, new], 2))
    there = other.on_device()
    assert there.num_tokens == other.num_tokens == 40
    for mine, theirs in zip(there.tensors, other.tensors, strict=True):
        assert torch.equal(mine, theirs)


def test_memory_comes_when_it_is_needed(monkeypatch):
    """In blocks that prompts of any length can have, and small ones for short prompts."""
    sizes = []
    take = Courier.host_memory

    def counted(self, shape, dtype):
        taken = take(self, shape, dtype)
        sizes.append(taken.nbytes)
        return taken

    monkeypatch.setattr(Courier, "host_memory", counted)
    monkeypatch.setattr(host_prompt, "BLOCK", 8192)
    for expected, block, most in ((10_000, 8192, 4), (20, 1024, 32)):
        prompt, taken = HostPrompt(expected), []
        for tokens in (40, 80, 40):
            prompt.append(*torch.randn(2, 1, 3, tokens, 8))
            taken.append(len(sizes))
        assert set(sizes) == {block // 96 * 96}
        assert taken[0] < taken[1] <= taken[2] == most
        assert sum(sizes) // 2 < prompt.num_tokens * 96 + block
        sizes.clear()


def llm_for(name, method, on_host, part_tokens=16):
    llm = LLM(loaded(name), method=method, window=WindowConfig(4, 8, 16))
    llm.engine.runner.prompts_on_host = on_host
    llm.engine.runner.part_tokens = part_tokens
    return llm


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("method", ["lsh:4:12", "scan:2:20%", "cpu-dense", "kv-stream", "topk:10%"])
def test_models_read_the_same(name, method):
    prompt = [i * 7 % 200 + 3 for i in range(150)]
    plain, on_host = (
        llm_for(name, method, there).generate(prompt, PARAMS)[0] for there in (False, True)
    )
    assert on_host.completions[0].token_ids == plain.completions[0].token_ids


def test_a_text_that_was_read_goes_on():
    texts = []
    for there in (False, True):
        llm = llm_for("llama", "scan:2:20%", there)
        prompt = [i * 5 % 200 + 3 for i in range(120)]
        known = llm.read(prompt)
        more = prompt + [9, 8, 7, 6] * 10
        texts.append(llm.generate_from(more, PARAMS, known).completions[0].token_ids)
    assert texts[0] == texts[1]


def test_one_layer_at_a_time_is_on_the_device(monkeypatch):
    """And the next one, which is on its way; between parts of a prompt the first."""
    most, fetched = [], []
    append, fetch = HostPrompt.append, HostPrompt.fetch

    def noted(self, room):
        if self._on_device is None:
            fetched.append(self)
        fetch(self, room)

    def counted(self, keys, values):
        append(self, keys, values)
        layers = [layer for layer in prefill.cache.layers if isinstance(layer.prompt, HostPrompt)]
        most.append(sum(layer.prompt._on_device is not None for layer in layers))

    monkeypatch.setattr(HostPrompt, "append", counted)
    monkeypatch.setattr(HostPrompt, "fetch", noted)
    runner = llm_for("llama", "lsh:4:12", True).engine.runner
    prefill = runner.begin(list(range(3, 120)))
    while prefill.done < 117:
        runner.prefill(prefill)
        first, *others = [layer.prompt for layer in prefill.cache.layers if layer.on_host]
        assert (first._on_device is not None) is (prefill.done < 117)
        assert all(prompt._on_device is None for prompt in others)
        parts = len(most) // (len(others) + 1)
        assert fetched.count(first) == parts + (prefill.done < 117)  # once for each
    assert max(most) <= 2
    assert len(most) > 4
