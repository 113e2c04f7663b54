"""The model `magicpig` of lm-evaluation-harness gives what transformers gives, by any method."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from zoo import loaded, make_model, make_tokenizer

from magicpig import LLM, SamplingParams

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

from magicpig.evals.lm_harness import MagicPigLM

ROOT = Path(__file__).parent.parent
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
TEXT = (ROOT / "examples/lighthouse.txt").read_text()


def make(method="full", **arguments):
    return MagicPigLM(pretrained=loaded("llama"), method=method, **arguments)


@pytest.fixture(scope="module")
def lm():
    return make()


@pytest.fixture(scope="module")
def plain():
    return make_model("llama")


def asked(*args):
    return [SimpleNamespace(args=each) for each in args]


@torch.no_grad()
def truth(model, context, continuation):
    """Log-likelihood and greediness by a single pass of transformers."""
    rows = model(torch.tensor([context + continuation])).logits[0].log_softmax(-1)
    rows = rows[len(context) - 1 : -1]
    total = rows[range(len(continuation)), continuation].sum().item()
    return total, rows.argmax(-1).tolist() == continuation


def test_loglikelihoods_are_those_of_transformers(lm, plain):
    pairs = [
        ("Pellan has one spring", " of water"),
        ("Pellan has one spring", " of"),
        (TEXT[:1500], "."),
        (TEXT[:1500], " and then the light was lit"),
        ("", "It is very bright"),
        ("The space at the end ", "moves"),
    ]
    for (context, continuation), (logprob, greedy) in zip(
        pairs, lm.loglikelihood(asked(*pairs), disable_tqdm=True), strict=True
    ):
        moved = context[len(context.rstrip()) :]
        ids = lm.tok_encode(context.rstrip()) or [lm.tokenizer.bos_token_id]
        expected = truth(plain, ids, lm.tok_encode(moved + continuation))
        assert logprob == pytest.approx(expected[0], abs=1e-3)
        assert greedy == expected[1]


def test_what_greedy_decoding_gives_is_greedy(lm):
    (text,) = lm.generate_until(asked(("abc", {"until": [], "max_gen_toks": 5})), True)
    tokens = LLM(loaded("llama"), method="full").generate("abc", SamplingParams(max_tokens=5))
    ids = tokens[0].completions[0].token_ids
    other = [*ids[:-1], (ids[-1] + 1) % 300]
    found = lm._loglikelihood_tokens(
        [(None, lm.tok_encode("abc"), ids), (None, lm.tok_encode("abc"), other)], True
    )
    assert tokens[0].text == text
    assert [greedy for _, greedy in found] == [True, False]


def test_a_shared_context_is_read_once(lm, monkeypatch):
    contexts = []
    read = MagicPigLM._read
    monkeypatch.setattr(
        MagicPigLM, "_read", lambda self, ids, new: contexts.append(ids) or read(self, ids, new)
    )
    pairs = [("One", " a"), ("Two", " b"), ("One", " long"), ("One", " longer yet")]
    together = lm.loglikelihood(asked(*pairs), disable_tqdm=True)
    assert contexts == [lm.tok_encode("One"), lm.tok_encode("Two")]
    alone = [lm.loglikelihood(asked(pair), disable_tqdm=True)[0] for pair in pairs]
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_batches_of_contexts_change_nothing(lm):
    pairs = [(TEXT[i : i + 40 * i], " light"[: i % 6 + 1]) for i in range(1, 12)]
    many = make(batch_size="auto").loglikelihood(asked(*pairs), disable_tqdm=True)
    for one, other in zip(lm.loglikelihood(asked(*pairs), disable_tqdm=True), many, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_long_contexts_lose_their_beginning(plain):
    short = make(max_length=50)
    context, continuation = short.tok_encode(TEXT[:300]), short.tok_encode(" keeper")
    ((logprob, _),) = short._loglikelihood_tokens([(None, context, continuation)], True)
    kept = context[-(51 - len(continuation)) :]
    assert logprob == pytest.approx(truth(plain, kept, continuation)[0], abs=1e-3)
    with pytest.raises(ValueError, match="a continuation has 51 tokens, and max_length is 50"):
        short._loglikelihood_tokens([(None, [5], [6] * 51)], True)
    (text,) = short.generate_until(asked((TEXT[:300], {"until": [], "max_gen_toks": 10})), True)
    (same,) = short.generate_until(asked((TEXT[260:300], {"until": [], "max_gen_toks": 10})), True)
    assert text == same


def test_rolling_predicts_every_token_once(plain):
    short = make(max_length=64)
    found = short.loglikelihood_rolling(asked((TEXT[:150],), (TEXT[:20],)), True)
    ids, first = short.tok_encode(TEXT[:150]), [short.tokenizer.bos_token_id]
    windows = (first, ids[:64]), (ids[63:64], ids[64:128]), (ids[85:128], ids[128:])
    expected = sum(truth(plain, *window)[0] for window in windows)
    assert found[0] == pytest.approx(expected, abs=1e-3)
    assert found[1] == pytest.approx(truth(plain, first, ids[:20])[0], abs=1e-3)
    assert short.loglikelihood_rolling(asked(("",)), True) == [0.0]


def test_the_method_counts_from_the_second_token_on(lm):
    sampled = make("lsh", dense_layers=[])
    context = lm.tok_encode(TEXT)[:3000]
    for continuation, same in (([70], True), ([70, 80, 90], False)):
        (exact,), (drawn,) = (
            each._loglikelihood_tokens([(None, context, continuation)], True)
            for each in (lm, sampled)
        )
        assert (exact[0] == pytest.approx(drawn[0], abs=1e-4)) == same


def test_generation(lm):
    free = {"until": [], "max_gen_toks": 30}
    (text,) = lm.generate_until(asked((TEXT[:200], free)), True)
    stop = text[10:12]
    requests = asked(
        (TEXT[:200], {"until": stop, "max_gen_toks": 30}),
        (TEXT[:200], {"until": [stop, ""], "max_new_tokens": 4, "do_sample": False}),
        ("", free),
    )
    stopped, shorter, from_nothing = lm.generate_until(requests, True)
    assert stopped == text[: text.index(stop)]
    assert stopped.startswith(shorter)
    assert from_nothing == lm.generate_until(asked(("<bos>", free)), True)[0]


def test_repeated_samples_differ_and_come_again_with_the_seed(lm):
    drawn = asked(*[("abc", {"until": [], "max_gen_toks": 20, "temperature": 1.0})] * 3)
    torch.manual_seed(1234)
    first = lm.generate_until(drawn, True)
    torch.manual_seed(1234)
    assert lm.generate_until(drawn, True) == first
    assert len(set(first)) == 3


def test_unknown_arguments_are_refused(lm):
    with pytest.raises(ValueError, match=r"unknown ModelArgs field metod='full'.*known: pretr"):
        MagicPigLM(metod="full")
    with pytest.raises(ValueError, match=r"unknown generation argument beams=2; known: .*top_p"):
        lm.generate_until(asked(("a", {"until": [], "beams": 2})), True)
    with pytest.raises(ValueError, match="max_gen_toks must be below max_length, 4096, not 5000"):
        lm.generate_until(asked(("a", {"until": [], "max_gen_toks": 5000})), True)
    assert not lm.llm.engine.has_work
    for arguments, message in (
        ({"dense_layers": "0;2"}, "dense_layers must be a layer or a list"),
        ({"max_length": 10**6}, "max_length must be from 2 to 4096"),
        ({"batch_size": 0}, "batch_size must be from 1"),
        ({"method": "none"}, "method"),
    ):
        with pytest.raises(ValueError, match=message):
            MagicPigLM(**{"pretrained": loaded("llama"), **arguments})


def test_model_arguments_count_more_than_the_harnesses_options():
    options = {"batch_size": 1, "device": "cuda:0", "max_batch_size": None}
    given = {"pretrained": loaded("llama"), "dense_layers": 1, "device": "cpu", "batch_size": "7"}
    one = MagicPigLM.create_from_arg_obj(given, options)
    assert one.args.device == "cpu"
    assert one.args.batch_size == 7
    assert one.args.dense_layers == [1]


def test_chats(lm):
    messages = [{"role": "user", "content": "Hi"}]
    assert lm.apply_chat_template(messages) == "user: Hi\n"
    assert lm.chat_template(True) == lm.tokenizer.chat_template
    assert "/" not in lm.tokenizer_name
    bare = make()
    bare.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        bare.apply_chat_template(messages)


def test_the_entry_point_names_the_model():
    found = [each for each in entry_points(group="lm_eval.models") if each.name == "magicpig"]
    if not found:
        pytest.skip("the installed magicpig has no entry point lm_eval.models: install it anew")
    assert found[0].load() is MagicPigLM


# The harness's command, but for looking through its thousands of tasks, which takes ten seconds.
COMMAND = """
from functools import partial
import lm_eval.tasks
lm_eval.tasks.TaskManager = partial(lm_eval.tasks.TaskManager, include_defaults=False)
"""
OURS = """
from magicpig.evals.lm_harness import main
main()
"""
# What harnesses that know entry points do before they look a model up.
PLUG_IN = """
from importlib.metadata import EntryPoint
import lm_eval.models
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry
place = "magicpig.evals.lm_harness:MagicPigLM"
model_registry.register("magicpig", target=EntryPoint("magicpig", place, "lm_eval.models"))
cli_evaluate()
"""
# `lm_eval` as it is: tasks that are files are imported first, and ours know the model.
TYPED = """
from lm_eval.__main__ import cli_evaluate
cli_evaluate()
"""
EXAMPLES = ROOT / "examples/lm_harness"
BY_NAME = ["--include_path", str(EXAMPLES), "--tasks", "lighthouse_choice,lighthouse_answer"]
BY_FILE = ["--tasks", f"{EXAMPLES}/lighthouse_*.yaml"]


@pytest.mark.parametrize(
    ("way", "tasks"),
    [(OURS, BY_NAME), (PLUG_IN, BY_NAME), (TYPED, BY_FILE)],
    ids=["our command", "plug-in", "as typed"],
)
def test_the_harness_runs_its_tasks_with_it(tmp_path, way, tasks):
    make_model("llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    arguments = (
        f"pretrained={tmp_path / 'model'},method=lsh:6:40,dense_layers=[0,2],max_length=1600"
    )
    command = [sys.executable, "-c", COMMAND + way, "--model", "magicpig"]
    command += ["--model_args", arguments, *tasks, "--limit", "2"]
    command += ["--apply_chat_template", "--log_samples", "--output_path", str(tmp_path / "out")]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **OFFLINE, "HF_HOME": str(tmp_path / "hub")},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    (report,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(report.read_text())
    assert 0 <= results["results"]["lighthouse_choice"]["acc,none"] <= 1
    assert 0 <= results["results"]["lighthouse_answer"]["found,none"] <= 1
    assert results["config"]["magicpig_dense_layers"] == [0, 2]
    assert results["config"]["magicpig_method"] == "lsh:6:40"
    (samples,) = (tmp_path / "out").rglob("samples_lighthouse_answer_*.jsonl")
    assert len(samples.read_text().splitlines()) == 2
