"""Plots of an analysis, as PNG. matplotlib is imported when they are drawn, not before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from magicpig import plotting
from magicpig.analysis import findings
from magicpig.analysis.summary import Results, nearest, rows_of, worst_heads

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Look:
    label: str
    colour: str
    marker: str
    line: str = "-"


LOOKS = {  # by the words that names of methods begin with
    "scan:1": Look("codes, 1 bit", "#e3bf4f", "P"),
    "scan:2": Look("codes, 2 bits", "#b78900", "P"),
    "scan:4": Look("codes, 4 bits", "#6e5200", "P"),
    "lsh": Look("hash tables", "#d55e00", "D", "none"),
    "lsh-raw": Look("hash tables, not centred", "#808890", "X", "none"),
    "topk": Look("exact top-k", "#1878b8", "o"),
    "oracle": Look("oracle sampling", "#009e73", "s"),
    "quest": Look("Quest", "#cc79a7", "^"),
    "priority": Look("priority sampling", "#8467c8", "v"),
}
PAPER = "#e3e6ea"  # where the paper's figures lie
DPI = 110
LARGEST_HEATMAP = 32  # heads, up to which each is labelled


def words_of(name: str) -> str:
    """The words among LOOKS that a method's name begins with."""
    return next(words for words in LOOKS if f"{name}:".startswith(f"{words}:"))


def draw(results: Results) -> dict[str, bytes]:
    """PNG files by name."""
    plotting.require()
    import matplotlib as mpl

    plots: dict[str, Callable[[Results], Figure]] = {
        "errors.png": errors,
        "heads.png": heads,
        "layers.png": layers,
        "observations.png": observations,
        "mass.png": mass,
        "inclusion.png": inclusion,
    }
    style: Any = {
        **plotting.STYLE,
        "font.size": 10,
        "axes.titlesize": 11,
        "grid.color": "#eceef0",
    }
    files = {}
    with mpl.rc_context(style):
        for name, plot in plots.items():
            files[name] = plotting.png(plot(results), dpi=DPI, bbox_inches="tight")
    return files


def _axes(
    columns: int, width: float, height: float, rows: int = 1, **more: Any
) -> tuple[Figure, Any]:
    """A figure (Agg, known to nobody else) and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **more)


def _percent_axis(axis: Any, steps: tuple[int, ...] = (1,)) -> None:
    """steps: of each power of ten, on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if axis.get_scale() == "log":
        axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axis.set_minor_formatter(NullFormatter())


def errors(results: Results) -> Figure:
    """Error against keys read."""
    figure, both = _axes(2, 11, 4.6, sharex=True)
    for ax, column, title in zip(
        both, ("mean", "p90"), ("mean over queries and heads", "90th percentile"), strict=True
    ):
        for words, look in LOOKS.items():
            rows = [row for row in rows_of(results["errors"], words) if row["mean"] > 0]
            rows.sort(key=lambda row: row["share"])
            style = {"color": look.colour, "marker": look.marker, "ms": 5, "ls": look.line}
            shares, values = [row["share"] for row in rows], [row[column] for row in rows]
            ax.plot(shares, values, label=look.label, **style)
            for i, row in enumerate(rows if words == "lsh" else []):
                ax.annotate(
                    row["setting"].replace(":", ", "),
                    (row["share"], row[column]),
                    xytext=(-14, -13) if i % 2 else (-14, 7),
                    textcoords="offset points",
                    color=look.colour,
                    fontsize=8,
                )
        ax.set(xscale="log", yscale="log", xlabel="share of the far keys read", title=title)
        _percent_axis(ax.xaxis, (1, 2, 5))
        _percent_axis(ax.yaxis, (1, 2, 5))
    both[0].set_ylabel("error of attention's output")
    both[0].legend(fontsize=9)
    return figure


