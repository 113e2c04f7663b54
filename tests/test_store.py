"""Contexts on disk: what comes back is what was saved, or a refusal that says why."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from zoo import loaded

from magicpig import LSHConfig, ScanConfig, WindowConfig, _native
from magicpig.context import Context
from magicpig.document import Document
from magicpig.engine.params import SamplingParams
from magicpig.kv import store
from magicpig.kv.base import LayerShape
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.sequence import SequenceKV, step
from magicpig.kv.store import StoreError
from magicpig.llm import LLM

HEADS, KV_HEADS, DIM = 4, 2, 32
SMALL = WindowConfig(sinks=2, local=6, block=16)
LSH = LSHConfig(5, 12, exact_below=64)
SCAN = ScanConfig(budget=0.1, exact_below=64)


def make_sequence(tokens=700, dtype=torch.float32, seed=0):
    """Four layers: sampled by tables and by codes, dense, sliding."""
    torch.manual_seed(seed)
    layers = []
    for index, span in ((LSH, None), (SCAN, None), (None, None), (None, 9)):
        layer = NativeLayer(LayerShape(HEADS, KV_HEADS, DIM, dtype), index, SMALL, span)
        for part in (tokens - 50, 50):
            layer.extend(*torch.randn(2, KV_HEADS, part, DIM).to(dtype).unbind())
        layers.append(layer)
    return SequenceKV(layers, tokens)


def outputs(sequence):
    torch.manual_seed(5)
    outs = []
    for _ in range(40):
        query, key, value = torch.randn(3, 1, HEADS, DIM).unbind()
        for layer in sequence.layers:
            dtype = layer.far.dtype
            tensors = (query.to(dtype), key[:, :KV_HEADS].to(dtype), value[:, :KV_HEADS].to(dtype))
            outs.append(step([layer], *tensors, DIM**-0.5))
            layer.settle()
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [51, 700])
def test_comes_back_as_it_was(tmp_path, dtype, tokens):
    sequence = make_sequence(tokens, dtype)
    store.save(tmp_path / "a.pig", sequence, {"name": "ä"})
    back, about = store.load(tmp_path / "a.pig")
    assert about == store.load_about(tmp_path / "a.pig") == {"name": "ä"}
    assert back.num_tokens == tokens
    assert back.nbytes.rows == sequence.nbytes.rows
    assert back.nbytes.index == sequence.nbytes.index
    assert torch.equal(outputs(back), outputs(sequence))
    assert os.listdir(tmp_path) == ["a.pig"]


def test_a_replaced_file_stays_what_it_was_for_who_has_it(tmp_path):
    path = tmp_path / "a.pig"
    store.save(path, make_sequence(seed=1), {})
    first, _ = store.load(path)
    store.save(path, make_sequence(seed=2), {})
    path.unlink()
    assert torch.equal(outputs(first), outputs(make_sequence(seed=1)))


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "a.pig"
    store.save(path, make_sequence(), {"x": 1})
    return path


def test_any_truncation_is_refused(saved):
    data = saved.read_bytes()
    cuts = [0, 1, 16, 17, 40, 61, 62, 500, 4095, 4096, len(data) // 2, len(data) - 1]
    for length in cuts:
        saved.write_bytes(data[:length])
        with pytest.raises(StoreError, match=r"truncated|not a magicpig context"):
            store.load(saved)
    saved.write_bytes(data + b"\0")
    with pytest.raises(StoreError, match="1 bytes too many"):
        store.load(saved)


def test_any_flipped_bit_is_refused(saved):
    data = bytearray(saved.read_bytes())
    header = len(store.MAGIC) + 12 + 32
    blocks = [i for i in range(4096, len(data), 997) if data[i]]  # not the padding
    for at in [3, 18, 25, 40, header, header + 100, *blocks[:: len(blocks) // 40]]:
        data[at] ^= 16
        saved.write_bytes(data)
        with pytest.raises(StoreError, match=r"a\.pig' (is|has)"):
            store.load(saved)
        data[at] ^= 16


def test_other_files_and_versions_are_refused(saved, tmp_path, monkeypatch):
    with pytest.raises(StoreError, match="No such file"):
        store.load(tmp_path / "none.pig")
    with pytest.raises(StoreError, match="Is a directory"):
        store.load(tmp_path)
    (tmp_path / "text").write_text("It was a dark and stormy night. " * 9)
    with pytest.raises(StoreError, match="is not a magicpig context"):
        store.load(tmp_path / "text")
    monkeypatch.setattr(store, "VERSION", 3)
    with pytest.raises(StoreError, match="has format version 2, this magicpig reads 3"):
        store.load(saved)


def test_tables_that_reach_outside_are_refused():
    """A file may be made by hand, with checksums that match."""
    layer = make_sequence().layers[0].far
    rows, tables = (np.array(array) for array in layer._native.segment_memory(0))
    fresh = NativeLayer(LayerShape(HEADS, KV_HEADS, DIM, torch.float32), LSH, SMALL).far._native
    tokens = layer.segment_sizes[0]

    def adopt(count, rows, tables):
        aligned = [_aligned(array) for array in (rows, tables)]
        fresh.adopt(count, *aligned)

    bad_ids, bad_starts, repeated = tables.copy(), tables.copy(), tables.copy()
    bad_ids[:2] = 255
    repeated[:2] = repeated[2:4]  # drawing would count a row more often than there are tables
    starts_at = -(-LSH.num_tables * tokens * 2 // 64) * 64
    bad_starts[starts_at + 8 : starts_at + 12] = 255
    for name, arguments in {
        "name rows that are not there": (tokens, rows, bad_ids),
        "tables name rows": (tokens, rows, bad_starts),
        "or one twice": (tokens, rows, repeated),
        "rows have the wrong size": (tokens - 1, rows, tables),
        "tables have the wrong size": (tokens, rows, tables[:-64]),
        "from 1 to 65,536 tokens": (0, rows, tables),
    }.items():
        with pytest.raises(ValueError, match=name):
            adopt(*arguments)
    with pytest.raises(ValueError, match="aligned"):
        fresh.adopt(tokens, _aligned(np.append(rows, 0).astype(np.uint8))[1:], tables[:0])
    with pytest.raises(ValueError, match="no such segment"):
        fresh.segment_memory(0)
    adopt(tokens, rows, tables)
    assert fresh.num_tokens == tokens


def test_codes_may_hold_anything_but_have_their_size():
    """Bytes made by hand draw some rows of the segment, whatever they are."""
    layer = make_sequence().layers[1].far
    rows, codes = (np.array(array) for array in layer._native.segment_memory(0))
    tokens = layer.segment_sizes[0]

    def adopted(codes):
        fresh = NativeLayer(LayerShape(HEADS, KV_HEADS, DIM, torch.float32), SCAN, SMALL).far
        fresh._native.adopt(tokens, _aligned(rows), _aligned(codes))
        return fresh

    for size in (64, len(codes) - 64, len(codes) + 64):
        with pytest.raises(ValueError, match="codes have the wrong size"):
            adopted(np.resize(codes, size))
    generator = np.random.default_rng(0)
    for fill in ("as it was", 0, 127, 128, 255, "random"):
        bad = codes.copy()
        if fill == "random":
            bad[:] = generator.integers(0, 256, len(bad))
        elif fill != "as it was":
            bad[:] = fill  # 255 and 127: factors, biases and means that are NaN
        far = adopted(bad)
        drawn, logs = far.sample(torch.randn(HEADS, DIM))
        for ids, log in zip(drawn, logs, strict=True):
            assert all(0 <= i < tokens for i in ids.tolist())
            assert ids.unique().numel() == ids.numel()
            assert (log <= 0).all()
            assert (log > -12).all()
        far.attend(torch.randn(HEADS, DIM))


def _aligned(array):
    room = np.empty(array.size + 64, dtype=np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + array.size] = array
    return room[start : start + array.size]


def test_a_full_disk_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()
    with monkeypatch.context() as patch:
        usage = type("Usage", (), {"free": 1000})
        patch.setattr("shutil.disk_usage", lambda _: usage)
        with pytest.raises(StoreError, match=r"takes .* MB, and 0 MB are free"):
            store.save(saved, make_sequence(), {})
    with monkeypatch.context() as patch:

        def full(_):
            raise OSError(28, "No space left on device")

        patch.setattr("os.fsync", full)
        with pytest.raises(StoreError, match="No space left"):
            store.save(saved, make_sequence(), {})
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == ["a.pig"]
    with pytest.raises(StoreError, match="no' for the context does not exist"):
        store.save(saved.parent / "no" / "b.pig", make_sequence(), {})


def test_what_is_no_ordinary_file_stays(saved):
    pipe = saved.parent / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(StoreError, match="is no ordinary file"):
        store.save(pipe, make_sequence(), {})
    assert pipe.is_fifo()
    with pytest.raises(StoreError, match="is a folder: name a file for the context"):
        store.save(saved.parent, make_sequence(), {})


WRITER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_store import make_sequence
from magicpig.kv import store
sequence = make_sequence(10_000, seed=int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
while True:
    store.save(Path(sys.argv[1]), sequence, {{"seed": int(sys.argv[2])}})
    print("saved", flush=True)
"""


