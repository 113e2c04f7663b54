"""Methods by spec: what a word means, what it refuses, who may add one, and which layer gets it."""

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from typer.testing import CliRunner
from zoo import loaded

from magicpig import LLM, LSHConfig, SamplingParams, WindowConfig
from magicpig.attention import registry
from magicpig.attention.base import share_of
from magicpig.attention.cpu_dense import CpuDense
from magicpig.attention.full import Full
from magicpig.attention.h2o import H2O
from magicpig.attention.kv_stream import KvStream
from magicpig.attention.loki import Loki
from magicpig.attention.lsh import Lsh
from magicpig.attention.oracle import Oracle
from magicpig.attention.plan import Plan, make_plan
from magicpig.attention.quest import Quest
from magicpig.attention.registry import methods, parse, register
from magicpig.attention.streaming import Streaming
from magicpig.attention.topk import TopK
from magicpig.cli import app
from magicpig.kv.base import LayerShape
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.sequence import SequenceKV
from magicpig.kv.tensor_layer import TensorLayer

SHAPE = LayerShape(4, 2, 16, torch.float32)
SMALL = WindowConfig(sinks=2, local=4, block=8)


@pytest.mark.parametrize(
    ("spec", "method", "written"),
    [
        ("full", Full(), "full"),
        ("cpu-dense", CpuDense(), "cpu-dense"),
        ("kv-stream", KvStream(), "kv-stream"),
        ("streaming", Streaming(), "streaming"),
        ("lsh", Lsh(), "lsh:10:150"),
        (" lsh:8:75 ", Lsh(8, 75), "lsh:8:75"),
        ("lsh:8:75:3", Lsh(8, 75, 3), "lsh:8:75:min_collisions=3"),
        ("lsh:seed=4", Lsh(seed=4), "lsh:10:150:seed=4"),
        ("lsh:bits_per_table=8:75", Lsh(8, 75), "lsh:8:75"),
        ("topk", TopK(), "topk:2%"),
        ("topk:2%", TopK(0.02), "topk:2%"),
        ("topk:0.02", TopK(0.02), "topk:2%"),
        ("topk:2e-2", TopK(0.02), "topk:2%"),
        ("topk:0.15%", TopK(0.0015), "topk:0.15%"),
        ("topk:100%", TopK(1.0), "topk:100%"),
        ("topk:1", TopK(1), "topk:100%"),
        ("topk:budget=7%", TopK(0.07), "topk:7%"),
        ("oracle:5%:9", Oracle(0.05, 9), "oracle:5%:seed=9"),
        ("oracle:seed=9", Oracle(seed=9), "oracle:2%:seed=9"),
        ("quest", Quest(), "quest:16:4%"),
        ("quest:32", Quest(32), "quest:32:4%"),
        ("quest:budget=8%:page=8", Quest(8, 0.08), "quest:8:8%"),
        ("h2o:20%", H2O(), "h2o:20%"),
        ("loki:25%:2%", Loki(), "loki:25%:2%"),
    ],
)
def test_a_spec_is_read_and_written(spec, method, written):
    assert parse(spec) == method
    assert parse(spec).spec == written
    assert parse(written) == method


@pytest.mark.parametrize("percent", [0.01, 0.3, 1.1, 2, 3.3, 7, 14.7, 29, 57, 99.9])
def test_shares_survive_their_spec(percent):
    assert parse(f"topk:{percent}%").spec == f"topk:{percent:g}%"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", r"method must be one of full, lsh, .*kv-stream.*, not ''"),
        ("magic:3", r"method must be one of .*, not 'magic'"),
        ("LSH", "not 'LSH'"),
        ("topk:x", "method 'topk:x': 'x' is not a number; write it like 16, 0.02 or 2%"),
        ("topk:", "method 'topk:': '' is not a number"),
        ("topk:%", "'%' is not a number"),
        ("topk:2", "method 'topk:2': budget must be above 0 and at most 100 %, not 200 %"),
        ("topk:0", "budget must be above 0"),
        ("topk:-1%", "budget must be above 0 and at most 100 %, not -1 %"),
        ("topk:nan", "budget must be above 0"),
        ("topk:2%:3", "'topk:2%:3' has too many parameters; topk takes budget"),
        ("full:2", "'full:2' has too many parameters; full takes no parameters"),
        ("topk:share=2%", "'topk:share=2%': there is no parameter 'share'; topk takes budget"),
        ("topk:name=2", "there is no parameter 'name'; topk takes budget"),
        ("topk:=2%", "there is no parameter ''"),
        ("full:x=2", "there is no parameter 'x'; full takes no parameters"),
        ("lsh:8:seed=4:75", "'lsh:8:seed=4:75': '75' comes after a named parameter: name it too"),
        ("quest:16:page=8", "'quest:16:page=8' gives page twice"),
        ("quest:16%", "page must be an int, not 0.16"),
        ("quest:0", "page must be from 1 to 65536, not 0"),
        ("quest:16:400%", "budget must be above 0 and at most 100 %, not 400 %"),
        ("oracle:2%:-1", "seed must be from 0 to 4294967295, not -1"),
        ("loki:0:2%", "dims must be above 0"),
        ("lsh:17", "bits_per_table must be from 1 to 16, not 17"),
        ("lsh:10:1", r"min_collisions must be at most num_tables \(1\), not 2"),
        ("lsh:10:1.5", "num_tables must be an int, not 1.5"),
    ],
)
def test_bad_specs_say_what_is_wrong(spec, message):
    with pytest.raises(ValueError, match=message):
        parse(spec)
    with pytest.raises(ValueError, match=message):
        make_plan(spec, 4)


