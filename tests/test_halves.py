"""Two halves of a batch by turns, and traces of what happens: here in the code that GPUs run."""

import json
import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from typer.testing import CliRunner
from zoo import loaded

from magicpig import LLM, SamplingParams, WindowConfig, trace
from magicpig.cli import app
from magicpig.engine.halves import Halves
from magicpig.engine.pace import Pace
from magicpig.kv import tray
from magicpig.kv.hybrid_layer import HybridLayer
from magicpig.kv.sequence import SequenceKV

PROMPTS = [[i * k % 200 + 3 for i in range(40 * k)] for k in (2, 3, 4, 5, 7)]
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)


@pytest.fixture
def on_device(monkeypatch):
    """Layers are made as for a GPU."""
    monkeypatch.setattr("magicpig.attention.on_host.new_layer", HybridLayer)


def llm_for(method, halves):
    llm = LLM(loaded("llama"), method=method, window=WindowConfig(4, 8, 16))
    runner = llm.engine.runner
    assert runner.halves is None  # on a CPU there is one place to work
    runner.halves = Halves(runner.device) if halves else None
    runner.prompts_on_host = halves
    return llm


@pytest.mark.parametrize("method", ["lsh:4:12", "scan:2:100%", "cpu-dense", "kv-stream"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_halves_give_the_same_tokens(on_device, method, count):
    whole, halved = (
        [g.completions[0].token_ids for g in llm_for(method, h).generate(PROMPTS[:count], PARAMS)]
        for h in (False, True)
    )
    assert halved == whole


def test_a_trace_shows_both_halves(on_device, tmp_path):
    with trace.recording(tmp_path / "trace.json"):
        llm_for("lsh:4:12", True).generate(PROMPTS, PARAMS)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["name"] for event in spans}
    assert {"prompt", "decode", "half", "window", "far context"} <= names
    halves = {e["args"]["number"]: e["tid"] for e in spans if e["name"] == "half"}
    assert halves[0] != halves[1]
    far = {e["tid"] for e in spans if e["name"] == "far context"}
    assert far == set(halves.values())


def test_an_error_in_either_half_waits_for_the_other():
    halves = Halves(torch.device("cpu"))
    for failing in (0, 1):
        ended = threading.Event()

        def fails(failing=failing):
            raise ValueError(f"half {failing}")

        def works(ended=ended):
            time.sleep(0.05)
            ended.set()
            return torch.zeros(2, 3)

        with pytest.raises(ValueError, match=f"half {failing}"):
            halves.run(*((works, fails) if failing else (fails, works)))
        assert ended.is_set()
    found = halves.run(lambda: torch.arange(2), lambda: torch.arange(2, 3))
    assert found.tolist() == [0, 1, 2]


def test_an_interrupt_waits_for_the_other_half():
    ended = threading.Event()

    def works():
        for _ in range(3):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        ended.set()
        return torch.zeros(2, 3)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            Halves(torch.device("cpu")).run(lambda: torch.zeros(1, 3), works)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()


def test_a_failing_step_ends_its_sequences_and_no_others(on_device, monkeypatch):
    llm = llm_for("lsh:4:12", True)
    serve, left = tray._native.serve, [40]

    def failing(*arguments):
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("no more")
        return serve(*arguments)

    monkeypatch.setattr(tray._native, "serve", failing)
    with pytest.raises(MemoryError, match="no more"):
        llm.generate(PROMPTS[:3], PARAMS)
    assert len(llm.generate(PROMPTS[:3], PARAMS)) == 3


class Recorded:
    """What a runner asks of its graphs, before a step."""

    def __init__(self, *without):
        self.without = without  # sizes of batches that cannot be recorded

    def possible(self, kvs):
        return len(kvs) not in self.without


def test_halves_where_the_cpu_has_more_to_do():
    runner = llm_for("lsh:4:12", True).engine.runner
    kvs = [SequenceKV([]) for _ in range(5)]
    whole, halves = [slice(0, None)], [slice(0, 3), slice(3, None)]
    assert runner._parts(kvs) == halves  # nothing is recorded, nor known
    assert runner._parts(kvs[:1]) == whole
    runner.graphs = [Recorded(), Recorded()]
    pace = runner._paces[5, ()]
    for halved, expected in ((False, whole), (True, halves)):
        pace.halved = halved
        assert runner._parts(kvs) == expected
    runner.graphs = [Recorded(5), Recorded()]
    pace.halved = False
    assert runner._parts(kvs) == halves  # all at once cannot be recorded
    pace.halved = True
    for graphs in ([Recorded(3), Recorded()], [Recorded(), Recorded(2)]):
        runner.graphs = graphs
        assert runner._parts(kvs) == whole  # one of the halves cannot


class Short(Recorded):
    """Graphs, for whose next step a device has no memory."""

    broken = False

    def __init__(self):
        super().__init__()
        self.done = []

    def prepared(self, kvs):
        return self

    def prepare(self, kvs, token_ids):
        self.done.append("prepare")
        raise torch.OutOfMemoryError("CUDA out of memory")

    def let_go(self):
        self.done.append("let go")

    def drop(self):
        self.done.append("drop")


@pytest.mark.parametrize("place", ["prepare", "prepared"])
def test_steps_without_memory_for_graphs_are_run_without(on_device, place):
    def tokens(llm):
        return [g.completions[0].token_ids for g in llm.generate(PROMPTS, PARAMS)]

    expected = tokens(llm_for("lsh:4:12", True))
    llm = llm_for("lsh:4:12", True)
    llm.engine.runner.graphs = graphs = [Short(), Short()]
    if place == "prepared":
        graphs[0].prepared = lambda _: graphs[0].prepare(None, None)
    assert tokens(llm) == expected
    let_go = ["let go"] if place == "prepare" else []
    assert graphs[0].done == ["prepare", *let_go, "drop"]
    assert graphs[1].done == ["drop"]
    assert 0 < llm.engine.runner._without < 100  # before they are tried again
    llm = llm_for("lsh:4:12", True)
    llm.engine.runner.graphs = graphs = [Short(), Short()]
    graphs[0].prepare = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, PARAMS)
    assert set(graphs[0].done) == {"let go"}


