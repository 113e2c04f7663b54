"""Evaluations: a prompt read once for all methods, answers as `generate` gives them, and results
that an interrupt does not spoil."""

import json
import math
from dataclasses import replace

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from zoo import loaded, make_tokenizer

from magicpig import LLM, SamplingParams, WindowConfig
from magicpig.engine.runner import Runner
from magicpig.evals.decoding import Answer, decode
from magicpig.evals.harness import Harness
from magicpig.evals.prompts import count_tokens, prompt_of, template_tokens
from magicpig.evals.records import Records
from magicpig.evals.run import Batch, batches, run
from magicpig.evals.sample import Sample
from magicpig.evals.summary import summary

SMALL = WindowConfig(sinks=2, local=6, block=4)
SPECS = [
    "full",
    "lsh:4:20:exact_below=16",
    "topk:20%",
    "oracle:20%",
    "quest:4:20%",
    "h2o:30%",
    "loki:25%:20%",
    "streaming",
    "cpu-dense",
    "kv-stream",
]
EXACT = {"full", "cpu-dense", "kv-stream"}
NEW = 14


@pytest.fixture(scope="module")
def harness():
    return make_harness("llama", SPECS)


def make_harness(name, specs, **arguments):
    return Harness(loaded(name), specs, dense_layers=[0], window=SMALL, **arguments)


def prompt_ids(length):
    return torch.randint(3, 250, (length,)).tolist()


def answers_of(harness, kvs, logits, forced=()):
    """Greedy tokens of each method, all decoded together."""
    answers = [
        Answer(method, kv, NEW, list(forced))
        for method, kv in zip(harness.methods, kvs, strict=True)
    ]
    if not forced:
        for answer in answers:
            answer.take(int(logits.argmax()), frozenset())
    decode(harness, answers)
    return {answer.method: answer.token_ids for answer in answers}


# Harness


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("length", [1, 70, 600])
def test_one_reading_serves_every_method_as_its_own_would(name, length):
    """600 tokens are read in two parts, one token is a decode step."""
    ids = prompt_ids(length)
    harness = make_harness(name, SPECS)
    harness.end_token_ids = frozenset()
    told = []
    read = harness.read(ids, 20, told.append)
    assert told == ([300, 600] if length == 600 else [length])
    assert len(read.kvs) == len(SPECS) == len(harness.methods)
    assert {kv.num_tokens for kv in read.kvs} == {length}
    found = answers_of(harness, read.kvs, read.logits)
    for spec in SPECS if length == 70 else SPECS[3:6]:
        llm = LLM(loaded(name), method=spec, dense_layers=[0], window=SMALL)
        params = SamplingParams(max_tokens=NEW, ignore_eos=True)
        (alone,) = llm.generate([ids], params)[0].completions
        assert found[spec] == alone.token_ids
        if length > 1:
            assert read.kvs[SPECS.index(spec)].cost == alone.usage.cost


def test_a_prompt_in_parts_is_as_it_was_after_each(harness):
    ids = prompt_ids(95)
    before, after = harness.read_parts([ids[:60], ids[60:]], 20, SPECS[1:8:3])
    assert [kv.num_tokens for kv in before.kvs] == [60] * 3
    assert [kv.num_tokens for kv in after.kvs] == [95] * 3
    for i, spec in enumerate(SPECS[1:8:3]):
        for part, reading in ((ids[:60], before), (ids, after)):
            (alone,) = harness.read_parts([part], 20, [spec])
            torch.testing.assert_close(reading.logits, alone.logits, atol=1e-4, rtol=0)
            for token in (7, 8, 9):
                both = harness.step([reading.kvs[i], alone.kvs[0]], [token, token])
                torch.testing.assert_close(both[0], both[1], atol=1e-3, rtol=0)


def test_sequences_of_a_reading_do_not_touch_each_other(harness):
    ids = prompt_ids(60)
    kvs = harness.read(ids, 60).kvs
    fresh = harness.read(ids, 60).kvs
    for _ in range(12):
        harness.step(kvs[:5], [9] * 5)
    assert [kv.num_tokens for kv in kvs] == [72] * 5 + [60] * 5
    for kv, other in zip(kvs[5:], fresh[5:], strict=True):
        for layer, twin in zip(kv.layers, other.layers, strict=True):
            assert all(map(torch.equal, layer.read(), twin.read()))


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "methods is empty: name one at least"),
        (["full", "magic"], "method must be one of .* not 'magic'"),
        (["topk:2%", "topk:0.02"], "methods must differ from each other: topk:2%, topk:2%"),
    ],
)
def test_bad_methods_are_refused_before_a_model_is_loaded(specs, message):
    model = "./no-such-model" if len(specs) < 2 or specs[1] == "magic" else loaded("llama")
    with pytest.raises(ValueError, match=message):
        Harness(model, specs)