def test_shares_of_tokens_are_rounded_up():
    assert [share_of(0.02, tokens) for tokens in (0, 1, 50, 51, 100, 150)] == [0, 1, 1, 2, 2, 3]
    assert share_of(0.07, 100) == 7  # 0.07 * 100 is a little more than 7
    assert share_of(1, 7) == 7


@pytest.fixture
def empty_registry(monkeypatch):
    """Methods that are registered in a test are forgotten after it."""
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))


@dataclass(frozen=True)
class Newest(Streaming):
    """Somebody's own."""

    name: ClassVar[str] = "newest"
    num_shown: ClassVar[int] = 1

    count: int = 3


def test_methods_can_be_added(empty_registry):
    assert register(Newest) is Newest
    assert register(Newest) is Newest  # again is no harm
    assert parse("newest:5") == Newest(5)
    assert "newest" in methods()

    class Other(Newest):
        pass

    with pytest.raises(ValueError, match="the method name 'newest' is Newest's already"):
        register(Other)
    llm = LLM(loaded("llama"), method="newest:4", window=SMALL)
    assert llm.settings["method"] == "newest:4"
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    theirs = LLM(loaded("llama"), method="streaming", window=SMALL).generate(["x" * 40], params)
    assert llm.generate(["x" * 40], params)[0].text == theirs[0].text


def test_methods_come_from_entry_points(empty_registry, monkeypatch):
    class Entry:
        def load(self):
            return Newest

    asked = []
    monkeypatch.setattr(registry, "entry_points", lambda group: asked.append(group) or [Entry()])
    registry._load_entry_points.cache_clear()
    assert parse("full") == Full()
    assert not asked  # built-in ones need nobody
    assert parse("newest") == Newest()
    assert asked == ["magicpig.methods"]
    registry._load_entry_points.cache_clear()


def test_what_is_returned_is_a_copy():
    methods().clear()
    assert len(methods()) >= 10


def test_a_plan_has_dense_layers():
    plan = make_plan("topk", 8)
    assert plan.dense_layers == {0, 4}
    assert [type(plan.of(i)) for i in range(3)] == [Full, TopK, TopK]
    assert make_plan("topk", 8, dense_layers=[]).dense_layers == set()
    assert make_plan("topk", 8, dense_layers=[7, 7]).dense_layers == {7}
    for spec in ("full", "cpu-dense", "kv-stream"):  # in all layers; the cost leaves them out
        plan = make_plan(spec, 8, dense_layers=[1])
        assert plan == Plan(parse(spec), frozenset({1}))
        assert plan.of(0) == plan.of(1) == parse(spec)
    assert make_plan(TopK(0.5), 8).method == TopK(0.5)


def test_lsh_of_a_plan():
    tables = LSHConfig(8, 20, seed=3, exact_below=5)
    assert make_plan("lsh", 4, tables).method.index == tables
    for method in ("lsh:9:30", Lsh(9, 30)):
        with pytest.raises(ValueError, match="'lsh:9:30' says which hash tables, and lsh does"):
            make_plan(method, 4, tables)
    assert make_plan("topk", 4, tables).method == TopK()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"method": 3}, TypeError, "method must be a name or a Method, not 3"),
        ({"method": "lsh", "lsh": 3}, TypeError, "lsh must be an LSHConfig or None, not 3"),
        ({"method": "lsh", "dense_layers": 5}, TypeError, "dense_layers must be a list of layers"),
        (
            {"method": "lsh", "dense_layers": "0"},
            TypeError,
            "dense_layers must be a list of layers",
        ),
        ({"method": "lsh", "dense_layers": [4]}, ValueError, "dense_layers must be from 0 to 3"),
        ({"method": "lsh", "dense_layers": ["0"]}, ValueError, "dense_layers must be an int"),
    ],
)
def test_bad_plans(arguments, error, message):
    with pytest.raises(error, match=message):
        make_plan(num_layers=4, **arguments)