def heads(results: Results) -> Figure:
    """Errors of heads against the mass of their tail."""
    from numpy import median

    names = [name for name in _compared(results) if name in results["heads"][0]["errors"]]
    figure, axes = _axes(len(names), 13, 4.1, sharey=True, squeeze=False)
    dense = set(results["about"]["dense_layers"])
    rows = sorted(results["heads"], key=lambda row: row["tail"])
    for ax, name in zip(axes[0], names, strict=True):
        look = LOOKS[words_of(name)]
        for marked, marker, label in ((False, "o", "sampled layers"), (True, "x", "dense layers")):
            chosen = [row for row in rows if (row["layer"] in dense) == marked]
            ax.plot(
                [max(row["tail"], 1e-4) for row in chosen],
                [max(row["errors"][name], 1e-5) for row in chosen],
                marker,
                color=look.colour,
                ms=4,
                alpha=0.55,
                mew=1.2 if marked else 0,
                label=label,
            )
        size = max(1, len(rows) // 9)
        parts = [rows[i : i + size] for i in range(0, len(rows) - size // 2, size)]
        middles = [
            (median([r["tail"] for r in part]), median([r["errors"][name] for r in part]))
            for part in parts
        ]
        ax.plot(*zip(*middles, strict=True), color="#1f2328", lw=1.6, label="median")
        mean = sum(row["errors"][name] for row in rows) / len(rows)
        ax.set(xscale="log", yscale="log", title=f"{look.label}\n{name}, mean {mean:.3f}")
        ax.set_xlabel("attention in the tail of the far keys")
        _percent_axis(ax.xaxis)
        _percent_axis(ax.yaxis)
    axes[0][0].set_ylabel("error of a head's output")
    axes[0][0].legend(fontsize=8, loc="lower right")
    return figure


def _compared(results: Results) -> list[str]:
    """Hash tables, and others at the budget that is nearest to what those read."""
    tables = rows_of(results["errors"], "lsh")[:1]
    share = tables[0]["share"] if tables else 0.02
    names = []
    for words in ("topk", "lsh", "scan:2", "priority"):
        rows = tables if words == "lsh" else rows_of(results["errors"], words)
        names += [nearest(rows, share)["name"]] if rows else []
    return names


def layers(results: Results) -> Figure:
    """Error by layer."""
    figure, ax = _axes(1, 11, 3.8)
    numbers = results["about"]["layers"]
    names = [*_compared(results)]
    for method in ("oracle", "quest"):
        budgets = [row["name"] for row in rows_of(results["errors"], method)]
        same = names[0].rpartition(":")[2] if names else ""
        names += [name for name in budgets if name.rpartition(":")[2] == same]
    for row in results["errors"]:
        if row["name"] in names:
            look = LOOKS[words_of(row["name"])]
            label = f"{look.label} ({row['name']})"
            style = {"color": look.colour, "marker": look.marker, "ms": 4}
            ax.plot(numbers, row["layers"], label=label, **style)
    for i, layer in enumerate(results["about"]["dense_layers"]):
        ax.axvspan(
            layer - 0.4, layer + 0.4, color=PAPER, zorder=0, label="dense layers" if not i else None
        )
    ax.set(xlabel="layer", ylabel="mean error", yscale="log")
    _percent_axis(ax.yaxis, (1, 2, 5))
    ax.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    return figure


def observations(results: Results) -> Figure:
    """The three observations, by layer."""
    figure, axes = _axes(3, 13, 3.9)
    rows = results["observations"]
    numbers = [row["layer"] for row in rows]

    def plot(ax: Axes, column: str, label: str, colour: str, style: str = "-") -> None:
        ax.plot(numbers, [row[column] for row in rows], style, color=colour, label=label, ms=3)

    def between(ax: Axes, low: str, high: str, colour: str) -> None:
        ax.fill_between(
            numbers,
            [row[low] for row in rows],
            [row[high] for row in rows],
            color=colour,
            alpha=0.2,
            lw=0,
            label="between heads",
        )

    blue, orange = LOOKS["topk"].colour, LOOKS["lsh"].colour
    ax = axes[0]
    ax.axhspan(findings.SINK_SIMILARITY, 1.005, color="#9fd8b4", lw=0, label="the paper")
    plot(ax, "sink_state_similarity", "first token, state", blue, "o-")
    plot(ax, "sink_key_similarity", "first token, key", orange, "D-")
    plot(ax, "later_state_similarity", "a later token, state", blue, ":")
    plot(ax, "later_key_similarity", "a later token, key", orange, ":")
    ax.set(title="1. first token between inputs", ylim=(min(0, *ax.get_ylim()), 1.03))
    ax = axes[1]
    ax.axhspan(findings.MEAN_STABILITY, 1.005, color="#9fd8b4", lw=0, label="the paper")
    plot(ax, "mean_key_stability", "mean of the heads", orange, "D-")
    plot(ax, "mean_key_stability_lowest_head", "lowest head", orange, ":")
    ax.set(title="2. mean key between inputs", ylim=(min(0.8, ax.get_ylim()[0]), 1.01))
    ax = axes[2]
    ax.axhspan(-0.9, findings.MEAN_SINK_COSINE, color="#9fd8b4", lw=0, label="the paper")
    between(ax, "mean_sink_cosine_lowest_head", "mean_sink_cosine_highest_head", orange)
    plot(ax, "mean_sink_cosine", "mean of the heads", orange, "D-")
    ax.axhline(0, color="#808890", lw=0.8)
    ax.set(title="3. mean key against sink key", ylim=(-1.03, 1.03))
    for ax in axes:
        ax.set(xlabel="layer")
        ax.legend(fontsize=8)
    axes[0].set_ylabel("cosine")
    return figure


def mass(results: Results) -> Figure:
    """Mass of the top 20 % of keys: a heatmap, and the worst heads."""
    import numpy as np

    rows = results["heads"]
    numbers = results["about"]["layers"]
    values = np.array([row["top"] for row in rows]).reshape(len(numbers), -1).T
    figure, (ax, right) = _axes(2, 12, 4.2, width_ratios=(2.4, 1))
    lowest = min(0.7, values.min())
    image = ax.imshow(values, aspect="auto", cmap="magma", vmin=lowest, vmax=1, origin="lower")
    ax.grid(False)
    step = max(1, len(numbers) // 15)
    ax.set_xticks(range(0, len(numbers), step), numbers[::step])
    if len(values) <= LARGEST_HEATMAP:
        ax.set_yticks(range(len(values)))
    ax.set(xlabel="layer", ylabel="head", title="attention covered by the top 20 % of all keys")
    bar = figure.colorbar(image, ax=ax, pad=0.01)
    _percent_axis(bar.ax.yaxis)
    worst = worst_heads(rows)[::-1]
    labels = [f"layer {row['layer']}, head {row['head']}" for row in worst]
    tops = [row["top"] for row in worst]
    right.axvspan(0.7, findings.COVERED, color="#9fd8b4", lw=0, label="the paper")
    right.barh(labels, tops, color=LOOKS["topk"].colour, height=0.6)
    for i, value in enumerate(tops):
        right.text(value - 0.01, i, f"{value:.0%}", ha="right", va="center", color="white", size=8)
    right.set(xlim=(0, 1), title="lowest heads")
    right.grid(axis="y", visible=False)
    right.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1))
    _percent_axis(right.xaxis)
    return figure


def inclusion(results: Results) -> Figure:
    """Rates of inclusion by cosine, the formula, and how many keys there are."""
    figure, (ax, below) = _axes(
        1, 8.5, 6.2, rows=2, sharex=True, gridspec_kw={"height_ratios": (2.2, 1)}
    )
    colours = [LOOKS[name].colour for name in ("lsh", "topk", "oracle", "priority", "quest")]
    for i, tables in enumerate(results["inclusion"]):
        bins = [row for row in tables["bins"] if row["expected"] >= 1]
        if not bins:
            continue
        colour = colours[i % len(colours)]
        at = [(row["cosine_from"] + row["cosine_to"]) / 2 for row in bins]
        ax.plot(at, [row["formula"] for row in bins], color=colour, lw=1.2)
        ax.errorbar(
            at,
            [row["rate"] for row in bins],
            [3 * max(row["grouped_error"], row["binomial_error"]) for row in bins],
            fmt="o",
            ms=3.5,
            capsize=2,
            color=colour,
            label=f"({tables['bits_per_table']}, {tables['num_tables']})",
        )
    ax.set(yscale="log", ylabel="share of keys drawn", title="measured (dots), formula (lines)")
    ax.set_ylim(bottom=max(ax.get_ylim()[0], 1e-6), top=1.6)
    ax.legend(title="(bits, tables)", fontsize=9, loc="lower right")
    bins = results["inclusion"][0]["bins"]
    width = 0.9 * (bins[0]["cosine_to"] - bins[0]["cosine_from"])
    at = [(row["cosine_from"] + row["cosine_to"]) / 2 for row in bins]
    first = results["inclusion"][0]
    name = f"({first['bits_per_table']}, {first['num_tables']})"
    below.bar(at, [row["keys"] for row in bins], width, color="#c9ced4", label="keys")
    below.bar(
        at,
        [row["drawn"] for row in bins],
        width,
        color=colours[0],
        label=f"of them drawn, {name}",
    )
    below.plot(
        at, [row["expected"] for row in bins], "_", color="#1f2328", ms=9, label="expected to be"
    )
    below.set(
        yscale="log", xlabel="cosine of query and centred key", ylabel="number", ylim=(0.7, None)
    )
    below.legend(fontsize=8, loc="upper left")
    return figure
