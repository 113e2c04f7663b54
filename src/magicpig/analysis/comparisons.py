"""Where sampling helps: methods side by side at equal keys read, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from magicpig.analysis.estimators import DECISIVE
from magicpig.analysis.summary import LEAST, Results, error_at, nearest, rows_of, share_at
from magicpig.analysis.words import (
    DOES_NOT_HELP,
    HELPS,
    HELPS_IN_PART,
    Finding,
    helps,
    percent,
)

USUAL_SHARE = 0.01  # of the keys, by codes
NEARLY_ALL = 0.99  # of the decisive keys
MISSED = 0.25  # of a target, by which it may be missed
SMALL_BUDGET = 0.1  # below which sampling with known scores is of interest


def comparisons(results: Results) -> Iterator[Finding | None]:
    yield _tables_against(
        results,
        "quest",
        "hash tables against Quest",
        "Quest with as many rows",
        "and Quest reads two vectors of every page besides",
    )
    yield _tables_against(
        results,
        "topk",
        "hash tables against exact top-k",
        "exact top-k with as many rows",
        "but exact top-k has to score all keys to find them",
    )
    yield _decisive(results)
    yield _flat_heads(results)
    bits = {row["setting"].partition(":")[0]: None for row in rows_of(results["errors"], "scan")}
    for each in bits:
        yield _codes(results, int(each))
    yield _targets(results)
    yield _known_scores(results)


def _tables_against(
    results: Results, method: str, name: str, whom: str, remark: str
) -> Finding | None:
    parts, wins = [], 0
    others = rows_of(results["errors"], method)
    for row in rows_of(results["errors"], "lsh"):
        other = error_at(others, row["share"])
        if other is not None:
            parts.append(
                f"{row['name']} at {percent(row['share'])} of keys {row['mean']:.3f} against "
                f"{other:.3f}"
            )
            wins += row["mean"] < other
    if not parts:
        return None
    sentence = f"Mean error against {whom}: {'; '.join(parts)}; {remark}."
    return name, helps(wins, len(parts)), sentence


def _decisive(results: Results) -> Finding | None:
    """How many of the keys that an answer may hang on are read."""
    known = [row for row in results["errors"] if row["decisive"] is not None]
    codes = {row["setting"].partition(":")[0]: None for row in rows_of(known, "scan")}
    sampled = rows_of(known, "lsh") + [
        nearest(rows_of(known, f"scan:{bits}"), USUAL_SHARE) for bits in codes
    ]
    pages = rows_of(known, "quest")
    if not sampled:
        return None
    others = [nearest(pages, sampled[0]["share"])] if pages else []
    listed = "; ".join(
        f"{row['name']} {percent(row['decisive'])} at {percent(row['share'])} of all keys"
        for row in sampled + others
    )
    wins = sum(row["decisive"] >= NEARLY_ALL for row in sampled)
    return (
        "keys that decide",
        helps(wins, len(sampled)),
        f"Of the far keys that have {percent(DECISIVE)} or more of a query's attention are read: "
        f"{listed}. Few heads have such keys and mean errors hardly show them, but what is copied "
        "from a long text hangs on them.",
    )


def _flat_heads(results: Results) -> Finding | None:
    """Top-k at the budget that is nearest to what hash tables read, in flat and in peaked heads."""
    tables, budgets = (rows_of(results["errors"], name) for name in ("lsh", "topk"))
    heads = sorted(results["heads"], key=lambda row: row["tail"])
    third = len(heads) // 3
    if not tables or not budgets or not third:
        return None
    lsh = tables[0]
    top_k = nearest(budgets, lsh["share"])
    peaked, flat = heads[:third], heads[-third:]

    def mean(rows: list[Results], name: str) -> float:
        return float(sum(row["errors"][name] for row in rows) / len(rows))

    wins = [row for row in heads if row["errors"][lsh["name"]] < row["errors"][top_k["name"]]]
    flat_wins = sum(row in wins for row in flat)
    verdict = (
        HELPS
        if mean(flat, lsh["name"]) < mean(flat, top_k["name"])
        else HELPS_IN_PART
        if flat_wins
        else DOES_NOT_HELP
    )
    return (
        "where sampling helps",
        verdict,
        f"All layers, heads by the mass of their tail (far keys outside the top 2 %): in the "
        f"flattest third {lsh['name']} errs by {mean(flat, lsh['name']):.3f} and {top_k['name']} "
        f"by {mean(flat, top_k['name']):.3f}, in the most peaked third by "
        f"{mean(peaked, lsh['name']):.3f} and {mean(peaked, top_k['name']):.3f}. Hash tables err "
        f"less in {len(wins)} of {len(heads)} heads, {flat_wins} of them in the flattest third.",
    )


def _codes(results: Results, bits: int) -> Finding | None:
    """Rows drawn by codes of so many bits, against hash tables and exact top-k at equal keys."""
    codes = rows_of(results["errors"], f"scan:{bits}")
    parts, cases, worse = [], 0, []
    for row in rows_of(results["errors"], "lsh")[:1]:
        error, share = error_at(codes, row["share"]), share_at(codes, row["mean"])
        if error is None:
            continue
        same = f"; the same error takes {percent(share)}" if share is not None else ""
        parts.append(
            f"At the {percent(row['share'])} of keys that {row['name']} reads the mean error is "
            f"{error:.3f} instead of {row['mean']:.3f}, {error / max(row['mean'], LEAST):.2f} of it"
            f"{same}"
        )
        cases += 1
        worse += [row["name"]] if error >= row["mean"] else []
    pairs, worse_at = [], []
    for row in rows_of(results["errors"], "topk"):
        error, at = error_at(codes, row["share"]), percent(row["budget"])
        if error is None or row["budget"] == 1:
            continue
        pairs.append(f"{error:.3f} against {row['mean']:.3f} at {at}")
        worse_at += [at] if error >= row["mean"] else []
    if pairs:
        parts.append(f"Against exact top-k with as many rows: {', '.join(pairs)}")
    if not parts:
        return None
    wins = cases + len(pairs) - len(worse) - len(worse_at)
    worse += [f"exact top-k at {', '.join(worse_at)}"] if worse_at else []
    parts.append(f"Not better than {' and '.join(worse)}" if worse else "Better in all these cases")
    code_bytes = results["about"]["head_dim"] * bits // 8 + 8
    parts.append(f"Codes of all keys are read besides, {code_bytes} bytes a key and KV head")
    name = f"codes of {bits} bit{'s' if bits > 1 else ''} per dimension"
    return name, helps(wins, cases + len(pairs)), ". ".join(parts) + "."


def _targets(results: Results) -> Finding | None:
    """Errors that codes were asked for, beside those that they predicted and those that came."""
    rows = results["targets"]
    if not rows:
        return None
    met = [row for row in rows if row["mean"] <= (1 + MISSED) * row["target"]]
    listed = "; ".join(
        f"{row['bits_per_dim']} bit{'s' if row['bits_per_dim'] > 1 else ''}, {row['target']:g} "
        f"asked for: {row['predicted']:.3f} predicted, {row['mean']:.3f} measured at "
        f"{percent(row['share'])} of keys, {percent(row['least'])} to {percent(row['most'])} in "
        "nine of ten heads"
        for row in rows
    )
    return "errors that are asked for", helps(len(met), len(rows)), f"Mean errors: {listed}."


def _known_scores(results: Results) -> Finding | None:
    named = {row["name"]: row for row in results["errors"]}
    pairs = []
    for row in rows_of(results["errors"], "priority"):
        other = named.get(row["name"].replace("priority", "topk"))
        if other and other["mean"] > 0 and row["mean"] > 0 and row["budget"] < SMALL_BUDGET:
            pairs.append((row, other))
    if not pairs:
        return None
    wins = sum(row["mean"] < other["mean"] for row, other in pairs)
    listed = ", ".join(
        f"{row['mean']:.3f} against {other['mean']:.3f} at {percent(row['budget'])}"
        for row, other in pairs
    )
    return (
        "sampling with known scores",
        helps(wins, len(pairs)),
        f"Priority sampling with exact scores against exact top-k, mean error with the same number "
        f"of rows: {listed}. It is what sampling can reach with a better proposal than hash "
        "tables.",
    )
