"""What callers get wrong is refused by name, before any work, and leaves the object usable."""

import re
import time
from pathlib import Path

import pytest
import torch

import magicpig
from magicpig import LayerKV, LSHConfig
from tests.processes import run_python

KEYS = torch.randn(2, 10, 16)
QUERIES = torch.randn(4, 16)


@pytest.fixture
def kv():
    kv = LayerKV(4, 2, 16, LSHConfig(3, 10, exact_below=0))
    kv.append(KEYS, KEYS)
    yield kv
    assert kv.num_tokens == 10
    out, _ = kv.attend(QUERIES, exact=True)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_heads": 5}, ValueError, "num_heads.*multiple of num_kv_heads.*5"),
        ({"num_heads": 0}, ValueError, "num_heads.*0"),
        ({"num_heads": 2**16}, ValueError, "num_heads.*65536"),
        ({"num_kv_heads": -1}, ValueError, "num_kv_heads.*-1"),
        ({"head_dim": 12}, ValueError, "head_dim.*12"),
        ({"head_dim": 264}, ValueError, "head_dim.*264"),
        ({"head_dim": 64.0}, ValueError, "head_dim.*64.0"),
        ({"dtype": torch.float64}, ValueError, "dtype.*float64"),
        ({"dtype": "bfloat16"}, ValueError, "dtype.*bfloat16"),
        ({"index": "lsh"}, TypeError, "index.*lsh"),
        ({"heads": 5}, TypeError, "heads"),
    ],
)
def test_geometry(arguments, error, message):
    with pytest.raises(error, match=message):
        LayerKV(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, **arguments})


BAD_TENSORS = [
    ([[1.0]], TypeError, "torch.Tensor, not list"),
    (KEYS.double(), TypeError, "float64"),
    (KEYS.int(), TypeError, "int32"),
    (KEYS[0], ValueError, r"shape \[2, .*\], not \[10, 16\]"),
    (torch.randn(3, 10, 16), ValueError, r"not \[3, 10, 16\]"),
    (torch.randn(2, 10, 24), ValueError, r"not \[2, 10, 24\]"),
    (torch.randn(2, 16, 10).mT, ValueError, r"contiguous.*call .contiguous\(\)"),
    (KEYS.to_sparse(), ValueError, "dense"),
    (KEYS.to("meta"), ValueError, "CPU.*meta"),
]


@pytest.mark.parametrize(("tensor", "error", "message"), BAD_TENSORS)
@pytest.mark.parametrize("name", ["keys", "values"])
def test_append(kv, name, tensor, error, message):
    with pytest.raises(error, match=f"{name}.*{message}"):
        kv.append(**{"keys": KEYS, "values": KEYS, name: tensor})


def test_keys_and_values_must_agree_in_length(kv):
    with pytest.raises(ValueError, match=r"values.*\[2, 10, 16\], not \[2, 9, 16\]"):
        kv.append(KEYS, KEYS[:, :9])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e19])
@pytest.mark.parametrize("name", ["keys", "values"])
def test_rows_that_are_not_finite_are_refused(kv, every_isa, name, bad):
    spoiled = torch.randn(2, 3000, 16)
    spoiled[1, 2345, 15] = bad
    fine = torch.randn(2, 3000, 16)
    with pytest.raises(ValueError, match=f"{name} at kv head 1, token 2345"):
        kv.append(**{"keys": fine, "values": fine, name: spoiled})


def test_values_beyond_the_stored_type_are_refused(every_isa):
    kv = LayerKV(1, 1, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"keys at kv head 0, token 0 .*range of float16"):
        kv.append(torch.full((1, 1, 8), 7e4), torch.zeros(1, 1, 8))
    kv.append(torch.full((1, 1, 8), 6.5e4), torch.zeros(1, 1, 8))
    assert kv.num_tokens == 1


@pytest.mark.parametrize(
    ("queries", "error", "message"),
    [
        (QUERIES[:3], ValueError, r"shape \[4, 16\], not \[3, 16\]"),
        (QUERIES[None], ValueError, r"not \[1, 4, 16\]"),
        (QUERIES.double(), TypeError, "float64"),
        (QUERIES.to("meta"), ValueError, "CPU"),
        (QUERIES.numpy(), TypeError, "ndarray"),
        (QUERIES.clone().fill_(float("nan")), ValueError, "head 0 is NaN"),
        (QUERIES * 1e19, ValueError, "norm exceeds"),
    ],
)
@pytest.mark.parametrize("method", ["attend", "sample"])
def test_queries(kv, method, queries, error, message):
    with pytest.raises(error, match=f"queries.*{message}"):
        getattr(kv, method)(queries)


@pytest.mark.parametrize("scale", [0.0, -1.0, 101, float("nan"), float("inf")])
def test_scale(kv, scale):
    with pytest.raises(ValueError, match="scale"):
        kv.attend(QUERIES, scale=scale)


