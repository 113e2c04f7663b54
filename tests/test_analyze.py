"""`magicpig analyze`: the study's estimators, its figures, and the files it writes."""

import itertools
import json
import math
import os
import re
import sys
import threading
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner
from zoo import loaded, make_model, make_tokenizer

from magicpig import LayerKV, LSHConfig, WindowConfig, merge, plotting, reference
from magicpig.analysis import estimators, observations, plots, report, texts
from magicpig.analysis.capture import LayerInput, Reader, Starts
from magicpig.analysis.comparisons import _decisive
from magicpig.analysis.estimators import Scene, weighted
from magicpig.analysis.findings import findings
from magicpig.analysis.inclusion import Inclusion
from magicpig.analysis.measure import LayerMeasures, Measures
from magicpig.analysis.settings import Settings
from magicpig.analysis.study import analyze
from magicpig.analysis.summary import error_at, rows_of, share_at
from magicpig.analysis.words import (
    AGREES,
    DIFFERS,
    DOES_NOT_HELP,
    HELPS,
    HELPS_IN_PART,
    IN_PART,
)
from magicpig.attention.registry import parse
from magicpig.cli.analyze import analyze as command
from magicpig.cli.report import reported
from magicpig.kv.base import LayerShape
from magicpig.kv.sequence import step
from magicpig.native import num_threads, set_num_threads

TEXT = "\n".join(f"Line {i} says {i * i % 97} and {'abcdefgh'[i % 8] * 3}." for i in range(60))
SMALL = Settings(
    tokens=300,
    inputs=3,
    positions=4,
    few_positions=2,
    sinks=4,
    local=16,
    budgets=(0.02, 0.1, 0.2, 1.0),
    tables=((4, 12), (6, 40)),
    code_bits=(2, 4),
    page=8,
    starts=6,
)


def given(tokens=200, positions=3, heads=4, kv_heads=2, dim=16, softcap=None):
    keys = torch.randn(kv_heads, tokens, dim) + torch.randn(kv_heads, 1, dim)
    values = torch.randn(kv_heads, tokens, dim)
    return LayerInput(0, 2 * torch.randn(positions, heads, dim), keys, values, 0.3, softcap)


@pytest.fixture(scope="module")
def results():
    return analyze(loaded("llama"), TEXT, SMALL)


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


# The whole


def test_everything_is_measured_everywhere(results):
    about = results["about"]
    assert (about["layers"], about["dense_layers"]) == ([0, 1, 2, 3], [0, 2])
    assert (about["num_heads"], about["num_kv_heads"], about["head_dim"]) == (4, 2, 16)
    assert about["far_keys"] == 300 - 4 - 16 - 4
    assert len(results["observations"]) == 4
    assert len(results["heads"]) == 16
    names = {row["name"] for row in results["errors"]}
    for method in ("topk:2%", "quest:8:10%", "oracle:100%", "priority:2%", "lsh:4:12"):
        assert method in names
    assert {"scan:2:2%", "scan:4:20%"} < names
    assert "lsh-raw:6:40" in names
    for row in results["errors"]:
        assert len(row["layers"]) == 4
        assert 0 <= row["median"] <= row["p90"] <= row["p99"]
        assert row["decisive"] is None or 0 <= row["decisive"] <= 1
    for head in results["heads"]:
        assert 0.2 <= head["top"] <= 1
        assert head["tail"] <= head["far"] <= 1


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


def test_the_finding_about_keys_that_decide():
    def row(name, share, decisive):
        setting = name.partition(":")[2]
        return {"name": name, "setting": setting, "share": share, "decisive": decisive}

    rows = [
        row("lsh:10:150", 0.04, 0.8),
        row("scan:2:1%", 0.011, 0.995),
        row("scan:2:4%", 0.04, 1.0),
        row("quest:16:4%", 0.04, 0.7),
        row("quest:16:20%", 0.2, 0.9),
    ]
    name, verdict, sentence = _decisive({"errors": rows})
    assert (name, verdict) == ("keys that decide", HELPS_IN_PART)
    assert "lsh:10:150 80 % at 4 %" in sentence
    assert "scan:2:1% 99.5 % at 1.1 %" in sentence
    assert "quest:16:4% 70 %" in sentence
    assert "20%" not in sentence
    assert _decisive({"errors": [{**each, "decisive": None} for each in rows]}) is None


def test_more_keys_less_error(results):
    for words in ("topk", "priority", "oracle", "scan:2", "scan:4"):
        rows = rows_of(results["errors"], words)
        assert len(rows) == len(SMALL.budgets)
        errors = [row["mean"] for row in sorted(rows, key=lambda row: row["budget"])]
        assert errors == sorted(errors, reverse=True)


