"""Memory budgets: what requests need of the host's memory and of a GPU's, and what fits."""

import itertools
import time

import pytest
import torch
from zoo import loaded, make_model

from magicpig import LLM, LayerKV, SamplingParams, WindowConfig
from magicpig.attention.plan import make_plan
from magicpig.attention.scan import Scan
from magicpig.engine.memory import Memory, Needs, largest_batch, parse_bytes, there_is
from magicpig.engine.scheduler import Scheduler
from magicpig.engine.sequence import Request
from magicpig.kv.far_tokens import FarTokens
from magicpig.kv.seats import Seats
from magicpig.kv.segments import appended

CPU, GPU = torch.device("cpu"), torch.device("cuda")
WINDOW = WindowConfig(4, 8, 16)
LAYERS, KV_HEADS, DIM = 4, 2, 16
VECTORS = KV_HEADS * 2 * DIM * 2  # bytes of a token in a layer


def codes_of(tokens):
    return KV_HEADS * (-(-tokens // 16) * 16 * (DIM * 2 // 8 + 8) + 2 * 4 * DIM)  # and means


def needs(method, device, name="llama", dense=(), block=16):
    config = make_model(name).config
    plan = make_plan(method, LAYERS, dense_layers=dense)
    return Needs(config, plan, WindowConfig(4, 8, block), torch.bfloat16, device, 512)


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


@pytest.mark.parametrize(
    "text", ["", "9" * 400, "much", "-1GB", "0GB", "1.2.3GB", "GB", 0, "300GB/s"]
)
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="x must be a number and a unit"):
        parse_bytes("x", text)


@pytest.mark.parametrize("value", [None, True, 1.5, [3]])
def test_what_is_no_size_at_all(value):
    with pytest.raises(TypeError, match="x must be a number of bytes"):
        parse_bytes("x", value)


def test_on_a_cpu_all_is_the_hosts():
    for method in ("full", "lsh:4:12", "scan:2:1%", "topk:2%"):
        assert needs(method, CPU).of(1000, 100).device == 0


def test_far_contexts_are_the_hosts_and_windows_the_gpus():
    needed = needs("cpu-dense", GPU).of(1000, 100)
    own = 3 * 16 + 64  # blocks that were not merged yet, and the segment they become
    assert needed.host == LAYERS * (1000 - 4 - 8 + own) * VECTORS
    window = 4 + 8 + 2 * 16
    room = 3 * window // 2 + 64
    assert needed.device == LAYERS * room * VECTORS
    scan = needs("scan:2:1%", GPU).of(1000, 100)
    codes = LAYERS * codes_of(988)  # shorter segments have none
    assert scan.host == needed.host + codes
    assert scan.device == needed.device + codes  # which draws by them
    on_cpu = needs(Scan(2, 0.01, target_error=0.1), GPU).of(1000, 100)
    assert on_cpu.device == needed.device


def test_prompts_take_more_while_they_are_read():
    pinned = 2 * 2**16  # keys and values of 1,000 tokens take 64,000 bytes each
    reading = needs("cpu-dense", GPU).reading(1000)
    assert reading == Memory(LAYERS * pinned, 3 * 1000 * VECTORS)
    assert needs("full", GPU).reading(1000) == Memory(0, 2 * 1000 * VECTORS)
    mixed = needs("lsh:4:12", GPU, dense=(0, 2)).reading(1000)
    signs, norms = 2**14, 2**13  # of 1,024 keys of two heads: three words of 16 bits each, a float
    assert mixed == Memory(2 * (pinned + signs + norms), 3 * 1000 * VECTORS)
    for one, other in ((600, 1000), (1025, 2048), (70_000, 131_072)):  # blocks of the same sizes
        assert len({needs("lsh:4:12", GPU).reading(n).host for n in (one, other)}) == 1
    codes = LAYERS * codes_of(1000)  # which come when they are read
    assert needs("scan:2:1%", GPU).reading(1000).device == 3 * 1000 * VECTORS - codes
    assert needs("lsh:4:12", CPU).reading(1000) == Memory(1000 * VECTORS)


def test_dense_layers_count_on_the_gpu():
    sparse, dense = (needs("lsh:4:12", GPU, dense=d).of(1000, 100) for d in ((), (0, 2)))
    assert dense.device - sparse.device == 2 * (1000 - 4 - 8 + 98) * VECTORS
    assert dense.host < sparse.host
    full = needs("full", GPU).of(1000, 100)
    assert full.host == 0
    assert full.device > dense.device


def test_sliding_layers_are_where_the_model_is():
    here, there = (needs("lsh:4:12", device, "gemma3").of(2000, 100) for device in (CPU, GPU))
    assert here.device == 0
    assert 0 < there.device < here.host


def test_completions_share_a_prompt():
    one, four = (needs("lsh:4:12", GPU).of(1000, 100, n) for n in (1, 4))
    assert four.host < 2 * one.host
    assert four.device > one.device
    one, four = (needs("full", GPU).of(1000, 100, n) for n in (1, 4))
    assert four.device > 3.9 * one.device  # tensors are copied when they grow
    one, four = (needs("full", GPU).of(1000, 30, n) for n in (1, 4))
    assert four.device < 1.5 * one.device
    for method in ("streaming", "h2o:20%"):
        assert (
            needs(method, CPU).of(1000, 100, 8).host
            < needs("topk:2%", CPU).of(1000, 100, 8).host / 3
        )


@pytest.mark.parametrize("method", ["full", "lsh:4:12", "scan:2:1%", "topk:2%"])
def test_needs_are_known_at_once(method):
    start = time.perf_counter()
    for tokens in ((4000, 1_000_000, 64), (1000, 2**31 - 2000, 1)):
        needs(method, GPU).of(*tokens)
    assert time.perf_counter() - start < 2


def test_what_methods_put_side_by_side_is_there_for_each():
    """And takes as much as the longest of them, whatever they have of their own."""
    for method, device in itertools.product(("topk:2%", "quest:16:4%", "loki:25%:2%"), (CPU, GPU)):
        beside = needs(method, device).beside(1000, 30)
        own = beside.device if device is GPU else beside.host
        assert own >= LAYERS * (1000 - 4 - 8) * VECTORS
        assert own + beside.host + beside.device == 2 * own
    for method in ("full", "kv-stream", "lsh:4:12", "scan:2:1%"):
        assert needs(method, GPU).beside(1000, 30) == Memory()
    one, four = (needs("kv-stream", GPU).of(1000, 30, n) for n in (1, 4))
    assert one.host == LAYERS * 2 * 2**16  # keys and values of 988 tokens take 63,232 bytes each
    assert four.host == one.host
    assert four.device - one.device > 3 * 1000 * VECTORS


def test_short_sequences_beside_a_long_one_count_as_long():
    scheduler = Scheduler(Memory(0, 100), 8)

    def add(number, own, beside, n=1):
        params = SamplingParams(n=n)
        sizes = Memory(0, own), Memory(), None, False, Memory(0, beside)
        scheduler.add(Request(number, [1], params, *sizes))
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


@pytest.mark.parametrize("spec", ["topk:10%", "quest:16:20%", "loki:25%:10%", "h2o:50%"])
def test_what_batches_of_mixed_lengths_hold_was_estimated(spec):
    """Side by side, padded, and one by one."""
    asked = needs(spec, CPU)
    lengths, layers = (700, 100, 250), []
    for tokens in lengths:
        layer = asked.plan.method.new_layer(asked._shape, WINDOW, 1)
        vectors = torch.randn(KV_HEADS, tokens, DIM).bfloat16()
        layer.extend(vectors, vectors, torch.ones(KV_HEADS, tokens))
        layers.append(layer)
    new = torch.randn(3, KV_HEADS, DIM).bfloat16()
    layers[0].step(layers, torch.randn(3, 4, DIM).bfloat16(), new, new, 0.25, None)
    stacked = layers[0].seats.far
    held = stacked.nbytes + stacked.derived_nbytes
    assert 0.9 * held <= 3 * asked.beside(700, 2).host / LAYERS <= 1.2 * held


def test_windows_of_sliding_layers_grow_by_steps():
    window = Seats([torch.zeros(2, KV_HEADS, 10, DIM).bfloat16()])
    span, most = 256, 0
    for _ in range(2000):
        window.append(*torch.zeros(2, 1, KV_HEADS, DIM).bfloat16())
        most = max(most, window.keys.nbytes + window.values.nbytes)
        if window.lengths[0] == span + 16:
            window.drop(0, 0, 16)
    assert most <= needs("lsh:4:12", GPU)._room(span + 16) * VECTORS


def test_prompts_that_are_made_far_early_are_merged_earlier():
    asked = {device: needs("scan:2:1%", device, block=256) for device in (CPU, GPU)}
    for new, apart in ((1000, False), (13_000, True)):
        here, there = (asked[d].of(20_600, new, 8).host for d in (CPU, GPU))
        assert (there > 1.2 * here) is apart


@pytest.mark.parametrize("far", [0, 5, 200, 1000, 5000, 65536, 70000, 200_000])
@pytest.mark.parametrize("block", [16, 100, 256, 3000])
def test_segments_grow_as_the_native_core_lets_them(far, block):
    kv = LayerKV(1, 1, 8, None)
    some = torch.zeros(1, max(far, block), 8)
    kv.append(some[:, :far], some[:, :far])
    for _ in range(70):
        grown, kept = appended(kv.segment_sizes, block)
        before = kv.segment_sizes
        kv.append(some[:, :block], some[:, :block])
        assert kv.segment_sizes == grown
        assert grown[:kept] == before[:kept]


@pytest.mark.parametrize("spec", ["scan:2:1%", "lsh:4:12", "full", "topk:5%"])
@pytest.mark.parametrize(("prompt", "n"), [(100, 1), (600, 1), (600, 3), (60, 4)])
def test_what_sequences_hold_was_estimated(spec, prompt, n):
    """Far contexts that are being built and those that they will replace, shared ones once."""
    asked = needs(spec, CPU)
    layer = asked.plan.method.new_layer(asked._shape, WINDOW, 1)
    vectors = torch.randn(KV_HEADS, prompt, DIM).bfloat16()
    layer.extend(vectors, vectors)
    layers, most = [layer, *(layer.fork() for _ in range(1, n))], 0
    for new in range(500):
        for each in layers:
            keys = torch.randn(KV_HEADS, 1, DIM).bfloat16()
            each.step(
                [each],
                torch.randn(1, 4, DIM).bfloat16(),
                keys[None, :, 0],
                keys[None, :, 0],
                0.25,
                None,
            )
            each.settle()
        fars = [far for each in layers for far in far_contexts(each)]
        held = sum({key: size for far in fars for key, size in pieces_of(far)}.values())
        rows, index = asked._far(asked.plan.method, prompt, new + 1, n)
        assert held <= rows + index
        most = max(most, held)
    assert rows + index < 2.1 * most


def far_contexts(layer):
    job = getattr(layer, "_next_far", None)
    return [layer.far, *([job.result()] if job else [])]


def pieces_of(far):
    """Where parts of a far context are, and their bytes."""
    if isinstance(far, FarTokens):
        return [(x.data_ptr(), x.nbytes) for x in (far.keys, far.values)]
    parts = [part for i in range(len(far.segment_sizes)) for part in far._native.segment_memory(i)]
    return [(part.ctypes.data, part.nbytes) for part in parts if part.nbytes]


@pytest.mark.parametrize("method", ["full", "lsh:4:12", "scan:2:1%", "topk:2%"])
def test_the_largest_batch_is_the_largest_that_fits(method):
    for device in (CPU, GPU):
        asked, there = needs(method, device), Memory(50_000_000, 30_000_000)
        batch = largest_batch(asked, there, 3000, 50)
        assert batch > 0
        one, reading = asked.of(3000, 50), asked.reading(3000)
        one = one + asked.beside(3000, 50)
        assert (one * batch + reading).fits(there)
        assert not (one * (batch + 1) + reading).fits(there)
    assert largest_batch(needs("lsh:4:12", GPU), Memory(10**9, 1000), 3000, 50) == 0


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


def test_pinned_memory_is_given_back_where_others_need_it(monkeypatch):
    """It is kept by size: prompts of other sizes come to have it twice."""
    given_back = []
    monkeypatch.setattr("magicpig.engine.scheduler.give_back_pinned", lambda: given_back.append(1))
    scheduler = Scheduler(Memory(100, 1), 8)
    known = []
    for host, reading in ((10, 20), (10, 40), (10, 20), (5, 30), (60, 40), (10, 90)):
        request = Request(len(known), [1], SamplingParams(), Memory(host), Memory(reading))
        scheduler.add(request)
        assert scheduler.next_prompt() is request
        scheduler.drop(request)
        known.append((sum(scheduler._pinned), len(given_back)))
    assert known == [(20, 0), (60, 0), (60, 0), (90, 0), (40, 1), (90, 2)]
    together = Scheduler(Memory(80, 1), 8)
    for number, reading in enumerate((40, 20, 40, 20)):
        together.add(Request(number, [1], SamplingParams(), Memory(5), Memory(reading)))
        assert together.next_prompt()
    assert len(given_back) == 2  # there was room for all
    monkeypatch.setattr("magicpig.engine.scheduler.give_back_pinned", lambda: 1 / 0)
    request = Request(9, [1], SamplingParams(), Memory(5), Memory(45))
    together.add(request)
    with pytest.raises(ZeroDivisionError):
        together.next_prompt()
    assert request.id not in together._let_in  # it can be tried again
    assert list(together.waiting) == [request]


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
    request = Request(0, [1], SamplingParams(), Memory(2 * 10**9, 99_000_000), Memory())
    with pytest.raises(MemoryError, match=said):
        Scheduler(there, 8).add(request)


def test_limits_are_checked():
    asked = needs("lsh:4:12", CPU)
    assert there_is(asked, 0, "1GB", None) == Memory(10**9)
    assert there_is(asked, 0, None, None).host > 10**8
    with pytest.raises(ValueError, match="gpu_memory limits a GPU; the model is on the CPU"):
        there_is(asked, 0, None, "24GiB")
    with pytest.raises(ValueError, match="cpu_memory must be a number and a unit"):
        LLM(loaded("llama"), cpu_memory="plenty")
    with pytest.raises(ValueError, match="the same: give one"):
        LLM(loaded("llama"), cpu_memory="1GB", memory_bytes=10**9)
    with pytest.raises(ValueError, match=r"gpu_memory is 1\.00 GB, and 1\.6\d GB are needed"):
        there_is(needs("scan:2:1%", GPU), 10**9, "1GB", "1GB")
    hashing = needs("lsh:4:12", GPU).workspace() - needs("scan:2:1%", GPU).workspace()
    assert hashing > 10**8
