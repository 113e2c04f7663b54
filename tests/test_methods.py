"""Methods are held to their papers' rules at every step, written out in method_rules."""

import numpy as np
import pytest
import torch
from method_rules import DIM, KV_HEADS, LSH, RULES, SCALE, WINDOW, Sequence, lsh, step_all

from magicpig.attention.quest import Quest
from magicpig.attention.registry import parse

LENGTHS = [0, 5, 14, 37, 51]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("spec", RULES)
def test_follows_its_rule_at_every_step(spec, softcap):
    """Lengths below and above a window, pages that are not full, blocks that leave meanwhile."""
    sequences = [Sequence(spec, length) for length in LENGTHS]
    for sequence in sequences:
        sequence.read_prompt(torch.zeros(KV_HEADS, sequence.keys.shape[1]))
    far = set()
    for i in range(30):
        queries, out = step_all(sequences, softcap)
        for j, sequence in enumerate(sequences):
            if i % 4 == 0 or j == i % 5:  # the rules are slow
                truth = sequence.attend(queries[j], RULES[spec], softcap)
                torch.testing.assert_close(out[j].double(), truth, atol=2e-5, rtol=1e-5)
            sequence.settle()
            far.add(sequence.num_far)
    assert len(far) > 5


@pytest.mark.parametrize("prompt", [29, 30, 90])  # with 23, 24 and 84 far tokens
def test_lsh_follows_its_rule(prompt):
    spec = f"lsh:{LSH.bits_per_table}:{LSH.num_tables}:exact_below={LSH.exact_below}"
    sequences = [Sequence(spec, prompt) for _ in range(3)]
    for sequence in sequences:
        sequence.read_prompt()
    for _ in range(5):
        queries, out = step_all(sequences)
        for i, sequence in enumerate(sequences):
            truth = sequence.attend(queries[i], lsh(LSH))
            torch.testing.assert_close(out[i].double(), truth, atol=1e-4, rtol=0)
    cost = sequences[0].layer.cost
    assert (cost.rows < cost.tokens) == (prompt > 29)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("prompt", [29, 30, 90])
def test_scan_attends_to_what_it_draws(prompt, softcap):
    """Its rule is a sum over rows that were drawn: by themselves, so they are asked for."""
    sequences = [Sequence("scan:2:20%:min_rows=4:exact_below=24", prompt, WINDOW) for _ in range(3)]
    for sequence in sequences:
        sequence.read_prompt()
    for _ in range(5):
        queries, out = step_all(sequences, softcap)
        for i, sequence in enumerate(sequences):
            rows, logs = sequence.layer.far.sample(queries[i], SCALE)
            heads = iter(zip(rows, logs, strict=True))

            def rule(query, keys, heads=heads):
                ids, probabilities = next(heads)
                return dict(zip(ids.tolist(), (-probabilities).exp().tolist(), strict=True))

            truth = sequence.attend(queries[i], rule, softcap)
            torch.testing.assert_close(out[i].double(), truth, atol=1e-4, rtol=0)
    cost = sequences[0].layer.cost
    assert (cost.rows < cost.tokens) == (prompt > 29)


def test_quest_bounds_are_bounds():
    keys = torch.randn(KV_HEADS, 37, DIM)
    queries = torch.randn(200, DIM)
    least, greatest = Quest(8).bounds(keys)
    assert least.shape == greatest.shape == (KV_HEADS, 5, DIM)
    for head in range(KV_HEADS):
        for page in range(5):
            rows = keys[head, 8 * page : 8 * page + 8]
            bound = torch.maximum(queries * least[head, page], queries * greatest[head, page]).sum(
                1
            )
            assert (queries @ rows.T <= bound[:, None] + 1e-5).all()
            assert torch.equal(least[head, page], rows.amin(0))


def test_loki_chooses_by_the_leading_principal_components():
    """Keys that vary in few directions: these are found, wherever the keys' mean is."""
    basis = torch.linalg.qr(torch.randn(DIM, DIM)).Q[:, :4]
    keys = (torch.randn(KV_HEADS, 60, 4) * torch.tensor([9.0, 6, 4, 2])) @ basis.T
    keys = keys + 5 * torch.randn(KV_HEADS, 1, DIM) + 0.01 * torch.randn(KV_HEADS, 60, DIM)
    found, short_keys = parse("loki:25%:10%").calibrate(keys)
    for head in range(KV_HEADS):
        torch.testing.assert_close(found[head] @ found[head].T, basis @ basis.T, atol=0.02, rtol=0)
        torch.testing.assert_close(short_keys[head], keys[head] @ found[head])
        scores = keys[head].numpy()
        _, _, components = np.linalg.svd(scores - scores.mean(0))
        cosines = abs(torch.from_numpy(components[:4]) @ found[head])
        torch.testing.assert_close(cosines.flip(1), torch.eye(4), atol=0.02, rtol=0)
