"""Attention with the instruction set in use, beside the reference: a probe of either index."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from magicpig import LayerKV, LSHConfig, ScanConfig, reference

TOLERANCE = 2e-2  # AVX512-BF16 rounds softmax weights to bfloat16


def probe() -> tuple[LSHConfig, Tensor, Tensor, Tensor]:
    """An index, queries [4, 64], keys and values [2, 128, 64] for the self-test.

    Keys come as k and -k in eighths, so that their mean is 0 and nothing is rounded before it is
    hashed; and with this seed no projection is so near to 0 that the order of a sum could turn its
    sign. So every instruction set must draw the very rows that the reference draws.
    """
    random = np.random.RandomState(8)
    queries, half, values = (
        torch.from_numpy(random.randint(-16, 17, size) / 8).float()
        for size in ((4, 64), (2, 64, 64), (2, 128, 64))
    )
    return LSHConfig(6, 40, exact_below=0), queries, torch.cat([half, -half], 1), values


def difference() -> str | None:
    """How attention with the instruction set in use differs from the reference, if it does."""
    try:
        return _hashed_difference() or _scanned_difference()
    except (MemoryError, RuntimeError, ValueError) as error:
        return str(error) or type(error).__name__


def _hashed_difference() -> str | None:
    """By hash tables: the very rows."""
    lsh, queries, keys, values = probe()
    kv = LayerKV(4, 2, 64, lsh)
    kv.append(keys, values)
    out, lse = kv.attend(queries)
    drawn, _ = kv.sample(queries)
    for head, rows in enumerate(drawn):
        its_keys, its_values = keys[head // 2], values[head // 2]
        expected, _ = reference.drawn(queries[head], its_keys, lsh)
        if rows.tolist() != expected.tolist():
            return (
                f"head {head} draws {len(rows)} rows that are not the reference's {len(expected)}"
            )
        result = reference.sampled_attention(queries[head], its_keys, its_values, lsh, 64**-0.5)
        for name, mine, truth in zip(
            ("output", "log-sum-exp"), (out[head], lse[head]), result, strict=True
        ):
            distance = (mine.double() - truth).abs().max().item()
            if not distance <= TOLERANCE:
                return f"the {name} of head {head} is {distance:.3g} away from the reference's"
    return None


def _scanned_difference() -> str | None:
    """By codes: the probabilities of the rows that are drawn, and attention over these."""
    _, queries, keys, values = probe()
    scan = ScanConfig(2, 0.25, 1, exact_below=0)
    kv = LayerKV(4, 2, 64, scan)
    kv.append(keys, values)
    out, _ = kv.attend(queries)
    for head, (rows, log_probability) in enumerate(zip(*kv.sample(queries), strict=True)):
        its_keys, its_values = keys[head // 2], values[head // 2]
        logs = reference.proposals(queries[head], its_keys, its_values, scan, 64**-0.5)
        threshold = reference.log_threshold(logs, scan.budget * len(logs))
        drawn, log_p = rows.long(), log_probability.double()
        truth = reference.inclusion_probability(logs, threshold)[drawn].log()
        if not (log_p - truth).abs().max().item() <= TOLERANCE:
            return f"head {head} draws rows of other probabilities than the reference's"
        scores = reference.scores(queries[head], its_keys[drawn], 64**-0.5)
        expected, _ = reference.attend(scores - log_p, its_values[drawn])
        distance = (out[head].double() - expected).abs().max().item()
        if not distance <= TOLERANCE:
            return f"the output of head {head} by codes is {distance:.3g} away from the reference's"
    return None
