"""Memory is given back: of sequences that end, and of those that are ended."""

import gc
from contextlib import closing
from pathlib import Path

import pytest
from zoo import loaded

from magicpig import LLM, SamplingParams, WindowConfig

STATM = Path("/proc/self/statm")
PAGE = 4096


def resident():
    """Bytes of this process that are in memory; 0 where the system does not tell."""
    return int(STATM.read_text().split()[1]) * PAGE if STATM.exists() else 0


@pytest.mark.skipif(not STATM.exists(), reason="needs /proc")
@pytest.mark.parametrize("method", ["lsh:4:12", "scan:2:10%"])
def test_a_thousand_steps_leave_nothing_behind(method):
    """A sequence takes 2 MB and more, with the index of hash tables 3."""
    llm = LLM(loaded("llama"), method=method, window=WindowConfig(4, 8, 16), dense_layers=[])
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    held = []
    for _ in range(20):
        [done] = llm.generate([i * 7 % 200 + 3 for i in range(2000)], params)
        with closing(llm.stream([11, 12] * 1000, params)) as texts:
            next(texts)  # ended before its time
        used = done.completions[0].usage.nbytes
        assert used.rows + used.window > 2e6
        del done
        gc.collect()
        held.append(resident())
    assert held[-1] - held[7] < 8e6
