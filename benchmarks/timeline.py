"""What a GPU and the CPU do in decode steps: a trace for Perfetto, figures, and a picture.

    python benchmarks/timeline.py --trace steps.json --plot steps.png
    python benchmarks/timeline.py --read steps.json --plot steps.png    a trace that is there
    python benchmarks/timeline.py --device cpu --model smollm2 --context 2k

Weights are random, and so are keys and values, as in throughput.py. Steps are traced once it is
known whether the batch goes through the model faster whole or as two halves. "both": the share of
the time in which the CPU attends to far contexts and the GPU works. The picture shows a few layers
from the middle of a step: a line for each of the GPU's streams and of the CPU's threads that have
their part.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from arguments import a_device, a_method, a_model, argument, new_file, positive
from ending import run_script
from machine import hardware
from rich.console import Console
from throughput import Bench, attending, covered, spans_of, steps_of, warm_up

from magicpig import plotting, trace
from magicpig.cli.inputs import one_length

COLORS = {"far context": "C1", "attention": "C1", "model": "C0", "window": "C2"}
LAYERS_SHOWN = 5
console = Console(stderr=True, highlight=False)

Span = dict[str, Any]


def record(bench: Bench, system: str, context: int, batch: int, steps: int, path: Path) -> None:
    runner = bench.runner(system)
    kvs = [bench.sequence(runner, context, seed) for seed in range(batch)]
    step = steps_of(runner, kvs)
    warm_up(runner, kvs, step)
    with trace.recording(path):
        for _ in range(steps):
            step()


def by_gpu(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span["pid"] == trace.GPU]


def table(spans: list[Span]) -> str:
    steps = [span for span in spans if span["name"] == "decode"]
    whole = covered(steps)
    cpu, gpu = attending(spans), by_gpu(spans)
    both = covered(cpu) + covered(gpu) - covered(cpu + gpu)
    halves = any(span["name"] == "half" for span in spans)
    cells = [f"{1e-3 * whole / len(steps):.1f}", "two halves" if halves else "whole"]
    cells += [f"{part / whole:.0%}" for part in (covered(cpu), covered(gpu), both)]
    head = "| ms/step | batch | CPU attends | GPU works | both |\n|---:|---|---:|---:|---:|"
    return f"{head}\n| {' | '.join(cells)} |"


def plot(spans: list[Span], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    far = sorted(attending(spans), key=lambda span: float(span["ts"]))
    own = [span for span in far if span["tid"] == far[0]["tid"]]
    first, last = own[len(own) // 2], own[min(len(own) // 2 + LAYERS_SHOWN, len(own)) - 1]
    begin, end = first["ts"], last["ts"] + last["dur"]
    shown = [
        span
        for span in by_gpu(spans) + attending(spans)
        if span["ts"] < end and span["ts"] + span["dur"] > begin
    ]
    lanes = sorted({(-span["pid"], span["tid"]) for span in shown})
    figure, axis = pyplot.subplots(figsize=(11, 1.2 + 0.5 * len(lanes)))
    for name in dict.fromkeys(span["name"] for span in shown):
        label: str | None = name
        for place, (process, thread) in enumerate(lanes):
            bars = [
                (1e-3 * (span["ts"] - begin), 1e-3 * span["dur"])
                for span in shown
                if (-span["pid"], span["tid"], span["name"]) == (process, thread, name)
            ]
            if bars:
                color = COLORS.get(name, "0.6")
                axis.broken_barh(bars, (place - 0.4, 0.8), label=label, color=color, lw=0)
                label = None
    names = ["GPU" if process == -trace.GPU else "CPU" for process, _ in lanes]
    axis.set_yticks(range(len(lanes)), names)
    axis.invert_yaxis()
    axis.set(xlim=(0, 1e-3 * (end - begin)), xlabel="ms")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=argument(a_model), default="llama-3.1-8b", help="its geometry"
    )
    parser.add_argument("--device", type=argument(a_device), help="cuda (the default) or cpu")
    context = argument(lambda text: one_length("the context", text))
    parser.add_argument("--context", type=context, default="32k")
    parser.add_argument("--method", type=argument(a_method), default="lsh:10:150")
    parser.add_argument("--batch", type=argument(positive), default=4)
    parser.add_argument("--steps", type=argument(positive), default=3, help="that are traced")
    parser.add_argument("--trace", type=argument(new_file), help="JSON, for Perfetto")
    parser.add_argument("--plot", type=argument(new_file))
    parser.add_argument("--read", type=Path, help="a trace that is there: nothing is run")
    args = parser.parse_args()
    if args.read and args.trace:
        parser.error("--read runs nothing that --trace could write: leave one of them out")
    try:
        if args.plot:
            plotting.require()
        if not args.read and not args.device:
            args.device = a_device("cuda")
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        path = args.read or args.trace or Path(folder) / "steps.json"
        if not args.read:
            bench = Bench(args.model, args.device)
            with console.status("steps"):
                record(bench, args.method, args.context, args.batch, args.steps, path)
            print(f"{hardware()}; {args.model}, {args.method}, {args.batch} of {args.context:,}\n")
        try:
            spans = spans_of(json.loads(path.read_text()))
        except OSError as error:
            raise SystemExit(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise SystemExit(f"{path} is no trace: {error!r}") from None
        if not any(span["name"] == "decode" for span in spans) or not attending(spans):
            raise SystemExit(f"{path} has no decode steps in which the CPU attends")
    print(table(spans))
    if args.plot:
        plot(spans, args.plot)


if __name__ == "__main__":
    run_script(main)
