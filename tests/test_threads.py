"""Many threads, forked processes, and nothing started at import."""

import os
import threading

import pytest
import torch

import magicpig
from magicpig import LayerKV, LSHConfig, ScanConfig, _native
from tests.processes import run_python

INDEXES = [LSHConfig(4, 30, exact_below=0), ScanConfig(budget=0.05, exact_below=0)]


@pytest.mark.parametrize("index", INDEXES)
def test_many_threads_attend_while_another_forks_and_appends(index):
    keys, values = torch.randn(2, 3000, 32), torch.randn(2, 3000, 32)
    kv = LayerKV(4, 2, 32, index, torch.float32)
    kv.append(keys[:, :1000], values[:, :1000])
    fixed = kv.fork()
    queries = torch.randn(4, 32)
    expected = fixed.attend(queries)[0]
    done, failures = threading.Event(), []

    def attend_until_done():
        try:
            while not done.is_set():
                assert torch.equal(fixed.attend(queries)[0], expected)
                assert torch.isfinite(kv.attend(queries)[0]).all()
                kv.fork().append(keys[:, :5], values[:, :5])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=attend_until_done) for _ in range(4)]
    for thread in threads:
        thread.start()
    for first in range(1000, 3000, 10):
        kv.append(keys[:, first : first + 10], values[:, first : first + 10])
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert kv.num_tokens == 3000
    whole = LayerKV(4, 2, 32, index, torch.float32)
    whole.append(keys, values)
    torch.testing.assert_close(
        kv.attend(queries, exact=True)[0], whole.attend(queries, exact=True)[0], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("index", INDEXES)
def test_results_do_not_depend_on_the_number_of_threads(index):
    kv = LayerKV(4, 2, 32, index, torch.float32)
    kv.append(torch.randn(2, 20_000, 32), torch.randn(2, 20_000, 32))
    queries = torch.randn(4, 32)
    before = magicpig.num_threads()
    try:
        for exact in (True, False):
            results = []
            for count in (1, 2, 7):
                magicpig.set_num_threads(count)
                assert magicpig.num_threads() == count
                results.append(kv.attend(queries, exact=exact)[0])
            assert torch.equal(results[0], results[1])
            assert torch.equal(results[0], results[2])
    finally:
        magicpig.set_num_threads(before)


def test_a_forked_process_has_working_threads():
    code = """
    import os, torch, magicpig
    magicpig.set_num_threads(3)
    kv = magicpig.LayerKV(2, 2, 32, magicpig.LSHConfig(4, 10))
    kv.append(torch.randn(2, 5000, 32), torch.randn(2, 5000, 32))
    queries = torch.randn(2, 32)
    expected = kv.attend(queries)[0]
    child = os.fork()
    if child == 0:
        same = torch.equal(kv.attend(queries)[0], expected)
        kv.append(torch.randn(2, 5000, 32), torch.randn(2, 5000, 32))
        os._exit(0 if same and kv.num_tokens == 10_000 and magicpig.num_threads() == 3 else 1)
    assert torch.equal(kv.attend(queries)[0], expected)
    assert os.waitpid(child, 0)[1] == 0
    """
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_a_process_forked_in_the_middle_of_an_append_can_append():
    code = """
    import os, threading, time, torch, magicpig
    kv = magicpig.LayerKV(2, 2, 64, magicpig.LSHConfig(10, 600))
    keys = torch.randn(2, 60_000, 64)
    thread = threading.Thread(target=kv.append, args=(keys, keys))
    thread.start()
    time.sleep(0.1)
    assert kv.num_tokens == 0, "the append was over before the fork"
    child = os.fork()
    if child == 0:
        kv.append(keys[:, :10], keys[:, :10])
        os._exit(kv.num_tokens)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    assert kv.num_tokens == 60_000
    """
    result = run_python(code, timeout=60, MAGICPIG_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr


def test_appends_from_many_threads_are_all_there():
    """Appends long enough to overlap: whoever comes second must not overwrite the first."""
    kv = LayerKV(1, 1, 64, LSHConfig(8, 40))
    keys = torch.randn(1, 4000, 64)
    threads = [
        threading.Thread(target=lambda: [kv.append(keys, keys) for _ in range(10)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kv.num_tokens == 4 * 10 * 4000


def test_import_starts_no_threads_and_reads_no_environment():
    code = """
    import os, torch
    before = len(os.listdir("/proc/self/task"))
    import magicpig
    print(len(os.listdir("/proc/self/task")) - before)
    """
    result = run_python(code, MAGICPIG_ISA="nonsense", MAGICPIG_NUM_THREADS="nonsense")
    assert result.stdout == "0\n", result.stderr


def test_the_default_is_every_cpu_of_this_process():
    result = run_python("import magicpig; print(magicpig.num_threads())", MAGICPIG_NUM_THREADS="")
    assert int(result.stdout) == len(os.sched_getaffinity(0))


def test_threads_that_rest_come_back():
    before = magicpig.num_threads()
    kv = LayerKV(4, 2, 16)
    kv.append(*torch.randn(2, 2, 5000, 16))
    queries = torch.randn(4, 16)
    expected, _ = kv.attend(queries)
    try:
        for count in (4, 1, 3):
            magicpig.set_num_threads(count)
            for resting in (1, 0, 2, 100, 0):
                _native.rest_threads(resting)
                for _ in range(20):
                    assert torch.equal(kv.attend(queries)[0], expected)
            _native.rest_threads(2)  # and a pool may end while some rest
    finally:
        magicpig.set_num_threads(before)
