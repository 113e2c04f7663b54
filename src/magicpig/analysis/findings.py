"""What the numbers say, in sentences: where a model agrees with the paper.

`comparisons` says where sampling helps. The paper's figures and the borders between the verdicts
stand at the top. All else is computed.
"""

from __future__ import annotations

from collections.abc import Callable

from magicpig.analysis import comparisons
from magicpig.analysis.inclusion import MIN_DRAWN
from magicpig.analysis.summary import Results, error_at, rows_of
from magicpig.analysis.words import (
    AGREES,
    DIFFERS,
    IN_PART,
    Finding,
    layers_in_words,
    median,
    percent,
)

# The paper's figures (MagicPIG, arXiv 2410.16179).
SINK_SIMILARITY = 0.99  # of states and keys of first tokens, between inputs: above
MEAN_STABILITY = 0.9  # of the mean key's direction, between inputs: above
MEAN_SINK_COSINE = -0.8  # between mean key and sink key: down to -0.9
COVERED = 0.8  # of the mass by the top 20 % of keys, in some heads: 0.7 to 0.8
TOP_20_ERROR = 0.15  # of the output, in such heads: 0.15 to 0.20
ORACLE_GAIN = 4.0  # times less error than top-k with as many keys: up to
RAW_SHARE = 0.001  # of keys drawn without centring: below
KEYS_READ = {(10, 150): 0.02, (9, 120): 0.04, (8, 75): 0.05}

# Borders between the verdicts.
MOST, HALF = 0.9, 0.5  # of the layers: agrees from MOST on, in part from HALF on
GAIN_IN_PART = 1.25  # times less error; agrees from half of ORACLE_GAIN on
SAME_SHARE = 0.25  # keys read: relative difference up to which two figures agree
DEVIATIONS, TOLERANCE = 3.0, 0.02  # inclusion rates: standard errors, or relative difference

BORDERS = (
    f"A statement about layers agrees if it holds in {percent(MOST)} of them, in part from "
    f"{percent(HALF)} on. A statement about some heads agrees if it holds for one in the sampled "
    "layers, in part for one in the dense layers. The gain of oracle sampling agrees from "
    f"{ORACLE_GAIN / 2:g} times on, in part from {GAIN_IN_PART:g}. Centring agrees if fewer than "
    f"{percent(RAW_SHARE)} of keys are drawn without it, in part if fewer than half as many are "
    "drawn as with it and the error is higher. Shares of keys read agree if they differ by "
    f"{percent(SAME_SHARE)} of the paper's at most. Inclusion agrees if the rates of "
    f"{percent(MOST)} of the bins are within {DEVIATIONS:g} standard errors or "
    f"{percent(TOLERANCE)} of the formula."
)


def findings(results: Results) -> list[dict[str, str]]:
    """name, verdict, sentence of every finding that the numbers allow."""
    makers = (
        _sink_states,
        _sink_keys,
        _mean_keys,
        _opposite,
        _coverage,
        _top_k_error,
        _oracle,
        _centring,
        _keys_read,
        _inclusion,
    )
    found = [*(maker(results) for maker in makers), *comparisons.comparisons(results)]
    return [dict(zip(("name", "verdict", "sentence"), each, strict=True)) for each in found if each]


def _by_layers(
    results: Results, name: str, column: str, holds: Callable[[float], bool], claim: str, paper: str
) -> Finding:
    """A statement that the paper makes of every layer."""
    values = {row["layer"]: row[column] for row in results["observations"]}
    where = [layer for layer, value in values.items() if holds(value)]
    share = len(where) / len(values)
    verdict = AGREES if share >= MOST else IN_PART if share >= HALF else DIFFERS
    middle = median(list(values.values()))
    others = [layer for layer in values if layer not in where]
    exceptions = f"; not in {layers_in_words(others)}" if where and others else ""
    sentence = (
        f"{claim} in {len(where)} of {len(values)} layers{exceptions} (median of the layers "
        f"{middle:.2f}, from {min(values.values()):.2f} to {max(values.values()):.2f}); "
        f"the paper: {paper}."
    )
    return name, verdict, sentence