def test_codes_keep_to_their_budget_on_average(results):
    for row in rows_of(results["errors"], "scan"):
        assert row["share"] == pytest.approx(row["budget"], rel=0.15)


def test_names_are_told_apart_by_whole_words():
    rows = [{"name": name} for name in ("lsh:10:150", "lsh-raw:10:150", "scan:1:1%", "scan:16:1%")]
    assert rows_of(rows, "lsh") == rows[:1]
    assert rows_of(rows, "scan:1") == rows[2:3]
    assert rows_of(rows, "scan") == rows[2:]
    assert rows_of(rows, "topk") == []


def test_errors_between_budgets_lie_on_a_line_in_log_scale():
    rows = [{"share": share, "mean": 0.002 * share**-0.7} for share in (0.04, 0.01, 0.02)]
    for share in (0.0096, 0.01, 0.013, 0.02, 0.035, 0.041):
        error = error_at(rows, share)
        assert error == pytest.approx(0.002 * share**-0.7)
        assert share_at(rows, error) == pytest.approx(share)
    for beyond in (0.005, 0.08):
        assert error_at(rows, beyond) is None
    assert error_at([], 0.01) is None
    assert error_at(rows[:1], 0.04) is None  # a point is no line


def test_progress_goes_from_nothing_to_all():
    told = []
    settings = replace(SMALL, inputs=2, tables=((4, 12),))
    analyze(loaded("llama"), TEXT, settings, lambda what, share: told.append((what, share)))
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)
    assert {what for what, _ in told} == {"reading", "measuring"}


def test_an_interrupt_ends_it_and_leaves_no_threads():
    def interrupt(what, share):
        if what == "measuring":
            raise KeyboardInterrupt

    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        analyze(loaded("llama"), TEXT, SMALL, interrupt)
    assert torch.get_num_threads() == before
    assert not [x for x in threading.enumerate() if x.name.startswith("magicpig-analysis")]


def verdicts(results):
    return {found["name"]: found["verdict"] for found in findings(results)}


def test_findings_follow_the_figures(results):
    changed = json.loads(json.dumps(results))
    for i, (value, expected) in enumerate([(-0.85, AGREES), (0.3, DIFFERS)]):
        for row in changed["observations"]:
            row["mean_sink_cosine"] = value
        assert verdicts(changed)["mean key against sink key"] == expected, i
    for i, row in enumerate(changed["observations"]):
        row["sink_key_similarity"] = 0.995 if i < 3 else 0.5
    assert verdicts(changed)["first token's key"] == IN_PART
    for bins in (tables["bins"] for tables in changed["inclusion"]):
        for row in bins:
            row["rate"] = 2 * row["formula"]
            row["grouped_error"] = row["binomial_error"] = 0.01 * row["formula"]
    assert verdicts(changed)["inclusion rate"] == DIFFERS
    for head in changed["heads"]:
        head["top"] = 0.99 if head["layer"] else 0.7
    assert verdicts(changed)["mass of the top 20 % of keys"] == IN_PART
    for found in findings(changed):
        assert found["sentence"].endswith(".")
        assert found["verdict"] in report.CLASSES


def test_codes_are_held_against_tables_and_top_k(results):
    changed = json.loads(json.dumps(results))
    name = "codes of 2 bits per dimension"
    lsh, *_ = rows_of(changed["errors"], "lsh")
    top_k, codes = rows_of(changed["errors"], "topk"), rows_of(changed["errors"], "scan:2")
    lsh["share"] = 0.05

    def told(lsh_error, factors):
        lsh["mean"] = lsh_error
        for row, other, factor in zip(top_k, codes, factors, strict=True):
            row["mean"], row["share"] = 0.01 / row["budget"], row["budget"]
            other["mean"], other["share"] = factor * row["mean"], row["share"]
        [found] = [found for found in findings(changed) if found["name"] == name]
        return found["verdict"], found["sentence"]

    verdict, sentence = told(0.2, [0.5] * 4)  # codes have 0.1 at 5 % of keys, 0.2 at 2.5 %
    assert verdict == HELPS
    assert "0.100 instead of 0.200, 0.50 of it; the same error takes 2.5 %." in sentence
    assert "0.250 against 0.500 at 2 %" in sentence
    verdict, sentence = told(0.2, [1.5, 0.5, 0.5, 0.5])
    assert verdict == HELPS_IN_PART
    assert "Not better than exact top-k at 2 %." in sentence
    verdict, sentence = told(0.01, [2.0] * 4)
    assert verdict == DOES_NOT_HELP
    assert "Not better than lsh:4:12 and exact top-k at 2 %, 10 %, 20 %." in sentence