@pytest.mark.parametrize("part", ["prefill", "finish"])
@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("kept", [True, False])
def test_prompts_get_the_memory_of_recorded_steps(on_device, monkeypatch, part, failures, kept):
    """A prompt for which there is too little is read once more, if there was any of theirs."""
    expected = llm_for("lsh:4:12", True).generate(PROMPTS[:1], PARAMS)[0].completions[0].token_ids
    llm = llm_for("lsh:4:12", True)
    runner = llm.engine.runner
    runner.part_tokens, runner.graphs = 16, (graphs := [Short(), Short()])
    work, left = getattr(runner, part), [failures]

    def failing(prefill):
        if left[0] and prefill.done >= 16:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return work(prefill)

    monkeypatch.setattr(runner, part, failing)
    for each in graphs:  # `kept` is whether there are any
        each.drop = lambda each=each: each.done.append("drop") or kept
        each.prepared = lambda _: None
    if failures == 1 and kept:
        [generation] = llm.generate(PROMPTS[:1], PARAMS)
        assert generation.completions[0].token_ids == expected
    else:
        with pytest.raises(torch.OutOfMemoryError):
            llm.generate(PROMPTS[:1], PARAMS)
    assert [each.done for each in graphs] == [["drop"]] * 2
    monkeypatch.setattr(runner, part, work)
    assert llm.generate(PROMPTS[:1], PARAMS)[0].completions[0].token_ids == expected


@pytest.mark.parametrize("place", ["drop_graphs", "begin"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("worse")])
def test_what_fails_before_a_prompt_is_read_again_ends_it(on_device, monkeypatch, place, error):
    llm = llm_for("lsh:4:12", True)
    runner = llm.engine.runner
    runner.part_tokens, runner.graphs = 16, [Short(), Short()]
    for each in runner.graphs:
        each.drop = lambda: True
    prefill = runner.prefill

    def failing(prompt):
        if prompt.done < 16:
            return prefill(prompt)
        monkeypatch.setattr(runner, place, worse)
        raise torch.OutOfMemoryError("CUDA out of memory")

    def worse(*_, **options):
        raise error

    monkeypatch.setattr(runner, "prefill", failing)
    request, events = llm.engine.add(PROMPTS[0], PARAMS), []
    while llm.engine.has_work:
        try:
            events += llm.engine.step()
        except KeyboardInterrupt:
            assert isinstance(error, KeyboardInterrupt)
    assert [event.error for event in events if event.finish] == [error]
    assert llm.engine._reading is None
    assert not request.sequences


