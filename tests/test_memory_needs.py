"""What requests need of the host's memory and of a GPU's, against what they come to hold."""

import itertools
import time
from dataclasses import replace

import pytest
import torch
from zoo import make_model

from magicpig import LayerKV, WindowConfig
from magicpig.attention.plan import make_plan
from magicpig.attention.scan import Scan
from magicpig.engine.memory import Memory, Needs
from magicpig.kv.far_tokens import FarTokens
from magicpig.kv.host_prompt import BLOCK, SMALL_BLOCK
from magicpig.kv.seats import Seats
from magicpig.kv.segments import appended
from tests.needs import CPU, DIM, GPU, KV_HEADS, LAYERS, VECTORS, WINDOW, codes_of, needs, of_8b


def test_on_a_cpu_all_is_the_hosts():
    for method in ("full", "lsh:4:12", "scan:2:1%", "topk:2%"):
        assert needs(method, CPU).of(1000, 100).device == 0


def test_far_contexts_are_the_hosts_and_windows_the_gpus():
    needed = needs("cpu-dense", GPU).of(1000, 100)
    own = 3 * 16 + 64  # blocks that were not merged yet, and the segment they become
    assert needed.host == LAYERS * (1000 - 4 - 8 + own) * VECTORS
    assert needed.device == 0
    window = 4 + 8 + 2 * 16
    for device, tokens in ((GPU, 1100), (CPU, 1100), (GPU, 20)):
        windows = needs("cpu-dense", device).windows(tokens - 10, 10)
        nbytes = LAYERS * (3 * min(window, tokens) // 2 + 64) * VECTORS
        assert windows == (Memory(0, nbytes) if device is GPU else Memory(nbytes))
    scan = needs("scan:2:1%", GPU).of(1000, 100)
    codes = LAYERS * codes_of(988)  # shorter segments have none
    assert scan.host == needed.host + codes
    assert scan.device == codes  # which draws by them
    on_cpu = needs(Scan(2, 0.01, target_error=0.1), GPU).of(1000, 100)
    assert on_cpu.device == 0


def test_prompts_take_more_while_they_are_read():
    pinned = 2 * SMALL_BLOCK  # keys and values of 1,000 tokens take 64,000 bytes each
    reading = needs("cpu-dense", GPU).reading(1000)
    assert reading == Memory(LAYERS * pinned, 3 * 1000 * VECTORS)
    assert needs("full", GPU).reading(1000) == Memory(0, 2 * 1000 * VECTORS)
    mixed = needs("lsh:4:12", GPU, dense=(0, 2)).reading(1000)
    ids, norms, borders = 2**16, 2**13, 2**11  # twelve tables of 1,024 keys of two heads, a float
    means, place = 2**8, 2**16  # for all of them
    found = ids + norms + borders + means
    assert mixed == Memory(2 * (pinned + found) + 6 * place, 3 * 1000 * VECTORS)
    mixed = needs("lsh:4:12", GPU, dense=(0, 2)).blocks(1000)
    sizes = norms, borders, means
    ids_and_place = {ids: 2 * ids + 6 * place}
    assert mixed == {SMALL_BLOCK: 2 * pinned, **ids_and_place, **{each: 2 * each for each in sizes}}
    mixed = needs("lsh:13:12", GPU, dense=(0, 2)).blocks(1000)  # ten words of 16 signs
    assert mixed == {SMALL_BLOCK: 2 * pinned, 2**16: 8 * 2**16, norms: 2 * norms, means: 2 * means}
    long = needs("cpu-dense", GPU).blocks(300_000)  # 19.2 MB
    assert long == {BLOCK: 2 * LAYERS * 3 * BLOCK}
    copies = 2 * 3 * 1000 * VECTORS  # of three layers at a time
    known = needs("cpu-dense", GPU).reading(1000, known=True)
    assert known == Memory(reading.host + copies, reading.device)
    assert needs("kv-stream", GPU).reading(1000) == reading
    assert needs("lsh:4:12", CPU).blocks(1000) == needs("full", GPU).blocks(1000) == {}
    codes = LAYERS * codes_of(988)  # which come when they are read
    assert needs("scan:2:1%", GPU).reading(1000).device == 3 * 1000 * VECTORS - codes
    none = Scan(2, 0.01, exact_below=2000)
    assert needs(none, GPU).reading(1000).device == 3 * 1000 * VECTORS
    assert needs("lsh:4:12", CPU).reading(1000) == Memory(1000 * VECTORS)


def test_layers_that_a_gpu_keeps_are_copied_when_they_grow():
    layer = 98_304 * 8 * 2 * 128 * 2
    assert of_8b("lsh:10:150").reading(98_304).device == 3 * layer
    for method in ("scan:2:1%", "scan:4:1%"):  # whose codes take more than two layers, later
        assert of_8b(method).reading(98_304).device == layer


def test_hashing_takes_memory_by_heads_and_tables():
    asked = [of_8b(method).workspace() for method in ("scan:2:1%", "lsh:10:150", "lsh:10:300")]
    hashing = [each - asked[0] for each in asked]
    keys = 65_536 * 8 * 2 * 128
    for nbytes, tables, words in ((hashing[1], 150, 94), (hashing[2], 300, 188)):
        borders = -(-8 * tables * 4 * 1025 // 256) * 256  # where each table's buckets begin
        found = 8 * (4 * 128 + 65_536 * (4 + 2 * tables)) + borders
        finding = 8 * (65_536 * 2 * words + tables * 8 * 4 * 1024)  # in eight parts
        assert nbytes == keys + 7 * found + 2 * finding
    many_bits = of_8b("lsh:13:115").workspace() - asked[0]  # not sorted there: signs are brought
    assert many_bits == keys + 7 * 8 * (4 * 128 + 65_536 * (4 + 2 * 94)) + 2 * 65_536 * 16 * 128


def test_what_is_found_of_keys_has_memory_of_places():
    """Six that are as large as the longest segment takes, and three threads that have none."""
    blocks = [of_8b(method).blocks(98_304) for method in ("lsh:10:150", "scan:2:1%")]
    tables = 2 * 8 * 150 * 65_536, 2 * 8 * 150 * 32_768  # take the next power of two
    assert 2**27 < tables[0] < 2**28 > 2 * tables[1]
    assert blocks[0][2**28] == (6 + 3) * 2**28
    assert blocks[0][2**27] == 3 * 2**27
    small = 3 * (2 * 2**12 + 2**21 + 2**20 + 2 * 2**23)  # means, norms, where buckets begin
    assert sum(blocks[0].values()) - sum(blocks[1].values()) == 9 * 2**28 + 3 * 2**27 + small


def test_dense_layers_count_on_the_gpu():
    sparse, dense = (needs("lsh:4:12", GPU, dense=d).of(1000, 100) for d in ((), (0, 2)))
    assert dense.device - sparse.device == 2 * (1000 - 4 - 8 + 98) * VECTORS
    assert dense.host < sparse.host
    full = needs("full", GPU).of(1000, 100)
    assert full.host == 0
    assert full.device > dense.device


def test_sliding_layers_are_where_the_model_is():
    here, there = (needs("lsh:4:12", device, "gemma3") for device in (CPU, GPU))
    assert here.windows(2000, 100).device == 0
    assert there.windows(2000, 100).host == 0
    assert there.windows(2000, 100).device > needs("lsh:4:12", GPU).windows(2000, 100).device


def test_completions_share_a_prompt():
    one, four = (needs("lsh:4:12", GPU).of(1000, 100, n) for n in (1, 4))
    assert four.host < 2 * one.host
    assert four.device == one.device == 0  # windows count by themselves
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


@pytest.mark.parametrize("device", [CPU, GPU])
def test_windows_of_mixed_lengths_were_estimated(device):
    """Side by side each is as long as the longest, and in the native core as long as it grew."""
    asked = needs("cpu-dense", device, block=256)
    lengths, most = (500, 20, 3), 0
    if device is GPU:
        windows = [Seats([torch.zeros(2, KV_HEADS, n, DIM).bfloat16()]) for n in lengths]
        seats = Seats([window.window(0) for window in windows])
        for _ in range(20):
            seats.append(*torch.zeros(2, 3, KV_HEADS, DIM).bfloat16())
        most = seats.keys.nbytes + seats.values.nbytes
    else:
        config, shape = WindowConfig(4, 8, 256), replace(asked._shape, device=CPU)
        layer = asked.plan.method.new_layer(shape, config, 1)
        for tokens in (300, *[1] * 220):
            layer.window.append(*torch.zeros(2, KV_HEADS, tokens, DIM).bfloat16())
            most = max(most, layer.window.nbytes)
        most *= 3
    windows = asked.windows(500, 20)
    counted = 3 * (windows.device or windows.host) / LAYERS
    assert most <= counted < 1.6 * most


def test_windows_of_sliding_layers_grow_by_steps():
    window = Seats([torch.zeros(2, KV_HEADS, 10, DIM).bfloat16()])
    span, most = 256, 0
    for _ in range(2000):
        window.append(*torch.zeros(2, 1, KV_HEADS, DIM).bfloat16())
        most = max(most, window.keys.nbytes + window.values.nbytes)
        if window.lengths[0] == span + 16:
            window.drop(0, 0, 16)
    config = make_model("gemma3").config
    layer_types = config.layer_types
    sliding, full = (layer_types.count(f"{kind}_attention") for kind in ("sliding", "full"))
    config.sliding_window = span
    counted = Needs(config, make_plan("full", LAYERS), WINDOW, torch.bfloat16, GPU, 512)
    near = 3 * (4 + 8 + 2 * 16) // 2 + 64
    shape = counted._shape
    vectors = shape.num_kv_heads * shape.row_bytes
    windows = counted.windows(3000, 2000).device // vectors - full * near
    assert most <= windows // sliding * VECTORS


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
@pytest.mark.parametrize(("prompt", "n"), [(100, 1), (600, 1), (600, 3), (60, 4), (20, 3)])
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