def test_errors_asked_for_are_predicted_and_measured(results):
    assert [(row["bits_per_dim"], row["target"]) for row in results["targets"]] == [
        (2, 0.05),
        (2, 0.1),
        (4, 0.05),
        (4, 0.1),
    ]
    for row in results["targets"]:
        assert 0 < row["predicted"] <= row["target"] * 1.01
        assert 0 < row["mean"] < 2 * row["target"]
        assert row["least"] <= row["share"] <= row["most"] <= 1
    lower, higher = results["targets"][:2]
    assert lower["share"] > higher["share"]
    changed = json.loads(json.dumps(results))
    for row, mean in zip(changed["targets"], (0.06, 0.11, 0.2, 0.3), strict=True):
        row["mean"] = mean
    name = "errors that are asked for"
    [found] = [found for found in findings(changed) if found["name"] == name]
    assert found["verdict"] == HELPS_IN_PART
    assert "2 bits, 0.05 asked for" in found["sentence"]
    assert "0.060 measured" in found["sentence"]


def test_every_method_has_its_place_in_the_table(results):
    names = [cells[0] for cells in report.error_rows(results)]
    assert sorted(names) == sorted(row["name"] for row in results["errors"])
    kinds = [plots.words_of(name) for name in names]
    assert len(list(itertools.groupby(kinds))) == len(set(kinds))


def test_the_report_needs_no_other_file(results, tmp_path):
    written = report.write(results, tmp_path / "new" / "out")
    assert {path.name for path in written} == set(os.listdir(tmp_path / "new" / "out"))
    page = (tmp_path / "new" / "out" / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]{0,40})', page)
    assert len(sources) == 6
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in page
    for found in results["findings"]:
        assert report.html.escape(found["sentence"]) in page
    data = json.loads((tmp_path / "new" / "out" / "analysis.json").read_text())
    assert data.keys() == results.keys()
    for name in (path.name for path in written if path.suffix == ".png"):
        assert (tmp_path / "new" / "out" / name).read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def quick_plots(monkeypatch):
    """Drawing takes seconds, and one test does it."""
    monkeypatch.setattr(plots, "draw", lambda results: dict.fromkeys(report.CAPTIONS, b"\x89PNG"))


@pytest.mark.usefixtures("quick_plots")
def test_an_interrupted_report_leaves_no_parts(results, tmp_path, monkeypatch):
    (tmp_path / "analysis.json").write_text("old")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(report.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        report.write(results, tmp_path)
    assert os.listdir(tmp_path) == ["analysis.json"]
    assert (tmp_path / "analysis.json").read_text() == "old"


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r"magicpig\[eval\]"):
        plotting.require()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", 100),
        ("tokens", 10**6),
        ("inputs", 1),
        ("budgets", (0.0,)),
        ("tables", ((0, 5),)),
        ("code_bits", (3,)),
        ("targets", (0.1, 2.0)),
    ],
)
def test_bad_settings_are_named(field, value):
    named = {"tables": "bits_per_table", "code_bits": "bits_per_dim"}
    with pytest.raises(ValueError, match=named.get(field, field)):
        Settings(**{field: value})


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    (path / "text.txt").write_text(TEXT)
    return path


def run(*arguments):
    app = typer.Typer()
    app.command()(reported(command))
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


@pytest.mark.usefixtures("quick_plots")
def test_the_command_writes_and_shows(folder, tmp_path):
    result = run(
        *("--model", folder, "-f", folder / "text.txt", "--tokens", 300, "--inputs", 2),
        *("--out", tmp_path / "out"),
    )
    assert result.exit_code == 0, result.stderr
    assert "lsh:10:150" in result.stdout
    assert "mean key against sink key: " in result.stdout
    assert str(tmp_path / "out" / "report.html") in result.stdout.replace("\n", "")
    assert (tmp_path / "out" / "report.html").is_file()


def test_json_is_one_object_and_no_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(
        *("--model", folder, "-f", folder / "text.txt", "--tokens", 200, "--inputs", 2, "--json")
    )
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["about"]["tokens"] == 200
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "9999"], "the text has only"),
        (["--tokens", "10"], "tokens must be from"),
        (["--inputs", "1"], "inputs must be from"),
        (["--model", "./no-such-model"], "no-such-model"),
        (["-f", "no-such-file"], "there is no file 'no-such-file'"),
        (["--out", "{file}"], "is a file"),
        (["--dtype", "int3"], "dtype must be"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(folder, tmp_path, arguments, message):
    file = folder / "text.txt"
    arguments = [argument.replace("{file}", str(file)) for argument in arguments]
    base = ["--model", folder, "-f", file, "--tokens", 300, "--out", tmp_path / "out"]
    result = run(*base, *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_text_longer_than_the_model_reads_is_refused():
    model = loaded("llama")
    model.model.config.max_position_embeddings = 256
    with pytest.raises(ValueError, match="reads at most 256 tokens"):
        analyze(model, TEXT, SMALL)