def test_a_sequence_that_runs_is_not_read_again(on_device, monkeypatch):
    llm = llm_for("lsh:4:12", True)
    llm.engine.runner.graphs = graphs = [Short(), Short()]
    for each in graphs:
        each.drop = lambda each=each: each.done.append("drop") or True

    def short(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("magicpig.engine.engine.sample", short)
    with pytest.raises(torch.OutOfMemoryError):
        llm.generate(PROMPTS[0], PARAMS)
    assert [each.done for each in graphs] == [[], []]
    assert not llm.engine.has_work


def test_steps_are_recorded_on_where_no_graph_was_dropped(on_device):
    runner = llm_for("lsh:4:12", True).engine.runner
    for kept in (False, True):
        runner.graphs, runner._without = [Short(), Short()], 0
        for each in runner.graphs:
            each.drop = lambda kept=kept: kept
        assert runner.drop_graphs() is kept
        assert bool(runner._without) is kept


def test_models_that_cannot_be_recorded_are_not_tried_again(on_device):
    llm = llm_for("lsh:4:12", True)
    llm.engine.runner.graphs = graphs = [Short(), Short()]
    graphs[0].broken = True
    graphs[0].prepared = lambda _: None
    assert llm.generate(PROMPTS, PARAMS)
    assert llm.engine.runner.graphs == []
    assert graphs[1].done == []


def test_an_interrupt_before_graphs_run_lets_go_of_them(on_device, monkeypatch):
    llm = llm_for("lsh:4:12", True)
    llm.engine.runner.graphs = graphs = [Short(), Short()]
    for each in graphs:
        each.prepare = lambda *_: None

    @contextmanager
    def interrupted(_):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("magicpig.engine.runner.turns", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS)
    assert graphs[0].done == ["let go"]


def steps(pace, count, whole, halved, share):
    """How so many steps are run, that take so long each way."""
    ways = []
    for _ in range(count):
        ways.append(pace.halved)
        pace.took(halved if pace.halved else whole, None if pace.halved else share)
    return ways


def test_the_faster_way_is_kept():
    pace = Pace()
    assert not any(steps(pace, 1000, 1.0, 0.1, 0.4))  # the CPU has too little for a try
    ways = steps(pace, 600, 1.0, 0.7, 0.8)
    assert all(ways[10:250])
    assert 5 < ways[10:].count(False) <= 15  # whether they still pay
    ways = steps(pace, 600, 0.5, 0.7, 0.8)  # they do not any more
    assert ways[270:].count(True) <= 5
    assert any(steps(Pace(), 20, 1.0, 0.7, None))  # who has no attention may wait for a link


def test_one_slow_step_changes_nothing():
    pace = Pace()
    for i in range(2000):
        slow = 40 if i % 5 == 2 else 1
        pace.took(slow * (0.9 if pace.halved else 1.0), 0.95 if i % 5 == 2 else 0.4)
        assert not pace.halved
    pace = Pace()
    steps(pace, 100, 1.0, 0.9, 0.8)
    kept = [pace.halved]
    for i in range(150):
        pace.took(40.0 if i % 5 == 2 else 0.9, 0.8)
        kept.append(pace.halved)
    assert all(kept)


def test_nothing_is_recorded_outside(tmp_path):
    with trace.span("nothing"):
        pass
    with trace.recording(tmp_path / "a.json"):
        with pytest.raises(RuntimeError, match="already"), trace.recording(tmp_path / "b.json"):
            pass
        with trace.span("something", size=3):
            pass
        with trace.device_span("on the device"):
            pass
    spans = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    found = {e["name"]: e for e in spans if e["ph"] == "X"}
    assert set(found) == {"something", "on the device"}
    assert found["something"]["args"] == {"size": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_trace_is_written_after_an_error_too(tmp_path):
    with pytest.raises(KeyError), trace.recording(tmp_path / "a.json"), trace.span("before"):
        raise KeyError
    assert "before" in (tmp_path / "a.json").read_text()
    with pytest.raises(KeyError), trace.recording(tmp_path / "b.json"):
        raise KeyError
    assert not (tmp_path / "b.json").exists()  # nothing happened


@pytest.mark.parametrize("name", ["no/such/folder/a.json", ".", "pipe", "/proc/a.json"])
def test_a_trace_that_cannot_be_written_is_refused_first(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    result = CliRunner().invoke(
        app, ["generate", "--prompt", "x", "--model", "none", "--trace", str(tmp_path / name)]
    )
    assert result.exit_code == 1
    assert "trace" in result.stderr
    assert not (tmp_path / "pipe").is_file()


def test_a_trace_is_written_to_where_a_link_leads(tmp_path):
    (tmp_path / "link.json").symlink_to("there.json")
    with trace.recording(tmp_path / "link.json"), trace.span("something"):
        pass
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "there.json").read_text())
