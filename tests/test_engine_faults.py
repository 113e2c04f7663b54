"""The engine when something fails: what took part in it ends, and nothing else is spoiled."""

import gc

import pytest
import torch

from magicpig.engine.sequence import Finish
from magicpig.hf.cache import BatchLayer
from magicpig.kv.sequence import SequenceKV
from tests.engines import PROMPTS, collect, greedy, make_llm

STEP = "magicpig.engine.runner.step"


def test_a_prompt_that_fails_fails_alone(monkeypatch):
    llm = make_llm()
    expected = collect(llm, [llm.engine.add(PROMPTS[0], greedy())])
    prefill = llm.engine.runner.prefill

    def failing(state):
        if len(state.prompt_ids) == 240:
            raise RuntimeError("out of luck")
        return prefill(state)

    monkeypatch.setattr(llm.engine.runner, "prefill", failing)
    bad = llm.engine.add(PROMPTS[2], greedy(n=2))
    good = llm.engine.add(PROMPTS[0], greedy())
    events = list(llm.run([bad, good]))
    errors = [event for event in events if event.error]
    assert [(e.request_id, e.index, str(e.error)) for e in errors] == [
        (bad.id, 0, "out of luck"),
        (bad.id, 1, "out of luck"),
    ]
    assert [[s.token_ids for s in good.sequences]] == expected
    with pytest.raises(RuntimeError, match="out of luck"):
        llm.generate([PROMPTS[2], PROMPTS[0]], greedy())


def keys_and_values():
    gc.collect()
    return sum(type(x) in (SequenceKV, BatchLayer) for x in gc.get_objects())


@pytest.mark.parametrize("place", ["prefill", "decode"])
def test_errors_hold_no_memory(monkeypatch, place):
    """Of what they ended, for as long as somebody has them."""
    llm = make_llm()
    before = keys_and_values()
    failing = getattr(llm.engine.runner, place)

    def fails(first, *others):
        held = failing(first, *others)
        if held is not None:
            try:
                raise KeyError(len(held))
            except KeyError:
                error = ValueError("out of luck")
                error.__cause__ = error
                raise error  # noqa: B904

    monkeypatch.setattr(llm.engine.runner, place, fails)
    request = llm.engine.add(PROMPTS[2], greedy())
    errors = [event.error for event in llm.run([request]) if event.error]
    assert len(errors) == 1
    del request
    assert keys_and_values() == before
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        raise errors[0]
    assert "fails" in [entry.name for entry in raised.traceback]


def test_what_failed_is_gone_when_others_go_on(monkeypatch):
    """A prompt that fails for want of memory leaves it to the step that follows."""
    llm = make_llm()
    good = llm.engine.add(PROMPTS[0], greedy())
    llm.engine.step()
    runner, held = llm.engine.runner, []
    decode, forward = runner.decode, runner._forward

    def fails(*arguments):
        cache = arguments[2]
        forward(*arguments)
        raise MemoryError(f"no more for {len(cache.layers)} layers")

    def counts(*arguments):
        held.append(keys_and_values())
        return decode(*arguments)

    monkeypatch.setattr(runner, "decode", counts)
    llm.engine.step()
    llm.engine.add(PROMPTS[2], greedy())
    with monkeypatch.context() as patch:
        patch.setattr(runner, "prefill", lambda prefill: fails([[5]], [[0]], prefill.cache))
        events = llm.engine.step()
    assert [type(event.error) for event in events if event.error] == [MemoryError]
    assert held[0] == held[1]
    assert not good.sequences[0].finish


def test_a_pass_that_fails_is_let_go_of(monkeypatch):
    """Between a layer's cache and its attention, too, and without another pass."""
    llm = make_llm()
    llm.generate(PROMPTS[2], greedy(2))
    before = keys_and_values()

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("magicpig.hf.tagged.TaggedLayer.receive", interrupt)
    request = llm.engine.add(PROMPTS[2], greedy())
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    llm.engine.step()
    del request
    assert keys_and_values() == before


def test_sequences_end_whatever_their_costs_say(monkeypatch):
    """After a device has failed it may tell nothing any more."""
    llm = make_llm()
    requests = [llm.engine.add(prompt, greedy()) for prompt in PROMPTS[:2]]
    for _ in range(4):
        llm.engine.step()
    monkeypatch.setattr(llm.engine.runner, "decode", lambda *_: 1 / 0)
    monkeypatch.setattr(SequenceKV, "cost", property(lambda _: 1 / 0))
    events = llm.engine.step()
    assert {event.request_id for event in events if event.error} == {r.id for r in requests}
    assert not llm.engine.has_work
    assert not llm.engine.scheduler._let_in
    llm = make_llm()
    last = [event for event in llm.run([llm.engine.add(PROMPTS[0], greedy())]) if event.finish]
    assert [event.finish for event in last] == [Finish.LENGTH]


