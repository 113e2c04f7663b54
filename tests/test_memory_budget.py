"""Memory budgets: limits, and who is let in."""

import pytest
import torch
from zoo import loaded

from magicpig import LLM, SamplingParams
from magicpig.engine.memory import Memory, Needed, largest_batch, parse_bytes, there_is, usable
from magicpig.engine.scheduler import Scheduler
from magicpig.engine.sequence import Request
from magicpig.nn import PackedLinear
from tests.needs import CPU, GPU, needs


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("24GiB", 24 * 2**30),
        ("48GB", 48e9),
        (" 1.5 tb", 1.5e12),
        (7, 7),
        ("64mib", 2**26),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_sizes_are_read(text, value):
    assert parse_bytes("x", text) == value


@pytest.mark.parametrize("text", ["", "9" * 400, "much", "-1GB", "0GB", "1.2.3GB", "GB", "300GB/s"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="x must be a number and a unit"):
        parse_bytes("x", text)


@pytest.mark.parametrize("value", [None, True, 1.5, [3]])
def test_what_is_no_size_at_all(value):
    with pytest.raises(TypeError, match="x must be a number of bytes"):
        parse_bytes("x", value)


def test_short_sequences_beside_a_long_one_count_as_long():
    scheduler = Scheduler(Memory(0, 100), 8)

    def add(number, own, beside, n=1):
        params = SamplingParams(n=n)
        needed = Needed(Memory(0, own), beside=Memory(0, beside))
        scheduler.add(Request(number, [1], params, needed))
        return scheduler.next_prompt() is not None

    assert add(0, 40, 90)  # alone it has nobody beside it
    assert not add(1, 1, 1)
    scheduler = Scheduler(Memory(0, 100), 8)
    assert add(0, 40, 10)
    assert add(1, 5, 15)  # 45 and twice 15
    assert not add(2, 11, 1)  # 56 and three times 15
    scheduler = Scheduler(Memory(0, 100), 8)
    with pytest.raises(MemoryError):
        add(0, 40, 31, n=2)
    assert add(1, 40, 30, n=2)


def test_windows_count_as_the_longest_of_a_batch():
    scheduler = Scheduler(Memory(0, 100), 8)

    def let_in(number, windows):
        request = Request(number, [1], SamplingParams(), Needed(windows=Memory(0, windows)))
        scheduler.add(request)
        return scheduler.next_prompt() is request

    assert let_in(0, 2)
    assert let_in(1, 33)
    assert let_in(2, 1)
    assert not let_in(3, 1)  # four times 33


@pytest.mark.parametrize("method", ["full", "lsh:4:12", "scan:2:1%", "topk:2%"])
def test_the_largest_batch_is_the_largest_that_fits(method):
    for device in (CPU, GPU):
        asked, there = needs(method, device), Memory(50_000_000, 30_000_000)
        batch = largest_batch(asked, there, 3000, 50)
        assert batch > 0
        one, reading = asked.of(3000, 50), asked.reading(3000)
        one = one + asked.beside(3000, 50) + asked.windows(3000, 50)
        assert (one * batch + reading).fits(there)
        assert not (one * (batch + 1) + reading).fits(there)
    assert largest_batch(needs("lsh:4:12", GPU), Memory(10**9, 1000), 3000, 50) == 0


def test_what_there_is_is_looked_at_when_the_weights_are_packed(monkeypatch):
    """Which takes memory, where the weights were only mapped before."""
    here, seen = loaded("llama", dtype=torch.bfloat16), []
    packed = Memory(12345)

    def looked(*_):
        seen.append(any(isinstance(m, PackedLinear) for m in here.model.modules()))
        return packed if seen[-1] else Memory(2**40)

    monkeypatch.setattr("magicpig.llm.there_is", looked)
    assert LLM(here).engine.scheduler.budget == packed
    assert seen == [False, True]


def test_requests_wait_until_there_is_room():
    asked = needs("lsh:4:12", CPU)
    needed = (asked.of(200, 20) + asked.reading(200)).host
    llm = LLM(loaded("llama", dtype=torch.bfloat16), method="lsh:4:12", cpu_memory=3 * needed)
    assert llm.largest_batch(200, 20) in (1, 2, 3)  # its window is larger than the one above
    together = 0
    for prompt in range(6):
        llm.engine.add([prompt + 5] * 200, SamplingParams(max_tokens=20, ignore_eos=True))
    while llm.engine.has_work:
        llm.engine.step()
        together = max(together, len(llm.engine.scheduler.running))
    assert together <= llm.largest_batch(200, 20)


def pinning(host, blocks):
    """What a request needs that is read to blocks of these sizes."""
    return Needed(Memory(host), Memory(sum(blocks.values())), blocks=blocks)


def test_pinned_memory_is_given_back_where_others_need_it(monkeypatch):
    """It is kept by the size of blocks: prompts with others come to have it twice."""
    given_back = []
    monkeypatch.setattr("magicpig.engine.scheduler.give_back_pinned", lambda: given_back.append(1))
    scheduler = Scheduler(Memory(100, 1), 8)
    known = []
    for host, blocks in (
        (10, {8: 16}),
        (10, {8: 40}),  # of which it has 16
        (10, {8: 16, 1: 4}),
        (5, {1: 30}),
        (60, {8: 40}),  # with what is kept of the others it would be 130
        (10, {8: 40, 1: 50}),
    ):
        request = Request(len(known), [1], SamplingParams(), pinning(host, blocks))
        scheduler.add(request)
        assert scheduler.next_prompt() is request
        scheduler.drop(request)
        known.append((dict(scheduler._blocks), len(given_back)))
    assert known == [
        ({8: 16}, 0),
        ({8: 40}, 0),
        ({8: 40, 1: 4}, 0),
        ({8: 40, 1: 30}, 0),
        ({8: 40}, 1),
        ({8: 40, 1: 50}, 1),
    ]
    together = Scheduler(Memory(80, 1), 8)
    for number, blocks in enumerate(({8: 40}, {1: 20}, {8: 40}, {1: 20})):
        together.add(Request(number, [1], SamplingParams(), pinning(5, blocks)))
        assert together.next_prompt()
    assert len(given_back) == 1  # there was room for all
    monkeypatch.setattr("magicpig.engine.scheduler.give_back_pinned", lambda: 1 / 0)
    request = Request(9, [1], SamplingParams(), pinning(5, {8: 45}))
    together.add(request)
    with pytest.raises(ZeroDivisionError):
        together.next_prompt()
    assert request.id not in together._let_in  # it can be tried again
    assert list(together.waiting) == [request]


def test_pinned_far_contexts_are_given_back_when_they_are_gone(monkeypatch):
    given_back = []
    monkeypatch.setattr("magicpig.engine.scheduler.give_back_pinned", lambda: given_back.append(1))
    scheduler, known = Scheduler(Memory(100, 1), 8), []
    for number, host in enumerate((30, 40, 20, 50)):
        request = Request(number, [1], SamplingParams(), Needed(Memory(host), pinned=host))
        scheduler.add(request)
        assert scheduler.next_prompt() is request
        scheduler.drop(request)
        scheduler.drop(request)  # counts once
        known.append((scheduler._pinned_before, len(given_back)))
    assert known == [(30, 0), (70, 0), (90, 0), (50, 1)]
    for method, device, pins in (
        ("kv-stream", GPU, True),
        ("kv-stream", CPU, False),
        ("lsh:4:12", GPU, False),
    ):
        needed = needs(method, device).request(1000, 30, 1, False)
        assert needed.pinned == (needed.own.host if pins else 0)
        assert needed.own.host


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (Memory(10_000, 10**9), r"may need 2\.00 GB for .* 0\.01 MB are there"),
        (
            Memory(10**10, 5 * 10**7),
            r"may need 99\.00 MB of the GPU's memory .* 50\.00 MB are there",
        ),
    ],
)
def test_small_sizes_are_told_in_megabytes(there, said):
    request = Request(0, [1], SamplingParams(), Needed(Memory(2 * 10**9, 99_000_000)))
    with pytest.raises(MemoryError, match=said):
        Scheduler(there, 8).add(request)


