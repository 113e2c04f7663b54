"""What throughput.py measured, as tables and a plot.

    python benchmarks/throughput_report.py docs/throughput-h200.json [NEWER.json ...]

takes points of newer runs into the first file, in place of those of the same system, context and
batch, and writes the plot beside it anew; so it does the tables of docs/performance.md, if the file
is the one that they are of, or those of another --page.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ending import run_script
from pages import rewrite

from magicpig.files import write_whole

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {DOCS / "throughput-h200.json": DOCS / "performance.md"}  # whose tables are of which file
BUDGETS = ["24GiB", "40GiB", "48GiB", "none"]


@dataclass(frozen=True)
class Point:
    """What was measured; None where it does not apply.

    fits: the budgets that this batch fits into; none for a batch of 0.
    """

    system: str
    context: int
    batch: int
    fits: list[str]
    ms_per_step: float | None = None
    tokens_per_second: float | None = None
    cpu_busy: float | None = None
    threads_busy: float | None = None
    gpu_busy: float | None = None
    us_between: float | None = None
    host_gb_per_second: float | None = None
    of_roof: float | None = None
    keys_read: float | None = None
    gpu_bytes: int | None = None
    host_bytes: int | None = None


HEADER = (
    "system,context,batch,fits,ms/step,tokens/s,CPU busy,threads,GPU busy,between us,GB/s,of roof,"
    "keys,GPU GB,CPU GB"
)


def cell(value: float | None, form: str, scale: float = 1) -> str:
    return "" if value is None else format(scale * value, form)


def markdown(header: str, lines: list[list[str]]) -> str:
    names = header.split(",")
    rule = f"|---|{'---:|' * (len(names) - 1)}"
    return "\n".join(f"| {' | '.join(line)} |" if line else rule for line in [names, [], *lines])


def table(points: list[Point]) -> str:
    lines = [
        [
            p.system,
            f"{p.context:,}",
            str(p.batch) if p.batch else "does not fit",
            " ".join(p.fits),
            cell(p.ms_per_step, ".1f"),
            cell(p.tokens_per_second, ".1f"),
            cell(p.cpu_busy, ".0%"),
            cell(p.threads_busy, ".0%"),
            cell(p.gpu_busy, ".0%"),
            cell(p.us_between, ".0f"),
            cell(p.host_gb_per_second, ".1f"),
            cell(p.of_roof, ".0%"),
            cell(p.keys_read, ".2%"),
            cell(p.gpu_bytes, ".1f", 1e-9),
            cell(p.host_bytes, ".1f", 1e-9),
        ]
        for p in points
    ]
    return markdown(HEADER, lines)


def best(points: list[Point], context: int, budget: str, system: str) -> Point | None:
    own = [
        p
        for p in points
        if (p.system, p.context) == (system, context) and budget in p.fits and p.tokens_per_second
    ]
    return max(own, key=lambda p: p.tokens_per_second or 0, default=None)


def best_table(points: list[Point], budgets: list[str]) -> str:
    """Tokens per second at the best batch, by context and budget."""
    systems = list(dict.fromkeys(p.system for p in points))
    lines = []
    for context in dict.fromkeys(p.context for p in points):
        for budget in budgets:
            found = [best(points, context, budget, system) for system in systems]
            cells = [f"{p.tokens_per_second:.1f} ({p.batch})" if p else "-" for p in found]
            lines.append([f"{context:,}", budget, *cells])
    return markdown(",".join(["context", "GPU memory", *systems]), lines)


def plot(points: list[Point], path: Path) -> None:
    """Throughput over the batch: a panel for each context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    contexts = sorted({p.context for p in points if p.batch})
    width = max(1, len(contexts))
    figure, axes = pyplot.subplots(1, width, figsize=(4.8 * width, 4), squeeze=False)
    for axis, context in zip(axes[0], contexts, strict=False):
        for i, system in enumerate(dict.fromkeys(p.system for p in points)):
            own = [p for p in points if (p.system, p.context) == (system, context)]
            shown = [(p.batch, p.tokens_per_second) for p in own if p.tokens_per_second]
            if shown:
                axis.plot(*zip(*shown, strict=True), marker="o", label=system, color=f"C{i}")
        axis.set(title=f"{context:,} tokens", xlabel="batch", ylabel="tokens/s")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def merged(old: list[Point], new: list[Point]) -> list[Point]:
    """New points in the places of old ones; what fits into budgets that were not asked for is
    known from those."""
    places = {(p.system, p.context, p.batch): p for p in old}
    asked = {budget for point in new for budget in point.fits}
    for point in new:
        key = point.system, point.context, point.batch
        known = {*places[key].fits} - asked if key in places else set()
        places[key] = replace(point, fits=sorted({*point.fits} | known, key=_place))
    systems = list(dict.fromkeys(p.system for p in places.values()))
    contexts = list(dict.fromkeys(p.context for p in places.values()))
    return sorted(
        places.values(), key=lambda p: (contexts.index(p.context), systems.index(p.system), p.batch)
    )


def _place(budget: str) -> tuple[int, str]:
    return BUDGETS.index(budget) if budget in BUDGETS else -1, budget


def read(path: Path) -> list[Point]:
    """Ends the program where it is no such file."""
    try:
        points = [Point(**point) for point in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise SystemExit(f"{path} is not what throughput.py writes: {error}") from None
    if not points:
        raise SystemExit(f"{path} has no points")
    return points


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kept", type=Path)
    parser.add_argument("newer", type=Path, nargs="*")
    parser.add_argument("--page", type=Path, help="whose tables are written anew")
    args = parser.parse_args()
    points = read(args.kept)
    for path in args.newer:
        points = merged(points, read(path))
    write_whole(args.kept, (json.dumps([asdict(p) for p in points], indent=1) + "\n").encode())
    plot(points, args.kept.with_suffix(".png"))

    def batches(context: str) -> str:
        return table([p for p in points if p.context == int(context) and p.batch])

    page = args.page or PAGES.get(args.kept.resolve())
    if page:
        rewrite(page, {"best": lambda _: best_table(points, BUDGETS), "batches": batches})


if __name__ == "__main__":
    run_script(main)