def test_numbers_that_are_not_finite_fail_alone():
    llm = make_llm()
    expected = collect(llm, [llm.engine.add(PROMPTS[0], greedy())])
    embedding = llm.engine.runner.model.get_input_embeddings().weight
    with torch.no_grad():
        embedding[299] = float("nan")  # in a prompt, so prefill meets it
    bad = llm.engine.add([299, 5, 6], greedy())
    good = llm.engine.add(PROMPTS[0], greedy())
    finishes = {e.request_id: e.finish for e in llm.run([bad, good]) if e.finish}
    assert finishes == {bad.id: Finish.ERROR, good.id: Finish.LENGTH}
    assert [[s.token_ids for s in good.sequences]] == expected


def test_a_step_that_fails_ends_what_took_part_and_no_more(monkeypatch):
    llm = make_llm()
    first = llm.engine.add(PROMPTS[0], greedy())
    for _ in range(5):
        llm.engine.step()
    decode = llm.engine.runner.decode
    monkeypatch.setattr(llm.engine.runner, "decode", lambda *_: 1 / 0)
    events = llm.engine.step()
    assert [event.finish for event in events] == [Finish.ERROR]
    assert isinstance(events[0].error, ZeroDivisionError)
    assert first.sequences[0].token_ids
    monkeypatch.setattr(llm.engine.runner, "decode", decode)
    assert len(collect(llm, [llm.engine.add(PROMPTS[1], greedy())])[0][0]) == 30


def test_an_interrupt_ends_what_took_part_and_no_more(monkeypatch, short_parts):
    llm = make_llm()
    expected = collect(llm, [llm.engine.add(PROMPTS[0], greedy())])
    waiting = None
    for in_prefill in (True, False):
        request = llm.engine.add(PROMPTS[2], greedy(n=2))
        for _ in range(3 if in_prefill else 12):
            llm.engine.step()
        waiting = llm.engine.add(PROMPTS[0], greedy())
        attend, calls = "magicpig.hf.cache.exact_attention" if in_prefill else STEP, []

        def interrupt(*_, calls=calls):
            calls.append(1)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(attend, interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.engine.step()
        assert calls
        events = llm.engine.step()
        ended = [event for event in events if event.request_id == request.id]
        assert [event.finish for event in ended] == [Finish.ERROR] * 2
        assert collect(llm, [waiting]) == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize(
    ("steps", "place"),
    [(0, "runner.begin"), (0, "scheduler.start"), (0, "_choose"), (3, "_choose"), (3, "_take")],
)
def test_an_error_anywhere_in_a_step_ends_what_took_part(monkeypatch, error, steps, place):
    llm = make_llm()
    expected = collect(llm, [llm.engine.add(PROMPTS[0], greedy())])
    request = llm.engine.add(PROMPTS[0], greedy(n=2))
    events = [event for _ in range(steps) for event in llm.engine.step()]
    waiting = llm.engine.add(PROMPTS[0], greedy()) if steps == 0 else None
    *path, name = place.split(".")
    owner = getattr(llm.engine, path[0]) if path else llm.engine
    real = getattr(owner, name)

    def fail(*arguments, **options):
        if name == "_take":
            real(*arguments)
        raise error("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                llm.engine.step()
        else:
            events += llm.engine.step()
    events += llm.engine.news()
    ended = [e for e in events if e.request_id == request.id and e.finish]
    assert [event.finish for event in ended] == [Finish.ERROR] * 2
    assert all(isinstance(event.error, error) for event in ended)
    waiting = waiting or llm.engine.add(PROMPTS[0], greedy())
    assert collect(llm, [waiting]) == expected
    assert not llm.engine.has_work
    assert not llm.engine.scheduler._let_in


def test_a_callback_that_fails_leaves_nothing_behind():
    llm = make_llm()
    with pytest.raises(ZeroDivisionError) as kept:  # with its traceback, and all that hangs on it
        llm.generate(PROMPTS[:2], greedy(), lambda event: 1 / 0)
    assert kept.value
    assert not llm.engine.has_work


def test_a_sampler_or_detokenizer_that_fails_fails_alone(monkeypatch):
    llm = make_llm()
    expected = collect(llm, [llm.engine.add(PROMPTS[0], greedy())])
    for part, name in (("sampler", "choose"), ("detokenizer", "push")):
        bad, good = llm.engine.add(PROMPTS[3], greedy()), llm.engine.add(PROMPTS[0], greedy())
        for _ in range(4):
            llm.engine.step()
        monkeypatch.setattr(getattr(bad.sequences[0], part), name, lambda _: 1 / 0)
        assert [collect(llm, [good])] == [expected]
        assert bad.sequences[0].finish == Finish.ERROR
