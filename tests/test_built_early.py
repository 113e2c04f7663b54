"""Far contexts that are made while a prompt is read: here in the code that GPUs run."""

import gc
import os
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from weakref import ref

import pytest
import torch
from test_found_elsewhere import assert_same
from test_host_prompt import PARAMS, llm_for, many_blocks

from magicpig import LayerKV, LSHConfig, ScanConfig, WindowConfig
from magicpig.kv import device_index, host_prompt, hybrid_layer, places, segments
from magicpig.kv.base import LayerShape
from magicpig.kv.courier import Courier, Errand
from magicpig.kv.device_index import GrowingSegment
from magicpig.kv.host_prompt import HostPrompt
from magicpig.kv.hybrid_layer import HybridLayer
from magicpig.kv.places import give_back_pinned

__all__ = ["many_blocks"]  # of host memory, in all tests here


@pytest.mark.parametrize("method", ["scan:2:100%", "cpu-dense", "lsh:4:12"])
@pytest.mark.parametrize("length", [40, 90, 200])
def test_segments_are_built_while_a_prompt_is_read(monkeypatch, method, length):
    """All tokens are there, and in order, whenever the first ones were indexed; few are left."""
    monkeypatch.setattr("magicpig.attention.on_host.new_layer", HybridLayer)
    monkeypatch.setattr(segments, "LONGEST", 32)
    monkeypatch.setattr(segments, "LEAST_EARLY", 32)
    prompt = [i * 7 % 200 + 3 for i in range(length)]
    found, built = [], []
    build = hybrid_layer._build
    monkeypatch.setattr(hybrid_layer, "_build", lambda *args: built.append(args) or build(*args))
    for there in (False, True):
        llm = llm_for("llama", method, there)
        request = llm.engine.add(prompt, PARAMS, keep_prompt=True)
        while llm.engine.has_work:
            llm.engine.step()
        found.append(request)
    plain, early = (request.prompt for request in found)
    layers = 4 if method == "cpu-dense" else 2  # two are dense
    far, index = length - 12, early.layers[1].far.index
    sizes = segments.early_pieces(far, index) if far >= 32 else [far]
    assert early.layers[1].far.segment_sizes == sizes
    ends = sum(args[3] for args in built)
    assert ends == (layers * len(sizes) if far >= 32 else 0)
    tokens = sum(keys.shape[1] for args in built for keys, _ in args[2][0])
    assert tokens == (layers * far if ends else 0)
    for one, other in zip(plain.layers, early.layers, strict=True):
        assert one.num_tokens == other.num_tokens == length
        for mine, theirs in zip(one.read(), other.read(), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    if method != "lsh:4:12":
        tokens = [request.sequences[0].token_ids for request in found]
        assert tokens[0] == tokens[1]


def test_a_segment_that_fails_ends_its_request(monkeypatch):
    monkeypatch.setattr("magicpig.attention.on_host.new_layer", HybridLayer)
    monkeypatch.setattr(segments, "LONGEST", 32)
    monkeypatch.setattr(segments, "LEAST_EARLY", 8)
    llm = llm_for("llama", "scan:2:20%", True)

    def fails(*_):
        raise MemoryError("no more")

    with monkeypatch.context() as patched:
        patched.setattr("magicpig.kv.hybrid_layer._build", fails)
        with pytest.raises(MemoryError, match="no more"):
            llm.generate([5] * 150, PARAMS)
    assert llm.generate([5] * 150, PARAMS)


def with_places(monkeypatch, room):
    free = SimpleQueue()
    for _ in range(room):
        free.put(places.Place())
    monkeypatch.setattr(places, "free", free)
    return free


@pytest.mark.parametrize("room", [0, 1, 8])
def test_tables_grow_with_a_prompt_to_what_they_are_of_a_whole(monkeypatch, room):
    """Whether the device has hashed the keys before, or there was no room for that."""
    monkeypatch.setattr("magicpig.attention.on_host.new_layer", HybridLayer)
    free = with_places(monkeypatch, room)
    found = []
    for least in (64, 10_000):
        monkeypatch.setattr(segments, "LEAST_EARLY", least)
        sequence = llm_for("llama", "lsh:4:12", True, 50).read([i % 90 + 3 for i in range(600)])
        found.append(sequence.layers[1].far)
    grown, whole = found
    assert grown.segment_sizes == whole.segment_sizes == [588]
    assert_same(grown, whole)
    assert free.qsize() == room  # they were given back


@pytest.mark.parametrize("comes", [True, False])
def test_a_place_is_waited_for_while_the_device_is_behind(monkeypatch, comes):
    """Keys are hashed when it has them, and not all at the end; where the native core is behind
    nobody waits."""
    free, asked = SimpleQueue(), []

    class Underway:
        @property
        def is_done(self):
            asked.append(None)
            if comes and len(asked) == 5:
                free.put(3)
            return not comes and len(asked) > 5

    monkeypatch.setattr(places, "free", free)
    monkeypatch.setattr(places, "last_asked", deque())
    with pytest.raises(Empty):
        places.place_or_empty()
    done = Errand(None, torch.device("cpu"))
    places.last_asked.extend([done, Underway(), done])  # it is the middle one that counts
    if comes:
        assert places.place_or_empty() == 3
    else:
        with pytest.raises(Empty):
            places.place_or_empty()
    assert len(asked) >= 5


def test_whoever_got_no_place_is_waited_for_too(monkeypatch):
    """The device is still behind, and places come back."""
    kv = LayerKV(4, 2, 16, LSHConfig(4, 12), torch.float32)
    monkeypatch.setattr(places, "last_asked", deque(maxlen=6))
    for room in (0, 1):
        with_places(monkeypatch, room)
        growing = GrowingSegment(kv, 1000)
        growing.hash_ahead(torch.randn(2, 1000, 16))
        assert (growing._ahead is not None) is bool(room)
    assert len(places.last_asked) == 2


def test_a_place_keeps_its_memory_until_it_is_given_back(monkeypatch):
    """But for that of somebody who did not wait for the copies to it."""
    asked = []
    host_memory = Courier.host_memory

    def counted(self, shape, dtype):
        asked.append(shape)
        return host_memory(self, shape, dtype)

    monkeypatch.setattr(Courier, "host_memory", counted)
    monkeypatch.setattr(places, "empty_host_cache", lambda: None)  # there is no GPU
    free = with_places(monkeypatch, 1)
    kv = LayerKV(4, 2, 16, LSHConfig(4, 12), torch.float32)
    keys = torch.randn(2, 1000, 16)

    def grown(tokens, wanted=True):
        growing = GrowingSegment(kv.fork(), tokens)
        growing.add(keys[:, :tokens], keys[:, :tokens])
        growing.hash_ahead(keys[:, :tokens])
        assert growing._ahead
        if wanted:
            growing.finish_from(keys.device)
        return len(asked)

    assert [grown(500), grown(1000), grown(700), grown(1000)] == [1, 2, 2, 2]
    assert [grown(1000, wanted=False), grown(1000), grown(1000)] == [2, 3, 3]
    give_back_pinned()
    assert free.qsize() == 1
    assert grown(1000) == 4


@pytest.mark.parametrize(
    ("expected", "longest"),
    [(200, 65_536), (260, 65_536), (290, 65_536), (320, 65_536), (900, 52), (900, 64)],
)
@pytest.mark.parametrize("sinks", [0, 4])
def test_what_is_left_of_a_prompt_goes_where_it_belongs(monkeypatch, expected, longest, sinks):
    """Whether more tokens came than expected, or fewer, and all or most of them are far by now."""
    monkeypatch.setattr(segments, "LEAST_EARLY", 64)
    monkeypatch.setattr(segments, "LONGEST", longest)
    shape = LayerShape(4, 2, 16, torch.float32, torch.device("cpu"))
    prompt, window = HostPrompt(expected), WindowConfig(sinks, 24, 16)
    early, whole = (HybridLayer(shape, ScanConfig(exact_below=0), window) for _ in range(2))
    tokens = torch.randn(2, 1, 2, 260, 16)
    for first in range(0, 260, 50):
        prompt.append(*tokens[:, :, :, first : first + 50])
        early.build_early(prompt, expected)
    assert early.num_early > 0
    early.finish_early(prompt)
    whole.extend(*tokens[:, 0])
    assert early.num_tokens == whole.num_tokens == 260
    assert early.window.num_tokens <= sinks + 24 + 2 * 16 + 60
    for mine, theirs in zip(early.read(), whole.read(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("length", [40, 200])
def test_threads_finish_what_has_much_left(monkeypatch, length):
    monkeypatch.setattr("magicpig.attention.on_host.new_layer", HybridLayer)
    monkeypatch.setattr(segments, "LEAST_EARLY", 64)
    pools = []

    class Counted(ThreadPoolExecutor):
        def __init__(self, *args):
            pools.append(args)
            super().__init__(*args)

    monkeypatch.setattr("magicpig.engine.runner.ThreadPoolExecutor", Counted)
    llm_for("llama", "scan:2:20%", True).read([i % 90 + 3 for i in range(length)])
    assert len(pools) == (length == 40)


def test_prompts_that_are_let_go_of_are_not_built_on(monkeypatch):
    monkeypatch.setattr("magicpig.attention.on_host.new_layer", HybridLayer)
    monkeypatch.setattr(segments, "LEAST_EARLY", 16)
    monkeypatch.setattr(host_prompt, "SMALL_BLOCK", 1 << 20)  # a part of a prompt is added at once
    added, go_on = [], threading.Event()
    add = GrowingSegment.add

    def waits(self, *tokens):
        added.append(1)
        assert go_on.wait(10)
        add(self, *tokens)

    monkeypatch.setattr(GrowingSegment, "add", waits)
    engine = llm_for("llama", "lsh:4:12", True).engine
    request = engine.add([5] * 300, PARAMS)
    most = segments.BUILT_AT_ONCE - 1  # two layers: the third thread waits for one of them
    while len(added) < most:
        engine.step()
    for _ in range(4):
        engine.step()
    engine.abort(request.id)
    engine.step()
    gc.collect()
    go_on.set()
    time.sleep(0.1)
    assert len(added) == most  # those that had begun


def failing(monkeypatch, name):
    """Segments that cannot be made: references to those that were begun. name: what fails."""
    monkeypatch.setattr("magicpig.attention.on_host.new_layer", HybridLayer)
    monkeypatch.setattr(segments, "LEAST_EARLY", 16)
    monkeypatch.setattr(segments, "LONGEST", 64)
    kept = []

    def fails(self, *_):
        kept.append(ref(self))
        raise MemoryError("no more")

    monkeypatch.setattr(GrowingSegment, name, fails)
    return kept


@pytest.fixture
def fails_early(monkeypatch):
    return failing(monkeypatch, "finish_from")


def until(true):
    """A thread may be a moment late to let go of what it has done."""
    deadline = time.perf_counter() + 5
    while not true():
        assert time.perf_counter() < deadline
        time.sleep(0.01)


def test_what_fails_is_told_before_the_whole_prompt_is_read(fails_early):
    engine = llm_for("llama", "lsh:4:12", True).engine
    engine.add([5] * 1000, PARAMS)
    steps = 0
    while engine.has_work:
        events = engine.step()
        steps += 1
        time.sleep(0.01)
    assert isinstance(events[0].error, MemoryError)
    assert steps < 1000 // 16 / 2
    assert fails_early


def test_what_failed_is_let_go_of_at_once(fails_early):
    """When it is aborted: nothing is left for a collection."""
    engine = llm_for("llama", "lsh:4:12", True).engine
    gc.collect()
    gc.disable()
    try:
        request = engine.add([5] * 300, PARAMS)
        for _ in range(5):
            engine.step()
        layers = [layer.early for layer in engine._reading[1].cache.layers if layer.early]
        for job in [job for layer in layers for job in layer._early]:
            job.exception(10)
        del layers, job
        engine.abort(request.id)
        engine.step()
        assert fails_early
        until(lambda: not [known for known in fails_early if known()])
        until(lambda: places.free.qsize() == segments.MOST_AHEAD)
    finally:
        gc.enable()


def test_keys_are_hashed_by_the_cpu_where_a_device_has_no_memory(monkeypatch):
    monkeypatch.setattr("magicpig.attention.on_host.new_layer", HybridLayer)
    monkeypatch.setattr(segments, "LEAST_EARLY", 64)

    def read():
        sequence = llm_for("llama", "lsh:4:12", True, 50).read([i % 90 + 3 for i in range(600)])
        return sequence.layers[1].far

    there, asked = read(), []

    def no_memory(*_):
        asked.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device_index, "hash_keys", no_memory)
    here = read()
    assert asked
    assert here.segment_sizes == there.segment_sizes
    assert here.nbytes == there.nbytes
    assert places.free.qsize() == segments.MOST_AHEAD
    keys = torch.randn(2, 700, 16)
    kv = here.fork()
    device_index.append_from(torch.device("cpu"), kv, keys, keys)
    assert kv.num_tokens == here.num_tokens + 700


def test_what_fails_while_a_prompt_is_read_holds_nothing(monkeypatch):
    """Neither memory nor places for hashed keys."""
    kept = failing(monkeypatch, "add")
    llm = llm_for("llama", "lsh:4:12", True)
    with pytest.raises(MemoryError, match="no more"):
        llm.generate([5] * 300, PARAMS)
    hybrid_layer._builder(os.getpid()).submit(int).result()
    time.sleep(0.1)
    gc.collect()
    assert kept
    assert not [known() for known in kept if known()]
    assert places.free.qsize() == segments.MOST_AHEAD
