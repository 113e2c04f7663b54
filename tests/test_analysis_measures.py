"""What `magicpig analyze` reads of a model, and what estimators make of it."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from study import SMALL, TEXT, given
from zoo import loaded, make_model, make_tokenizer

from magicpig import LayerKV, LSHConfig, WindowConfig, merge, reference
from magicpig.analysis import estimators, observations, texts
from magicpig.analysis.capture import LayerInput, Reader, Starts
from magicpig.analysis.estimators import Scene, weighted
from magicpig.analysis.inclusion import Inclusion
from magicpig.analysis.measure import LayerMeasures, Measures
from magicpig.attention.registry import parse
from magicpig.kv.base import LayerShape
from magicpig.kv.sequence import step
from magicpig.native import num_threads, set_num_threads

# What is read


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama", [0, 1, 2, 3]),
        ("qwen3", [0, 1, 2, 3]),
        ("gemma2", [1, 3]),
        ("gemma3", [1, 3]),
        ("lfm2", [1, 3]),
    ],
)
def test_reads_what_the_model_attends_to(name, layers):
    """Attention over what was captured is what the model's own cache and queries give."""
    token_ids = torch.randint(3, 200, (90,)).tolist()
    read = Reader(loaded(name)).read(token_ids, 5, lambda done: None)
    assert [layer.layer for layer in read] == layers
    model = make_model(name)
    plain = model(torch.tensor([token_ids]), use_cache=True).past_key_values
    for layer in read:
        cache = plain.layers[layer.layer]
        torch.testing.assert_close(layer.keys, cache.keys[0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(layer.values, cache.values[0], rtol=1e-3, atol=1e-3)
        assert layer.queries.shape[0] == 5
        assert layer.scale > 0


def test_first_tokens_do_not_depend_on_what_follows():
    reader = Reader(loaded("llama"))
    starts = reader.read_starts([[5, 6, 7], [5, 9, 11], [8, 6, 7]])
    assert starts.states.shape[:3] == (4, 2, 3)
    for tensors in (starts.states, starts.keys):
        torch.testing.assert_close(tensors[:, 0, 0], tensors[:, 0, 1])
        assert not torch.allclose(tensors[:, 0, 0], tensors[:, 0, 2])
        assert not torch.allclose(tensors[:, 1, 0], tensors[:, 1, 1])


def test_excerpts_begin_at_lines_and_differ():
    tokenizer = make_tokenizer()
    inputs = texts.excerpts(tokenizer, TEXT, 400, 3)
    assert {len(ids) for ids in inputs} == {400}
    shown = [tokenizer.decode(ids) for ids in inputs]
    assert len(set(shown)) == 3
    assert all(text.startswith("Line ") for text in shown)


def test_a_short_text_goes_on_at_its_beginning():
    tokenizer = make_tokenizer()
    whole = len(TEXT)
    inputs = texts.excerpts(tokenizer, TEXT, whole, 4)
    assert all(len(ids) == whole for ids in inputs)
    with pytest.raises(ValueError, match=r"only [\d,]+ tokens, and inputs of 20,000 .*--file"):
        texts.excerpts(tokenizer, TEXT, 20_000, 2)


def test_starts_have_different_first_tokens():
    starts = texts.starts(make_tokenizer(), TEXT, 8)
    assert len({ids[0] for ids in starts}) == 8
    with pytest.raises(ValueError, match="fewer than two different tokens"):
        texts.starts(make_tokenizer(), "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 8)


def test_our_own_text_is_long():
    assert len(texts.default_text()) > 200_000


# The estimators


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_exact_attention_is_the_references(softcap):
    x = given(softcap=softcap)
    scene = Scene.of(x, 4, 20)
    exact = scene.exact.view(2, 3, 2, 16)  # [kv_heads, positions, group, dim]
    for position, head in itertools.product(range(3), range(4)):
        seen = slice(0, 200 - 3 + position + 1)
        expected, _ = reference.exact_attention(
            x.queries[position, head],
            x.keys[head // 2, seen],
            x.values[head // 2, seen],
            0.3,
            softcap,
        )
        got = exact[head // 2, position, head % 2]
        torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-5)


def test_reading_everything_is_exact():
    settings = replace(SMALL, tokens=200, budgets=(1.0,))
    measures = LayerMeasures(given(positions=4), settings, seed=0)
    for name in ("topk:100%", "quest:8:100%", "priority:100%", "scan:2:100%"):
        assert measures.errors[name].max() < 1e-5
        assert measures.rows[name].min() == 1


def test_measures_do_not_depend_on_threads():
    settings = replace(SMALL, tokens=200)
    layers = [given(positions=4) for _ in range(5)]
    before, found = num_threads(), []
    for threads in (1, 3):
        set_num_threads(threads)
        measures = Measures(settings)
        assert list(measures.add(layers)) == [1, 2, 3, 4, 5]
        found.append(measures)
    set_num_threads(before)
    one, three = found
    for name in ("oracle:2%", "priority:2%", "lsh:6:40", "scan:2:2%", "topk:2%"):
        for x, y in zip(one.errors[name], three.errors[name], strict=True):
            torch.testing.assert_close(x, y)
    assert one.inclusion[6, 40].result() == three.inclusion[6, 40].result()


def test_rows_read_keep_to_the_budget():
    scene = Scene.of(given(), 4, 20)
    ranked = estimators.ranks(scene.scores)
    assert (estimators.top_k(scene.scores, ranked, 7).isfinite().sum(-1) == 7).all()
    logs = estimators.priorities(scene.scores, torch.Generator().manual_seed(0))
    drawn = estimators.priority(scene.scores, logs, estimators.ranks(logs), 7)
    assert (drawn.isfinite().sum(-1) == 7).all()


def test_quest_reads_the_pages_of_the_highest_bounds():
    scene = Scene.of(given(tokens=150), 4, 20)  # the last page is not full
    paged = estimators.page_ranks(scene.queries, scene.keys, 8)
    for head, query in ((0, 1), (1, 4)):
        bounds = []
        for first in range(0, scene.num_far, 8):
            page = scene.keys[head, first : first + 8]
            products = torch.stack([page.amin(0), page.amax(0)]) * scene.queries[head, query]
            bounds.append(products.amax(0).sum().item())
        best = sorted(range(len(bounds)), key=lambda i: -bounds[i])
        read = estimators.quest(scene.scores, paged, 20, 8)[head, query].isfinite()
        expected = {row for i in best[:3] for row in range(8 * i, min(8 * i + 8, scene.num_far))}
        assert set(read.nonzero()[:, 0].tolist()) == expected


def test_the_methods_that_decode_choose_the_same_keys():
    x = given(tokens=125, positions=1)
    scene = Scene.of(x, 4, 20)  # 100 far keys
    ranked = estimators.ranks(scene.scores)
    paged = estimators.page_ranks(scene.queries, scene.keys, 10)
    for spec, log_weights in (
        ("topk:10%", estimators.top_k(scene.scores, ranked, 10)),
        ("quest:10:20%", estimators.quest(scene.scores, paged, 20, 10)),
        ("full", scene.scores),
    ):
        shape = LayerShape(4, 2, 16, torch.float32, torch.device("cpu"))
        layer = parse(spec).new_layer(shape, WindowConfig(4, 20, 1), 1)
        layer.extend(x.keys[:, :-1], x.values[:, :-1])
        out = step([layer], x.queries, x.keys[None, :, -1], x.values[None, :, -1], 0.3)
        far = weighted(log_weights, scene.values)
        mine, _ = merge(*scene.window, *far)
        torch.testing.assert_close(out[0], mine.flatten(0, 1), rtol=1e-3, atol=1e-4)


def test_oracle_is_unbiased():
    scene = Scene.of(given(), 4, 20)
    outs = []
    for seed in range(400):
        drawn = estimators.oracle_draws(scene.scores, 9, torch.Generator().manual_seed(seed))
        outs.append(weighted(estimators.oracle(scene.scores, drawn), scene.values)[0])
    outs = torch.stack(outs)
    exact, _ = weighted(scene.scores, scene.values)
    deviations = (outs.mean(0) - exact) / (outs.std(0) / math.sqrt(len(outs)))
    assert deviations.abs().max() < 5
    assert 0.8 < deviations.std() < 1.2


def test_priority_samplings_weights_are_unbiased():
    scene = Scene.of(given(), 4, 20)
    sums = []
    for seed in range(400):
        logs = estimators.priorities(scene.scores, torch.Generator().manual_seed(seed))
        drawn = estimators.priority(scene.scores, logs, estimators.ranks(logs), 9)
        sums.append(weighted(drawn, scene.values)[1].exp())
    sums = torch.stack(sums)
    exact = scene.scores.logsumexp(-1).exp()
    deviations = (sums.mean(0) - exact) / (sums.std(0) / math.sqrt(len(sums)))
    assert deviations.abs().max() < 5


def test_hash_tables_in_torch_and_in_the_core_agree():
    x, lsh = given(tokens=600), LSHConfig(5, 30, seed=3, exact_below=0)
    scene = Scene.of(x, 4, 20)
    kv = LayerKV(4, 2, 16, lsh, torch.float32)
    kv.append(scene.keys, scene.values)
    log_weights = estimators.lsh_weights(
        scene.scores, scene.queries, estimators.centred(scene.keys), lsh
    )
    out, _ = weighted(log_weights, scene.values)
    for position in range(3):
        expected, _ = kv.attend(x.queries[position], scale=0.3)
        rows, _ = kv.sample(x.queries[position])
        for head in range(4):
            at = head // 2, position * 2 + head % 2
            mine = set(log_weights[at].isfinite().nonzero()[:, 0].tolist())
            both = set(rows[head].tolist())
            assert len(mine ^ both) <= 1  # projections within rounding of zero
            if mine == both:
                torch.testing.assert_close(out[at], expected[head], rtol=1e-2, atol=2e-3)


def test_probabilities_are_the_references():
    lsh = LSHConfig(10, 150)
    cosine = torch.linspace(-0.99, 1, 500)
    torch.testing.assert_close(
        estimators.log_inclusion(cosine, lsh).double(),
        reference.log_inclusion_probability(cosine, lsh),
        rtol=1e-3,
        atol=1e-3,
    )


def test_inclusion_rates_of_random_keys_are_the_formulas():
    inclusion = Inclusion()
    for seed in range(40):
        lsh = LSHConfig(5, 20, seed=seed, exact_below=0)
        queries, keys = torch.randn(1, 4, 16), torch.randn(1, 400, 16)
        kv = LayerKV(4, 1, 16, lsh, torch.float32)
        kv.append(keys, keys)
        drawn = torch.zeros(1, 4, 400, dtype=torch.bool)
        for head, rows in enumerate(kv.sample(queries[0])[0]):
            drawn[0, head, rows.long()] = True
        cosine = estimators.cosines(queries, estimators.centred(keys))
        inclusion.add(cosine, drawn, lsh)
    bins = [row for row in inclusion.result() if row["expected"] >= 10]
    assert sum(row["keys"] for row in inclusion.result()) == 40 * 4 * 400
    assert len(bins) > 20
    for row in bins:
        error = max(row["grouped_error"], row["binomial_error"])
        assert abs(row["rate"] - row["formula"]) < 4.5 * error


# The observations


def test_observations_of_made_up_keys():
    mean_keys = observations.MeanKeys(sinks=1)
    for noise in (0.01, 0.02):
        mean_keys.begin_input()
        keys = torch.ones(2, 50, 8) + noise * torch.randn(2, 50, 8)
        keys[:, 0] = -1
        mean_keys.add(LayerInput(0, keys, keys, keys, 1.0, None), 40)
    numbers = mean_keys.result()
    assert numbers["mean_key_stability"] == pytest.approx([1], abs=1e-3)
    assert numbers["mean_sink_cosine"] == pytest.approx([-1], abs=1e-3)
    states = torch.randn(1, 2, 3, 64)
    states[:, 0] = states[:, 0, :1]  # the first token's are all the same
    numbers = observations.of_starts(Starts(states, states[:, :, :, None]))
    assert numbers["sink_state_similarity"] == pytest.approx([1])
    assert numbers["sink_key_similarity"] == pytest.approx([1])
    assert abs(numbers["later_state_similarity"][0]) < 0.5


def test_keys_that_decide():
    """A key that has most of every query's attention is read by all that look at every key."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 600, 16, generator=generator)
    queries = torch.randn(4, 4, 16, generator=generator)
    direction = torch.nn.functional.normalize(torch.randn(16, generator=generator), dim=0)
    queries += 6 * direction
    keys[:, 300] = 12 * direction
    values = torch.randn(2, 600, 16, generator=generator)
    given = LayerInput(1, queries, keys, values, 0.25, None)
    found = LayerMeasures(given, SMALL, 0)
    for name, (read, there) in found.decisive.items():
        assert there.shape == found.errors[name].shape
        assert (there >= 1).all()
        assert (read <= there).all()
    for name in ("topk:2%", "priority:2%", "scan:2:2%", "scan:4:2%"):
        read, there = found.decisive[name]
        assert torch.equal(read, there)
    scene = Scene.of(given, SMALL.sinks, SMALL.local)
    few = torch.full_like(scene.scores, -math.inf)
    few[..., :3] = scene.scores[..., :3]
    found._note("others", scene, few)
    read, there = found.decisive["others"]
    assert not read.any()
    assert there.all()
