"""Plots of evaluations, as PNG. matplotlib is imported when one is drawn, not before."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from magicpig import plotting
from magicpig.evals.summary import AVERAGE, Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THEMES = {  # background, text, lines
    "light": ("#ffffff", "#1f2328", "#d5d9de"),
    "dark": ("#16191d", "#e6e8ea", "#3a4048"),
}
COLOURS = {  # of methods' first words; full attention has the colour of the text
    "lsh": "#d55e00",
    "topk": "#1878b8",
    "oracle": "#009e73",
    "quest": "#cc79a7",
    "h2o": "#e69f00",
    "loki": "#56b4e9",
    "streaming": "#9a7430",
    "cpu-dense": "#808890",
    "kv-stream": "#8467c8",
}
SPARE = ("#b03050", "#5f9e3a", "#3f8f9f", "#b0a000")
MARKERS = "osD^vph<>d8H"
LABELS = {"score": "score", "perplexity": "perplexity (lower is better)"}
DPI = 150


def draw(cells: Sequence[Cell], theme: str = "light") -> dict[str, bytes]:
    """PNG files by name: for each metric one of figures against keys read and one of tasks."""
    plotting.require()
    if theme not in THEMES:
        raise ValueError(f"theme must be one of {', '.join(THEMES)}, not {theme!r}")
    styles = _styles(list(dict.fromkeys(cell.method for cell in cells)), theme)
    files = {}
    with _themed(theme):
        for metric in dict.fromkeys(cell.metric for cell in cells):
            its = [cell for cell in cells if cell.metric == metric]
            if any(cell.keys_read is not None for cell in its):
                files[f"{metric}_by_keys_read.png"] = plotting.png(_by_keys_read(its, styles))
            files[f"{metric}_by_task.png"] = plotting.png(_by_task(its, theme))
    return files


Style = dict[str, Any]


def _styles(methods: Sequence[str], theme: str) -> dict[str, Style]:
    """Colour and marker of each method. Variants of a method are paler and paler."""
    colours = {"full": THEMES[theme][1], **COLOURS}
    spare = iter(SPARE * len(methods))
    variants: dict[str, int] = {}
    styles = {}
    for i, method in enumerate(methods):
        family = method.partition(":")[0]
        colour = colours.setdefault(family, next(spare) if family not in colours else "")
        paleness = min(0.28 * variants.get(family, 0), 0.65)
        variants[family] = variants.get(family, 0) + 1
        styles[method] = {
            "color": _paler(colour, paleness),
            "marker": MARKERS[i % len(MARKERS)],
        }
    return styles


def _paler(colour: str, share: float) -> str:
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


@contextmanager
def _themed(theme: str) -> Iterator[None]:
    import matplotlib

    background, text, lines = THEMES[theme]
    settings: Any = {
        **plotting.STYLE,
        "figure.facecolor": background,
        "axes.facecolor": background,
        "axes.edgecolor": lines,
        "axes.labelcolor": text,
        "axes.titlesize": 10,
        "grid.color": lines,
        "grid.linewidth": 0.6,
        "text.color": text,
        "xtick.color": text,
        "ytick.color": text,
        "font.size": 9,
    }
    with matplotlib.rc_context(settings):
        yield


def _panels(
    cells: Sequence[Cell], width: float, height: float, most: int
) -> tuple[Figure, list[tuple[Axes, list[Cell]]]]:
    """A figure with a panel per protocol and length, titled, and the cells of each.

    width, height: of a panel, in inches. most: panels side by side.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    protocols = list(dict.fromkeys(cell.protocol for cell in cells))
    lengths = sorted({cell.length for cell in cells})
    columns = min(len(lengths), most)
    rows_each = -(-len(lengths) // columns)
    rows = rows_each * len(protocols)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    figure = Figure(figsize=(columns * width, rows * height), dpi=DPI, layout=layout)
    axes = figure.subplots(rows, columns, squeeze=False)
    panels = []
    for i, protocol in enumerate(protocols):
        for j in range(rows_each * columns):
            panel = axes[i * rows_each + j // columns][j % columns]
            its = [c for c in cells if c.protocol == protocol and c.length in lengths[j : j + 1]]
            if not its:
                panel.axis("off")
                continue
            panel.set_title(f"{lengths[j]:,} tokens, {protocol}")
            panels.append((panel, its))
    return figure, panels


def _by_keys_read(cells: Sequence[Cell], styles: dict[str, Style]) -> Figure:
    """Averages over tasks against the share of keys read. Full attention is also a line."""
    averages = [c for c in cells if c.task == AVERAGE and c.keys_read is not None]
    many = len({cell.length for cell in cells}) > 1
    figure, panels = _panels(averages, 3.3 if many else 5.6, 2.8 if many else 3.6, most=4)
    shares = [100 * cell.keys_read for cell in averages if cell.keys_read]
    lowest, highest = min(shares, default=1.0), max(shares, default=100.0)
    nothing = lowest / 5 if any(cell.keys_read == 0 for cell in averages) else None
    left, right = (nothing or lowest / 1.5) / 1.5, highest * 1.6
    for panel, its in panels:
        for cell in its:
            if cell.method == "full":
                line = styles["full"]["color"]
                panel.axhline(cell.score, color=line, lw=1, ls=(0, (4, 3)), alpha=0.6, zorder=1)
        places = [100 * cell.keys_read if cell.keys_read else nothing or left for cell in its]
        apart = (right / left) ** 0.016  # half a marker: hardly moved, and all to be seen
        for cell, place in zip(its, _side_by_side(places, apart), strict=True):
            panel.errorbar(
                place,
                cell.score,
                yerr=cell.error,
                linestyle="none",
                markersize=6.5,
                elinewidth=1.2,
                **styles[cell.method],
            )
        panel.set_xscale("log")
        panel.minorticks_off()
        panel.set_xticks(*_percents(lowest / 2.25, right, nothing), fontsize=8)
        panel.set_xlim(left, right)
        panel.set_xlabel("far keys read")
        panel.set_ylabel(LABELS[cells[0].metric])
        panel.label_outer()
    _same_heights([panel for panel, _ in panels], cells[0].metric)
    _legend(figure, {cell.method: styles[cell.method] for cell in averages})
    return figure


def _side_by_side(places: Sequence[float], apart: float) -> list[float]:
    """The places, moved so that those which would hide each other stand a factor apart."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    start = 0
    for end in range(1, len(order) + 1):
        if end < len(order) and places[order[end]] < places[order[start]] * apart:
            continue
        group = order[start:end]
        middle = math.exp(sum(math.log(places[i]) for i in group) / len(group))
        if len(group) > 1:
            for place, i in enumerate(group):
                moved[i] = middle * apart ** (place - (len(group) - 1) / 2)
        start = end
    return moved


def _percents(low: float, high: float, nothing: float | None) -> tuple[list[float], list[str]]:
    """Ticks of a logarithmic axis, and their labels. nothing: where 0 % stands, if it does."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 3) if high / low < 2e3 else (1,)
    ticks = [step * 10.0**power for power in powers for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    labels = [f"{tick:g} %" for tick in ticks]
    return (ticks, labels) if nothing is None else ([nothing, *ticks], ["none", *labels])


def _legend(figure: Figure, styles: dict[str, Style]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="none", markersize=6.5, **style) for style in styles.values()
    ]
    rows = math.ceil(len(styles) / (4 if figure.get_figwidth() < 7 else 8))
    columns = math.ceil(len(styles) / rows)
    figure.legend(handles, list(styles), loc="outside lower center", ncols=columns, handletextpad=0)


def _same_heights(panels: Sequence[Axes], metric: str) -> None:
    """One range of figures for all panels, with some room above and below."""
    low = min(panel.get_ylim()[0] for panel in panels)
    high = max(panel.get_ylim()[1] for panel in panels)
    if metric == "score":
        low, high = max(low, -3.0), min(high, 103.0)
    for panel in panels:
        panel.set_ylim(low, high)


def _by_task(cells: Sequence[Cell], theme: str) -> Figure:
    """The figure of every task and method, as a number on a colour."""
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    background = THEMES[theme][0]
    tasks = list(dict.fromkeys(cell.task for cell in cells if cell.task != AVERAGE))
    if len(tasks) > 1:
        tasks.append(AVERAGE)
    methods = list(dict.fromkeys(cell.method for cell in cells))
    words = max(map(len, tasks))
    width = max(0.075 * words + 0.5 * len(methods) + 0.5, 2.4)
    height = 0.27 * len(tasks) + 0.07 * max(map(len, methods)) + 0.5
    figure, panels = _panels(cells, width, height, most=max(1, int(12 / width)))
    if cells[0].metric == "score":
        colours = LinearSegmentedColormap.from_list("score", ["#c8553d", "#f2d7a0", "#2f7f86"])
        scale = Normalize(0, 100)
    else:
        colours = LinearSegmentedColormap.from_list("cost", ["#2f7f86", "#f2d7a0", "#c8553d"])
        scale = Normalize(min(c.score for c in cells), max(c.score for c in cells))
    for panel, its in panels:
        panel.grid(False)
        panel.spines[:].set_visible(False)
        panel.tick_params(length=0)
        panel.set_xlim(0, len(methods))
        panel.set_ylim(len(tasks), 0)
        panel.set_xticks([i + 0.5 for i in range(len(methods))], methods, rotation=40, ha="right")
        panel.set_yticks([i + 0.5 for i in range(len(tasks))], tasks)
        for cell in its:
            if cell.task not in tasks:
                continue
            x, y = methods.index(cell.method), tasks.index(cell.task)
            colour = colours(scale(cell.score))
            panel.add_patch(_tile(x, y, colour, background))
            panel.text(
                x + 0.5,
                y + 0.52,
                _number(cell),
                ha="center",
                va="center",
                fontsize=7.5,
                color="#1f2328" if _brightness(colour) > 0.45 else "#ffffff",
                fontweight="bold" if cell.task == AVERAGE else "normal",
            )
    return figure


def _tile(x: int, y: int, colour: Any, edge: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=edge, linewidth=1.5)


def _brightness(colour: Sequence[float]) -> float:
    red, green, blue = colour[:3]
    return 0.3 * red + 0.59 * green + 0.11 * blue


def _number(cell: Cell) -> str:
    return f"{cell.score:.0f}" if cell.metric == "score" else f"{cell.score:.2f}"