def test_limits_are_no_larger_than_what_a_gpu_has(monkeypatch):
    """Of which others may have some."""
    asked, limits = needs("scan:2:1%", GPU), []
    set_limit = "set_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, set_limit, lambda share, _: limits.append(share))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 * 10**9, 24 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10**9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10**9)
    all_of_it = there_is(asked, 10**9, "1GB", None)
    assert 7.2e9 < all_of_it.device < 7.8e9
    assert there_is(asked, 10**9, "1GB", "80GiB") == all_of_it
    assert set(limits) == {1.0}
    with monkeypatch.context() as patch:  # of another model in this process
        patch.setattr(torch.cuda, "memory_allocated", lambda _: 3 * 10**9)
        patch.setattr(torch.cuda, "memory_reserved", lambda _: 3 * 10**9)
        assert there_is(asked, 10**9, "1GB", None) == all_of_it
    half = there_is(asked, 10**9, "1GB", "5GB")
    assert 2.6e9 < half.device < 2.8e9
    assert limits[-1] == pytest.approx(4.05 / 24)
    # CUDA may have taken less than it will: all that there is, is the most that it can be
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (22_500_000_000, 24 * 10**9))
    assert there_is(asked, 10**9, "1GB", None).device == usable(asked, 10**9, 24 * 10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**8, 24 * 10**9))
    for limit in (None, "80GiB"):
        with pytest.raises(ValueError, match=r"the GPU has 2\.05 GB, and 2\.15 GB are needed"):
            there_is(asked, 10**9, "1GB", limit)


