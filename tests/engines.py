"""Engines over small models, and what their requests give."""

from zoo import loaded

from magicpig import LLM, SamplingParams, WindowConfig

SMALL = WindowConfig(sinks=2, local=6, block=16)
PROMPTS = [[5, 6, 7] * 20, [9], list(range(10, 250)), [44, 45]]


def make_llm(name="llama", method="full", **arguments):
    return LLM(loaded(name), method=method, window=SMALL, **arguments)


def greedy(max_tokens=30, **fields):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


def collect(llm, requests):
    """Tokens of each request's completions, in order."""
    for _ in llm.run(requests):
        pass
    return [[s.token_ids for s in request.sequences] for request in requests]