@pytest.mark.parametrize("softcap", [0.0, -1.0, 1e7, float("nan")])
def test_softcap(kv, softcap):
    with pytest.raises(ValueError, match="softcap"):
        kv.attend(QUERIES, softcap=softcap)


@pytest.mark.parametrize("name", ["exact", "scale", "softcap"])
@pytest.mark.parametrize("value", ["yes", torch.tensor(1.0), [1]])
def test_options_of_the_wrong_type(kv, name, value):
    with pytest.raises(TypeError, match=name):
        kv.attend(QUERIES, **{name: value})


def test_batches(kv):
    with pytest.raises(ValueError, match="kvs"):
        magicpig.attend([], torch.randn(0, 4, 16))
    with pytest.raises(TypeError, match=r"kvs must be a list.*LayerKV"):
        magicpig.attend(kv, QUERIES[None])
    with pytest.raises(TypeError, match=r"kvs\[1\].*str"):
        magicpig.attend([kv, "kv"], torch.randn(2, 4, 16))
    with pytest.raises(ValueError, match=r"queries.*\[2, 4, 16\], not \[1, 4, 16\]"):
        magicpig.attend([kv, kv], QUERIES[None])
    other = LayerKV(4, 2, 16, LSHConfig(3, 11, exact_below=0))
    with pytest.raises(ValueError, match=r"kvs\[1\] has index .*num_tables=11"):
        magicpig.attend([kv, other], torch.randn(2, 4, 16))


def test_isa_and_threads():
    with pytest.raises(ValueError, match=r"'sse9'.*scalar"):
        magicpig.set_isa("sse9")
    with pytest.raises(TypeError, match="name"):
        magicpig.set_isa(512)
    with pytest.raises(ValueError, match=r"count.*0"):
        magicpig.set_num_threads(0)
    with pytest.raises(ValueError, match=r"count.*two"):
        magicpig.set_num_threads("two")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"MAGICPIG_ISA": "mmx"}, "ValueError: MAGICPIG_ISA is 'mmx'"),
        ({"MAGICPIG_NUM_THREADS": "0"}, "MAGICPIG_NUM_THREADS must be from 1 to 1024, not '0'"),
        ({"MAGICPIG_NUM_THREADS": "many"}, "MAGICPIG_NUM_THREADS must be.*'many'"),
    ],
)
def test_the_environment_is_checked_at_first_use(environment, message):
    code = "import magicpig; print('imported'); magicpig.isa(), magicpig.num_threads()"
    result = run_python(code, **environment)
    assert result.stdout == "imported\n"
    assert result.returncode == 1
    assert re.search(message, result.stderr)


def test_environment_variables_choose():
    result = run_python(
        "import magicpig; print(magicpig.isa(), magicpig.num_threads())",
        MAGICPIG_ISA="scalar",
        MAGICPIG_NUM_THREADS="3",
    )
    assert result.stdout == "scalar 3\n", result.stderr


def test_a_bad_row_is_found_before_anything_is_indexed():
    """The bad row lies in the second segment; indexing the first would take 30 times as long."""
    kv = LayerKV(1, 1, 64, LSHConfig(10, 600))
    keys = torch.randn(1, 65_536 + 10, 64)
    start = time.process_time()
    kv.append(keys, keys)
    good = time.process_time() - start
    keys[0, -1, 0] = float("nan")
    start = time.process_time()
    with pytest.raises(ValueError, match="token 65545"):
        kv.append(keys, keys)
    assert time.process_time() - start < good / 3


def test_running_out_of_memory_is_a_memory_error_and_changes_nothing():
    """In a process that may map 1 GiB more than it has: the rows fit, their index does not."""
    result = run_python(
        """
        import resource, torch
        from magicpig import LayerKV, LSHConfig
        kv = LayerKV(8, 8, 64, LSHConfig(10, 1200))
        few = torch.randn(8, 2000, 64)
        kv.append(few, few)
        many = torch.randn(8, 65_000, 64).bfloat16()
        before = kv.attend(few[:, 0])
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        limit = used + (1 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            kv.append(many, many)
        except MemoryError as error:
            print(str(error).split(" GB")[0][:18], end=": ")
            print("refused", kv.num_tokens, torch.equal(kv.attend(few[:, 0])[0], before[0]))
        kv.append(few[:, :1], few[:, :1])
        print(kv.num_tokens)
        """
    )
    assert result.stdout == "the system refused: refused 2000 True\n2001\n", result.stderr


def test_more_than_the_machine_has_is_refused_with_both_figures():
    kv = LayerKV(1, 1, 256)
    there = re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    tokens = int(there[1])  # of 1,024 bytes, key and value
    keys = torch.zeros(1, 1, 256).expand(1, tokens, 256)
    with pytest.raises(MemoryError, match=r"^\d+\.\d\d GB more were needed and \d+\.\d\d are left"):
        kv.append(keys, keys)
    assert kv.num_tokens == 0