def _sink_states(results: Results) -> Finding:
    about = results["about"]
    name, verdict, sentence = _by_layers(
        results,
        "first token's state",
        "sink_state_similarity",
        lambda value: value > SINK_SIMILARITY,
        f"Between {about['starts']} inputs with different first tokens, the first token's hidden "
        f"state has a cosine above {SINK_SIMILARITY}",
        f"above {SINK_SIMILARITY}",
    )
    later = median([row["later_state_similarity"] for row in results["observations"]])
    special = (
        " This tokenizer puts the same token before every text: in use the first token's state is "
        "then the same by construction, since it sees nothing but itself."
        if about["first_token_is_special"]
        else " Where every input begins with one and the same token, as with a chat template, the "
        "cosine is 1 by construction: a first token sees nothing but itself."
    )
    return name, verdict, f"{sentence} A later token's: {later:.2f}.{special}"


def _sink_keys(results: Results) -> Finding:
    return _by_layers(
        results,
        "first token's key",
        "sink_key_similarity",
        lambda value: value > SINK_SIMILARITY,
        f"The first token's keys have a cosine above {SINK_SIMILARITY} between those inputs",
        f"above {SINK_SIMILARITY}",
    )


def _mean_keys(results: Results) -> Finding:
    return _by_layers(
        results,
        "mean key's direction",
        "mean_key_stability",
        lambda value: value > MEAN_STABILITY,
        f"Mean keys of {results['about']['inputs']} excerpts have a cosine above {MEAN_STABILITY}",
        f"above {MEAN_STABILITY}",
    )


def _opposite(results: Results) -> Finding:
    return _by_layers(
        results,
        "mean key against sink key",
        "mean_sink_cosine",
        lambda value: value <= MEAN_SINK_COSINE,
        f"The cosine between mean key and sink key is {MEAN_SINK_COSINE} or lower",
        f"between -0.9 and {MEAN_SINK_COSINE}",
    )


def _coverage(results: Results) -> Finding:
    sampled, dense = _heads(results, True), _heads(results, False)
    low, low_dense = (sum(row["top"] < COVERED for row in rows) for rows in (sampled, dense))
    worst = min([*sampled, *dense], key=lambda row: row["top"])
    verdict = AGREES if low else IN_PART if low_dense else DIFFERS
    middle = median([row["top"] for row in sampled])
    return (
        "mass of the top 20 % of keys",
        verdict,
        f"The top 20 % of keys cover less than {percent(COVERED)} of the mass in {low} of "
        f"{len(sampled)} heads of the sampled layers and in {low_dense} of {len(dense)} heads of "
        f"the dense ones; median head {percent(middle)}, lowest {percent(worst['top'])} (layer "
        f"{worst['layer']}, head {worst['head']}); the paper: 70 to 80 % in some heads.",
    )


def _top_k_error(results: Results) -> Finding | None:
    name = "topk:20%"
    if name not in _named(results):
        return None
    sampled, dense = _heads(results, True), _heads(results, False)
    high, high_dense = (
        sum(row["errors"][name] >= TOP_20_ERROR for row in rows) for rows in (sampled, dense)
    )
    worst = max([*sampled, *dense], key=lambda row: row["errors"][name])
    return (
        "error of top-k with 20 % of keys",
        AGREES if high else IN_PART if high_dense else DIFFERS,
        f"Exact top-k with 20 % of the far keys errs by {percent(TOP_20_ERROR)} or more in {high} "
        f"of {len(sampled)} heads of the sampled layers and in {high_dense} of {len(dense)} of the "
        f"dense ones; mean {percent(_named(results)[name]['mean'])}, highest "
        f"{percent(worst['errors'][name])} (layer {worst['layer']}, head {worst['head']}); the "
        "paper: 15 to 20 % in some heads.",
    )