def test_layers_of_a_plan():
    plan = make_plan("quest", 4)
    dense, sparse = (plan.new_layer(i, SHAPE, SMALL) for i in (0, 1))
    sliding = plan.new_layer(1, SHAPE, SMALL, span=7)
    assert isinstance(dense, NativeLayer)
    assert isinstance(sparse, TensorLayer)
    assert isinstance(sliding, NativeLayer)
    assert (dense.dense, sparse.dense, sliding.dense) == (True, False, False)
    assert (sliding.span, sparse.layer, sparse.method) == (7, 1, Quest())
    exact = make_plan("kv-stream", 4).new_layer(0, SHAPE, SMALL)
    assert isinstance(exact, TensorLayer)
    assert exact.dense
    assert [make_plan(spec, 1, dense_layers=()).new_layer(0, SHAPE, SMALL).evicts
            for spec in ("topk", "h2o", "streaming")] == [False, True, True]  # fmt: skip


def read(spec, tokens, dense_layers=(0,)):
    """A sequence of two layers that read 60 tokens."""
    plan = make_plan(spec, 2, dense_layers=dense_layers)
    layers = [plan.new_layer(i, SHAPE, SMALL) for i in range(2)]
    for layer in layers:
        layer.extend(*tokens, torch.rand(2, 60))
    return SequenceKV(layers, 60)


@pytest.mark.parametrize("before", ["lsh:2:9:exact_below=0", "topk", "quest", "full"])
@pytest.mark.parametrize("after", ["lsh:3:8:exact_below=0", "topk", "loki", "cpu-dense"])
def test_a_plan_adopts_sequences_of_another(before, after):
    tokens = torch.randn(2, 2, 60, 16).unbind()
    sequence = read(before, tokens)
    plan = make_plan(after, 2, dense_layers=[1])
    adopted = plan.adopt(sequence)
    assert adopted.num_tokens == 60
    for i, layer in enumerate(adopted.layers):
        assert layer.kind == plan.new_layer(i, SHAPE, SMALL).kind
        assert layer.dense == (i == 1)
        assert layer is not sequence.layers[i]
        assert all(map(torch.equal, layer.read(), tokens))


def test_a_plan_does_not_adopt_what_it_cannot_keep():
    tokens = torch.randn(2, 2, 60, 16).unbind()
    for spec in ("h2o", "streaming"):
        with pytest.raises(ValueError, match="tokens of the text were evicted"):
            make_plan("topk", 2).adopt(read(spec, tokens))
        same = make_plan(spec, 2, dense_layers=[0]).adopt(read(spec, tokens))
        assert same.layers[1].num_tokens < 60
    with pytest.raises(ValueError, match="h2o needs the attention"):
        make_plan("h2o", 2, dense_layers=[0]).adopt(read("topk", tokens))


# On the command line


@pytest.mark.parametrize("name", sorted(registry._methods))
def test_every_method_generates_on_the_command_line(model, name, tmp_path):
    (tmp_path / "a.txt").write_text("The light is red. " * 30)
    arguments = ["--model", model, "-f", str(tmp_path / "a.txt"), "-p", "Why?", "--json"]
    result = CliRunner().invoke(
        app, ["generate", *arguments, "--max-tokens", "6", "--method", name]
    )
    assert result.exit_code == 0, result.output
    (completion,) = json.loads(result.stdout)["completions"]
    cost = completion["far_context"]
    assert cost["steps"] == 5
    assert cost["tokens"] > 0
    assert completion["tokens"] == 6
    assert (cost["rows"] == cost["tokens"]) == (parse(name).exact or name == "lsh")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "magic"], "method must be one of full, lsh, scan, topk, oracle, quest"),
        (["--method", "topk:2"], "method 'topk:2': budget must be above 0 and at most 100 %"),
        (["--method", "quest:16:x"], "'x' is not a number; write it like 16, 0.02 or 2%"),
        (["--method", "topk", "--num-tables", "9"], "--num-tables is a parameter of lsh"),
        (["--method", "lsh", "--num-tables", "0"], "num_tables must be from 1 to 4096, not 0"),
    ],
)
def test_bad_methods_are_told_in_a_line(model, arguments, message):
    result = CliRunner().invoke(app, ["generate", "--model", model, "-p", "x", *arguments])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("magicpig: error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "lfm2", "llama"])
def test_dense_layers_are_chosen_among_those_with_full_attention(name):
    llm = LLM(loaded(name), method="topk")
    kv = llm.read([5, 6, 7] * 30)
    far = [layer for layer in kv.attention_layers if not layer.span]
    assert any(layer.dense for layer in far)
    assert not any(layer.dense for layer in kv.attention_layers if layer.span)