def test_the_largest_batch_is_one_that_an_engine_runs():
    llm = LLM(loaded("llama"), method="lsh:4:12", max_sequences=3, cpu_memory="10GB")
    assert llm.largest_batch(100, 20) == 3
    assert llm.largest_batch(100, 10**9) == 3  # no longer than the model's context
    for tokens in (0, llm.max_length, 10**9):
        with pytest.raises(ValueError, match=f"prompt_tokens must be from 1 to .* not {tokens}"):
            llm.largest_batch(tokens, 10)
    for given in ((100, 0), (100, -5), (100.5, 10), ("100", 10)):
        with pytest.raises(ValueError, match=r"(prompt|new)_tokens must be (from|an int)"):
            llm.largest_batch(*given)


def test_limits_are_checked():
    asked = needs("lsh:4:12", CPU)
    assert there_is(asked, 0, "1GB", None) == Memory(10**9)
    assert there_is(asked, 0, None, None).host > 10**8
    assert 10**9 < there_is(asked, 0, "9999TiB", None).host < 10**15  # no more than there is
    with pytest.raises(ValueError, match="cpu_memory must be above 0, not -5"):
        there_is(asked, 0, -5, None)
    with pytest.raises(ValueError, match="gpu_memory limits a GPU; the model is on the CPU"):
        there_is(asked, 0, None, "24GiB")
    with pytest.raises(ValueError, match="cpu_memory must be a number and a unit"):
        LLM(loaded("llama"), cpu_memory="plenty")
    with pytest.raises(ValueError, match="the same: give one"):
        LLM(loaded("llama"), cpu_memory="1GB", memory_bytes=10**9)
    with pytest.raises(ValueError, match=r"gpu_memory is 1\.00 GB, and 2\.15 GB are needed"):
        there_is(needs("scan:2:1%", GPU), 10**9, "1GB", "1GB")