def test_a_killed_writer_leaves_the_old_file_or_none(tmp_path):
    path = tmp_path / "a.pig"
    code = WRITER.format(tests=os.path.dirname(__file__))
    complete = 0
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), str(turn)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for turn in range(5)
    ]
    for turn, writer in enumerate(writers):
        assert writer.stdout.readline() == "ready\n"
        writer.stdin.write("go\n")
        writer.stdin.close()
        time.sleep(0.003 * 4**turn)  # 3 ms to 0.8 s: at its beginning, in the middle, at its end
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        if path.exists():
            assert store.load(path)[1]["seed"] <= turn
            complete += 1
    assert complete  # it was given the time
    store.save(path, make_sequence(), {})  # sweeps up what the killed ones left
    assert os.listdir(tmp_path) == ["a.pig"]


def make_llm(name="llama", **arguments):
    return LLM(loaded(name), window=SMALL, lsh=LSH, **arguments)


def test_questions_about_a_saved_text(tmp_path):
    text = "The keeper's name was Mora. " * 40
    llm = make_llm(method="full")
    document = Document(text, system="Be brief.")
    first, rest = document.parts(llm.tokenizer, "Who?")
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = llm.generate([first + rest], params)[0].completions[0].token_ids
    context = Context.read(llm, document)
    context.save(llm, tmp_path / "a.pig")
    again = Context.load(llm, tmp_path / "a.pig")
    for known in (context, again):
        ids = known.prompt_ids(llm, "Who?")
        generation = llm.generate_from(ids, params, known.kv)
        assert generation.completions[0].token_ids == expected
        assert generation.read_tokens == len(rest)