def test_bad_prompts_are_refused(harness):
    for parts, message in (
        ([[]], "the prompt is empty"),
        ([], "the prompt is empty"),
        ([[5, 6], []], "the prompt is empty"),
        ([[5, 6], [7]], "parts of a prompt must have two tokens at least"),
        ([[5], [6, 7]], "parts of a prompt must have two tokens at least"),
        ([[5] * 4097], "the prompt has 4097 tokens, the model's context holds 4096"),
    ):
        with pytest.raises(ValueError, match=message):
            harness.read_parts(parts, 1)


# Decoding


def test_answers_end_at_end_tokens_or_when_they_are_long_enough(harness):
    read = harness.read(prompt_ids(40), 60)
    truth = answers_of(harness, [kv.fork() for kv in read.kvs], read.logits)["topk:20%"]
    first = int(read.logits.argmax())
    assert truth[0] == first
    kv = read.kvs[SPECS.index("topk:20%")]
    end = next(token for i, token in enumerate(truth) if i > 3 and token not in truth[:i])
    answers = []
    for max_tokens in (1, 3, NEW):
        answers.append(Answer("topk:20%", kv.fork(), max_tokens, []))
        answers[-1].take(first, frozenset([end]))
    steps = []
    before, harness.end_token_ids = harness.end_token_ids, frozenset([end])
    try:
        decode(harness, answers, steps.append)
    finally:
        harness.end_token_ids = before
    length = truth.index(end)
    assert [a.token_ids for a in answers] == [truth[:1], truth[:3], truth[:length]]
    assert all(answer.finished for answer in answers)
    assert steps == [2, 2, *[1] * (length - 2)]
    assert [answer.kv.cost.steps for answer in answers] == [0, 2, length]


def test_forced_tokens_are_fed_and_not_answered(harness):
    """As if they had been read, where every row is read."""
    ids = prompt_ids(70)
    easy, hard = harness.read(ids, 60), harness.read(ids[:60], 60)
    found = answers_of(harness, hard.kvs, hard.logits, ids[60:])
    expected = answers_of(harness, easy.kvs, easy.logits)
    for spec in EXACT:
        assert found[spec] == expected[spec]
    assert found["streaming"] != expected["streaming"]
    assert {kv.cost.steps for kv in hard.kvs} == {10 + NEW - 1}
    assert {kv.num_tokens for kv in hard.kvs} == {70 + NEW - 1}


def test_numbers_that_are_not_finite_are_no_answer(harness, monkeypatch):
    read = harness.read(prompt_ids(20), 60)
    answers = [Answer("full", kv, 5, [7]) for kv in read.kvs[:2]]
    monkeypatch.setattr(Runner, "decode", lambda *_: torch.full((2, 300), math.nan))
    with pytest.raises(RuntimeError, match="numbers that are not finite"):
        decode(harness, answers)


# Prompts


def sample(index=0, task="echo", **fields):
    text = f"{index}: " + "The grass is green. The sky is blue. " * 3
    given = {"context": text, "question": "\nWhat is blue?", "answer_prefix": " It is"}
    given |= {"answers": ("sky",), "max_tokens": 9, **fields}
    return Sample(task=task, index=index, **given)


def test_a_prompt_is_the_sample_in_the_chat_template_cut_before_the_question():
    tokenizer = make_tokenizer()
    prompt = prompt_of(sample(context="abc", question="d?"), tokenizer)
    assert tokenizer.decode(prompt.context) == "user: abc"
    assert tokenizer.decode(prompt.question) == "d?\n It is"
    assert template_tokens(tokenizer) == len("user: \n") + 1
    assert count_tokens("abc", tokenizer) == 3


def test_a_prompt_without_a_template_has_the_special_tokens_of_a_text():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    prompt = prompt_of(sample(context="abc", question="d?"), tokenizer)
    assert prompt.context == [1, *tokenizer("abc", add_special_tokens=False)["input_ids"]]
    assert tokenizer.decode(prompt.question) == "d? It is"


def test_a_token_across_the_border_belongs_to_the_question(tmp_path):
    """And what is asked is the same tokens as the whole text's."""
    tokenizer = make_tokenizer()
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary["model"]["vocab"]["cd"] = len(vocabulary["model"]["vocab"])
    vocabulary["model"]["merges"] = [["c", "d"]]
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    merging = AutoTokenizer.from_pretrained(tmp_path)
    prompt = prompt_of(sample(context="abc", question="d?"), merging)
    assert merging.decode(prompt.context) == "user: ab"
    assert merging.decode(prompt.question[:1]) == "cd"


def test_a_tokenizer_without_offsets_reads_the_parts_by_themselves():
    tokenizer = make_tokenizer()

    class Slow:
        is_fast, chat_template = False, tokenizer.chat_template
        apply_chat_template = tokenizer.apply_chat_template

        def __call__(self, text, **options):
            assert "return_offsets_mapping" not in options
            return tokenizer(text, **options)

    assert prompt_of(sample(), Slow()) == prompt_of(sample(), tokenizer)


