"""magicpig.LLM: what a caller asks for is what a caller gets."""

import pytest
import torch
from zoo import loaded

from magicpig import LLM, LSHConfig, SamplingParams
from magicpig.engine.sequence import Finish

FREE = {"temperature": 1.0, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm():
    return LLM(loaded("llama"), method="full")


def test_texts_tokens_and_lists(llm):
    text = "Once upon a time"
    ids = llm.encode(text)
    params = SamplingParams(max_tokens=9)
    one = llm.generate(text, params)
    assert [g.text for g in llm.generate([text, ids], params)] == [one[0].text] * 2
    assert llm.generate(ids, params)[0].prompt_tokens == len(ids)
    assert "".join(llm.stream(text, params)) == one[0].text
    assert llm.generate([], params) == []


def test_stops(llm):
    free = llm.generate("abc", SamplingParams(max_tokens=60, **FREE))[0].completions[0]
    assert free.finish == Finish.LENGTH
    assert len(free.token_ids) == 60
    middle = free.text[20:23]
    stopped = llm.generate("abc", SamplingParams(max_tokens=60, stop=[middle], **FREE))[0]
    assert stopped.completions[0].finish == Finish.STOP
    assert stopped.text == free.text[: free.text.index(middle)]
    token = free.token_ids[30]
    by_token = llm.generate("abc", SamplingParams(max_tokens=60, stop_token_ids=[token], **FREE))[0]
    ended = by_token.completions[0]
    assert ended.finish == Finish.STOP
    assert ended.token_ids == free.token_ids[: free.token_ids.index(token) + 1]


def test_the_models_own_end_is_kept_out_of_the_text():
    model = loaded("llama")
    plain = LLM(model, method="full")
    tokens = plain.generate("xyz", SamplingParams(max_tokens=20))[0].completions[0].token_ids
    plain.engine.end_token_ids = frozenset([tokens[5]])
    ended = plain.generate("xyz", SamplingParams(max_tokens=20))[0].completions[0]
    first = tokens.index(tokens[5])
    assert ended.finish == Finish.STOP
    assert ended.token_ids == tokens[: first + 1]
    assert ended.text == plain.tokenizer.decode(tokens[:first])
    on = plain.generate("xyz", SamplingParams(max_tokens=20, ignore_eos=True))[0].completions[0]
    assert on.token_ids == tokens


def test_logprobs_are_the_models(llm):
    params = SamplingParams(max_tokens=5, logprobs=3, temperature=0.7, seed=1, ignore_eos=True)
    completion = llm.generate("abc", params)[0].completions[0]
    ids = torch.tensor([llm.encode("abc") + completion.token_ids])
    model = loaded("llama").model
    with torch.no_grad():
        truth = model(ids).logits[0].log_softmax(-1)
    for i, choice in enumerate(completion.choices):
        row = truth[len(llm.encode("abc")) - 1 + i]
        assert choice.logprob == pytest.approx(row[choice.token].item(), abs=1e-3)
        assert [token for token, _ in choice.top] == row.topk(3).indices.tolist()


def test_seeds_and_n(llm):
    params = SamplingParams(max_tokens=12, n=4, **FREE)
    first, again = (llm.generate("abc", params)[0] for _ in range(2))
    texts = [c.token_ids for c in first.completions]
    assert texts == [c.token_ids for c in again.completions]
    assert len({tuple(tokens) for tokens in texts}) == 4
    single = llm.generate("abc", SamplingParams(max_tokens=12, **FREE))[0]
    assert single.completions[0].token_ids == texts[0]
    fresh = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    one, two = (llm.generate("abc", fresh)[0].completions[0].token_ids for _ in range(2))
    assert one != two


def test_chats(llm, monkeypatch):
    messages = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(max_tokens=6)
    assert llm.chat(messages, params).text == llm.generate("user: Hi\n", params)[0].text
    with pytest.raises(ValueError, match="messages is empty"):
        llm.chat([])
    with pytest.raises(ValueError, match="a message has a role and a content, not"):
        llm.chat([{"rol": "user", "content": "Hi"}])
    for bad in ({"role": "user", "content": "Hi"}, "Hi"):
        with pytest.raises(TypeError, match="messages must be a list of messages, not "):
            llm.chat(bad)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    with monkeypatch.context() as changed:
        changed.setattr(llm.tokenizer, "chat_template", "{{ messages[0].content[0].text }}")
        assert llm.encode_chat(parts) == llm.encode("Hi")
        changed.setattr(llm.tokenizer, "chat_template", "{{ 'a' + messages[0].content }}")
        with pytest.raises(ValueError, match="chat template of 'llama' cannot take these messages"):
            llm.chat(parts)
    for bad in ("Hi", [1.5, 2], None, {"a": 1}):
        for ask in (llm.read, lambda ids: llm.generate_from(ids, SamplingParams())):
            with pytest.raises(TypeError, match="prompt_ids must be a list of token ids, not "):
                ask(bad)
    assert llm.read(torch.tensor([3, 4, 5])).num_tokens == 3
    with pytest.raises(TypeError, match="known must be what read gives, or a Context's kv, not 5"):
        llm.generate_from([3, 4], SamplingParams(), 5)
    for bad in (None, [None], [1.5], {"a": 1}, {"a"}, b"Hi", [b"Hi"], ["Hi", 3]):
        with pytest.raises(TypeError, match="a prompt is a text or a list of token ids, not "):
            llm.generate(bad)
    with pytest.raises(TypeError, match="params must be SamplingParams, not"):
        llm.generate("Hi", {"max_tokens": 2})
    with pytest.raises(ValueError, match=r"the text cannot be UTF-8: character 1 is '\\ud800'"):
        llm.generate("a\ud800")
    assert not llm.engine.has_work
    plain = LLM(loaded("llama"))
    plain.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        plain.chat(messages)


def test_a_bad_prompt_among_others_leaves_nothing_behind(llm):
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.generate(["fine", ""])
    assert not llm.engine.has_work
    assert llm.generate("fine", SamplingParams(max_tokens=3))[0].new_tokens == 3


def test_bad_settings():
    for arguments, message in (
        ({"method": "none"}, "method must be one of"),
        ({"dense_layers": [-1]}, "dense_layers must be from 0 to 3"),
        ({"lsh": 7}, "lsh must be an LSHConfig"),
        ({"window": 5}, "window must be a WindowConfig or None, not 5"),
        ({"method": "lsh:8:75", "lsh": LSHConfig(9, 120)}, "leave one out"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            LLM(loaded("llama"), **arguments)