@pytest.mark.parametrize(
    ("saved", "asked"), [("lsh", "full"), ("full", "lsh"), ("scan", "lsh"), ("lsh", "scan")]
)
def test_a_context_can_be_asked_by_another_method(tmp_path, saved, asked):
    document, params = Document("The lamp burns oil. " * 40), SamplingParams(max_tokens=20)
    for method in (saved, asked):
        llm = make_llm(method=method)
        context = Context.read(llm, document)
        ids = context.prompt_ids(llm, "What?")
        expected = llm.generate_from(ids, params, context.kv)
        if method == saved:
            context.save(llm, tmp_path / "a.pig")
    known = Context.load(llm, tmp_path / "a.pig").kv
    answer = llm.generate_from(ids, params, known)
    assert answer.completions[0].token_ids == expected.completions[0].token_ids
    assert answer.completions[0].usage == expected.completions[0].usage


def test_a_context_belongs_to_its_model(tmp_path):
    path = tmp_path / "a.pig"
    llm = make_llm()
    Context.read(llm, Document("text " * 60)).save(llm, path)
    other = loaded("llama", seed=1)
    with pytest.raises(StoreError, match=r"made with the model llama, which .* these weights"):
        Context.load(LLM(other, window=SMALL, lsh=LSH), path)
    half = loaded("llama", dtype=torch.bfloat16)
    with pytest.raises(StoreError, match="llama in float32, which is not the llama in bfloat16"):
        Context.load(LLM(half, window=SMALL, lsh=LSH), path)
    store.save(tmp_path / "b.pig", make_sequence(), {"no": "document"})
    with pytest.raises(StoreError, match="holds no document"):
        Context.load(llm, tmp_path / "b.pig")
    changed = make_llm()
    changed.tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(StoreError, match="another tokenizer or chat template"):
        Context.load(changed, path)
    hybrid = make_llm("lfm2")
    with pytest.raises(StoreError, match=r"layer 0 is a .*cannot be saved"):
        Context.read(hybrid, Document("text " * 60)).save(hybrid, path)


def test_memory_that_is_left_is_known():
    assert 0 < _native.available_memory() < 2**50