def _oracle(results: Results) -> Finding | None:
    rows, top_k = (rows_of(results["errors"], name) for name in ("oracle", "topk"))
    gains = []
    for row in rows:
        at_share = error_at(top_k, row["share"])
        if at_share is not None and row["mean"] > 0:
            gains.append((at_share / row["mean"], row))
    if not gains:
        return None
    best, at = max(gains, key=lambda gain: gain[0])
    least = min(gain for gain, _ in gains)
    by_draws = [
        f"{other['mean'] / row['mean']:.1f} ({percent(row['budget'])})"
        for row in rows
        if (other := _named(results).get(row["name"].replace("oracle", "topk")))
    ]
    verdict = AGREES if best >= ORACLE_GAIN / 2 else IN_PART if best >= GAIN_IN_PART else DIFFERS
    return (
        "oracle sampling against top-k",
        verdict,
        f"With as many different rows read, the mean error of oracle sampling is up to {best:.1f} "
        f"times lower than that of exact top-k ({at['name']}, {percent(at['share'])} of keys: "
        f"{at['mean']:.3f}), and {least:.1f} times at the least; the paper: up to "
        f"{ORACLE_GAIN:g} times. Counting draws instead, several of which fall on one row, the "
        f"factor is {', '.join(by_draws)}.",
    )


def _centring(results: Results) -> Finding | None:
    named = _named(results)
    first = next(iter(rows_of(results["errors"], "lsh")), None)
    raw = named.get(first["name"].replace("lsh:", "lsh-raw:")) if first else None
    if not first or not raw:
        return None
    verdict = (
        AGREES
        if raw["share"] < RAW_SHARE
        else IN_PART
        if raw["share"] < first["share"] / 2 and raw["mean"] > first["mean"]
        else DIFFERS
    )
    return (
        "centring",
        verdict,
        f"Without centring {first['name']} draws {percent(raw['share'])} of the far keys instead "
        f"of {percent(first['share'])}, and the mean error is {raw['mean']:.3f} instead of "
        f"{first['mean']:.3f} (the former at fewer of the positions); the paper: below "
        f"{percent(RAW_SHARE)} of keys, and useless.",
    )


def _keys_read(results: Results) -> Finding | None:
    pairs = []
    for (bits_per_table, num_tables), paper in KEYS_READ.items():
        if row := _named(results).get(f"lsh:{bits_per_table}:{num_tables}"):
            pairs.append((row["name"], row["share"], paper))
    if not pairs:
        return None
    same = sum(abs(share - paper) <= SAME_SHARE * paper for _, share, paper in pairs)
    verdict = AGREES if same == len(pairs) else IN_PART if same else DIFFERS
    listed = ", ".join(
        f"{percent(share)} with {name} ({percent(paper)})" for name, share, paper in pairs
    )
    return (
        "keys read by hash tables",
        verdict,
        f"Share of the far keys read, and in brackets the paper's, at other models and lengths: "
        f"{listed}.",
    )


def _inclusion(results: Results) -> Finding | None:
    bins, within, worst, drawn, expected = 0, 0, 0.0, 0, 0.0
    for tables in results["inclusion"]:
        for row in tables["bins"]:
            drawn, expected = drawn + row["drawn"], expected + row["expected"]
            if row["expected"] < MIN_DRAWN:
                continue
            off = abs(row["rate"] - row["formula"])
            error = max(row["grouped_error"], row["binomial_error"])
            bins += 1
            within += off <= max(DEVIATIONS * error, TOLERANCE * row["formula"])
            worst = max(worst, off / error) if error else worst
    if not bins:
        return None
    share = within / bins
    return (
        "inclusion rate",
        AGREES if share >= MOST else IN_PART if share >= HALF else DIFFERS,
        f"Keys are drawn as the formula for u says in {within} of {bins} bins of the cosine; "
        f"{drawn:,} keys were drawn where {expected:,.0f} were expected "
        f"({100 * (drawn / expected - 1):+.1f} %); largest difference of a bin: {worst:.1f} "
        "standard errors.",
    )


def _named(results: Results) -> dict[str, Results]:
    return {row["name"]: row for row in results["errors"]}


def _heads(results: Results, sampled: bool) -> list[Results]:
    layers = results["about"]["sampled_layers"]
    return [row for row in results["heads"] if (row["layer"] in layers) == sampled]