# Runs


def made(task, length, index):
    return sample(index, task)


@pytest.fixture
def records(tmp_path):
    with Records(tmp_path, {}) as opened:
        yield opened


@pytest.fixture(scope="module")
def pair():
    harness = make_harness("llama", ["full", "streaming", "cpu-dense"])
    harness.end_token_ids = frozenset()
    return harness


BATCH = Batch("echo", 200, (0, 1))


def ran(harness, records, batch=BATCH, protocols=("easy", "hard"), make=made):
    seen, told = [], []
    run(harness, make, batch, protocols, records, seen.append, told.append)
    return seen, told


def test_batches_cover_all_samples_of_all_tasks():
    found = list(batches(["a", "b"], [10, 20], 5, 2))
    assert found[:3] == [Batch("a", 10, (0, 1)), Batch("a", 10, (2, 3)), Batch("a", 10, (4,))]
    assert len(found) == 2 * 2 * 3


def test_a_run_answers_every_sample_by_every_method(pair, records):
    seen, told = ran(pair, records)
    keys = {(r["protocol"], r["method"], r["index"]) for r in seen}
    assert len(keys) == len(seen) == len(records) == 2 * 3 * 2
    assert seen == list(records)
    by_key = {(r["protocol"], r["method"], r["index"]): r for r in seen}
    for (protocol, method, index), record in by_key.items():
        one = sample(index)
        prompt = prompt_of(one, pair.tokenizer)
        full = by_key[protocol, "full", index]
        assert record["score"] == one.score(record["output"])
        assert record["prompt_tokens"] == len(prompt.context) + len(prompt.question)
        assert record["new_tokens"] == one.max_tokens
        fed = len(prompt.question) if protocol == "hard" else 0
        assert record["cost"]["steps"] == fed + one.max_tokens - 1
        assert (record["cost"]["rows"] == 0) == (method == "streaming")
        if method in EXACT:
            assert record["output"] == full["output"]
            assert record["output"] == by_key["easy", "full", index]["output"]
    same = {cell.method: cell.same_as_full for cell in summary(seen)}
    assert same["full"] == 1
    assert same["streaming"] < 1
    assert any(words.startswith("reading prompt 2 of 2") for words in told)
    assert any(words.startswith("decoding 12 answers") for words in told)
    assert json.loads(json.dumps(seen)) == seen


def test_outputs_do_not_depend_on_the_batch(pair, records, tmp_path):
    together, _ = ran(pair, records)
    with Records(tmp_path / "other", {}) as others:
        for index in (1, 0):
            ran(pair, others, replace(BATCH, indices=(index,)), ["hard"])
            ran(pair, others, replace(BATCH, indices=(index,)), ["easy"])
        for record in together:
            key = ("echo", 200, record["protocol"], record["index"], record["method"])
            assert others.get(*key) == record


def test_what_is_recorded_is_not_done_again(pair, records):
    calls = []

    def making(task, length, index):
        calls.append(index)
        return made(task, length, index)

    ran(pair, records, replace(BATCH, indices=(1,)), ["easy"], making)
    assert calls == [1]
    seen, _ = ran(pair, records, BATCH, ["easy"], making)
    assert calls == [1, 0]
    assert {record["index"] for record in seen} == {0}
    assert ran(pair, records, BATCH, ["easy"], making) == ([], [])
    assert calls == [1, 0]
    ran(pair, records, BATCH, ["easy", "hard"], making)
    assert calls == [1, 0, 0, 1]
    assert len(records) == 12


def test_a_method_is_compared_with_full_attention_of_an_earlier_run(records, pair):
    before, _ = ran(pair, records)
    alone = make_harness("llama", ["streaming", "topk:100%"])
    alone.end_token_ids = frozenset()
    seen, _ = ran(alone, records)
    assert {record["method"] for record in seen} == {"topk:100%"}
    assert len(records) == len(before) + 4
    same = {cell.method: cell.same_as_full for cell in summary(records)}
    assert same["topk:100%"] == 1


def test_without_full_attention_nothing_is_the_same(records):
    seen, _ = ran(make_harness("llama", ["streaming"]), records, protocols=["easy"])
    assert {cell.same_as_full for cell in summary(seen)} == {None}


def test_answers_to_another_prompt_are_no_company(pair, records):
    ran(pair, records, protocols=["easy"])
    other = make_harness("llama", ["full", "topk:100%"])

    def others(task, length, index):
        return replace(made(task, length, index), question="Which other word?")

    with pytest.raises(ValueError, match="has an answer to another prompt 0 of"):
        ran(other, records, protocols=["easy"], make=others)
