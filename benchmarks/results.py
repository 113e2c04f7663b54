"""docs/results.md: the evaluations behind it, and its tables.

    python benchmarks/results.py run ruler-4k                   one of RUNS, into results/
    python benchmarks/results.py run ruler-16k --device cuda --processes 11 [--methods SOME]
    python benchmarks/results.py run ruler-16k --missing        samples that were not kept yet
    python benchmarks/results.py keep ruler-4k                  its samples, in docs/samples/
    python benchmarks/results.py write                          the tables of docs/results.md

A run is a `magicpig eval` command per task, some at a time; one that was interrupted goes on.
Tables are made of the samples kept, and stand in docs/results.md between marks; the words around
them are written by hand. A method is in a table once all of its samples are there.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev

from ending import run_script
from pages import rewrite
from rich.console import Console
from rich.progress import track

from magicpig.evals import records, ruler
from magicpig.evals.summary import Cell, summary
from magicpig.evals.tables import markdown_table
from magicpig.files import write_whole

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/results.md"
SAMPLES = ROOT / "docs/samples"
TASKS = [task for task in ruler.TASKS if not task.startswith("qa_")]
COMPARED = "full,lsh:10:150,topk:2%,oracle:2%,quest:16:4%,h2o:10%,loki:25%:2%,streaming"
EXACT = "cpu-dense,kv-stream"
SCAN, SCAN_4K = "scan:2:1%", "scan:2:1%:min_rows=1"
SOLVED = 0.75
MASKS = "lsh-mask:10:150,lsh-mask:9:120,lsh-mask:8:75"
MORE_LSH = "lsh:9:120,lsh:8:75"
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Run:
    """What `magicpig eval ruler` is asked for; so many samples with each seed."""

    model: str
    lengths: str
    samples: int
    methods: str
    protocol: str = "easy,hard"
    tasks: tuple[str, ...] = tuple(TASKS)
    seeds: tuple[int, ...] = (0,)


RUNS = {
    "smollm2-4k": Run(
        "smollm2",
        "4k",
        25,
        f"full,lsh:10:150,quest:16:4%,{SCAN}",
        "easy",
        ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "vt", "fwe"),
    ),
    "smollm2-2k": Run(
        "smollm2",
        "2k",
        25,
        f"full,lsh:10:150,topk:2%,oracle:2%,quest:16:4%,{SCAN}",
        "easy,hard",
        ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1"),
    ),
    "ruler-4k": Run("smollm2-ruler-32k", "4k", 10, f"{COMPARED},{MORE_LSH},{EXACT},{SCAN_4K}"),
    "ruler-8k": Run("smollm2-ruler-32k", "8k", 25, f"{COMPARED},{EXACT},{SCAN}"),
    "ruler-16k": Run("smollm2-ruler-32k", "16k", 25, f"{COMPARED},{EXACT},{SCAN}"),
    "ruler-32k": Run("smollm2-ruler-32k", "32k", 25, f"{COMPARED},{EXACT},{SCAN}"),
    "cwe-16k": Run(  # fixed after, and because of, one cell of ruler-16k
        "smollm2-ruler-32k", "16k", 25, f"full,{SCAN}", tasks=("cwe",), seeds=(31, 32, 33, 34)
    ),
    "masks-4k": Run(
        "smollm2-ruler-32k",
        "4k",
        25,
        f"lsh:10:150,{MORE_LSH},{MASKS}",
        "easy",
        ("niah_single_3", "niah_multikey_3", "niah_multivalue", "niah_multiquery", "vt", "cwe"),
    ),
}


def run(
    name: str,
    folder: Path,
    processes: int,
    more: list[str],
    only: list[str] | None,
    missing: bool,
) -> None:
    wanted = RUNS[name]
    jobs = [(task, seed) for task in only or wanted.tasks for seed in wanted.seeds]
    kept = records_of(name) if missing else []

    def one(job: tuple[str, int]) -> str:
        task, seed = job
        out = folder / f"{name}-{task}-{seed}"
        out.mkdir(parents=True, exist_ok=True)
        if missing and not (out / records.FILE).exists():
            own = (r for r in kept if (r["task"], r["seed"]) == job)
            write_whole(out / records.FILE, as_lines(own))
        command = [sys.executable, str(ROOT / "benchmarks/lsh_by_mask.py"), "eval", "ruler"]
        for flag in ("model", "lengths", "samples", "methods", "protocol"):
            command += [f"--{flag}", str(getattr(wanted, flag))]
        command += ["--tasks", task, "--seed", str(seed), "--out", str(out), "--json", *more]
        with (out / "log").open("w") as log:
            result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=log, check=False)
        if result.returncode:
            return f"{task} failed: {(out / 'log').read_text()[-500:]}"
        return ""

    if processes > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("MAGICPIG_NUM_THREADS", "1")
    failed = 0
    with ThreadPoolExecutor(processes) as pool:
        done = pool.map(one, jobs)
        for failure in track(done, total=len(jobs), description=name, console=console):
            if failure:
                failed += 1
                console.print(failure)
    if failed:
        raise SystemExit(f"{failed} of {len(jobs)} tasks failed; run it again to go on")


def keep(name: str, folder: Path) -> None:
    """All samples of a run in one file, beside those kept before; a folder may hold some tasks."""
    found = []
    for each in sorted(folder.glob(f"{name}-*/{records.FILE}")):
        samples, settings = records.read(each.parent)
        found += [{**sample, "seed": settings["seed"]} for sample in samples]
    if not found:
        raise SystemExit(f"no results of {name} in {folder}")
    new = {key_of(r) for r in found}
    found = [r for r in records_of(name) if key_of(r) not in new] + found
    SAMPLES.mkdir(exist_ok=True)
    write_whole(SAMPLES / f"{name}.jsonl.xz", lzma.compress(as_lines(found)))


def key_of(record: records.Record) -> tuple[object, ...]:
    return tuple(record[part] for part in (*records.KEY, "seed"))


def as_lines(found: Iterable[records.Record]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in found).encode()


def records_of(name: str) -> list[records.Record]:
    """As they were kept, each with its seed; none if none were."""
    path = SAMPLES / f"{name}.jsonl.xz"
    if not path.exists():
        return []
    with lzma.open(path, "rt") as text:
        return [{"seed": 0, **json.loads(line)} for line in text]


def solved(found: list[records.Record]) -> list[records.Record]:
    """Records of the tasks that full attention solves, mostly: others tell methods apart badly."""
    scores: dict[tuple[int, str], list[float]] = {}
    for record in found:
        if record["method"] == "full":
            scores.setdefault((record["length"], record["task"]), []).append(record["score"])
    return [r for r in found if mean(scores[r["length"], r["task"]]) >= SOLVED]


def complete(name: str, found: list[records.Record]) -> list[records.Record]:
    """Records of the methods that have all of their samples."""
    counts = Counter(r["method"] for r in found)
    most = max(counts.values(), default=0)
    for method, count in counts.items():
        if count < most:
            console.print(f"{name}: {method} has {count} of {most} samples, and is left out")
    return [r for r in found if counts[r["method"]] == most]


def cells_of(name: str) -> list[Cell]:
    """In the order of tasks and methods."""
    found = complete(name, solved(records_of(name)))
    order = {task: i for i, task in enumerate(TASKS)}
    methods = RUNS[name].methods.split(",")
    found.sort(key=lambda r: (r["length"], r["protocol"], order[r["task"]]))
    found.sort(key=lambda r: methods.index(r["method"]))
    return summary(found)


def table(name: str) -> str:
    """Methods by tasks, both protocols, in Markdown."""
    names = {"niah_single_": "s_", "niah_multikey_": "mk_", "niah_multi": "m"}
    text = markdown_table([cell for cell in cells_of(name) if "mask" not in cell.method])
    for long, short in names.items():
        text = text.replace(long, short)
    return text


def with_error(values: list[float], digits: int) -> str:
    """Their mean and its standard error."""
    return f"{mean(values):.{digits}f} ± {stdev(values) / len(values) ** 0.5:.{digits}f}"


def differences(method: str) -> str:
    """Points that a method has more than full attention, sample by sample, in all runs of it."""
    lines = [
        f"| run | protocol | task | full | {method} | difference | samples |",
        "|---|---|---|" + "---:|" * 4,
    ]
    cells = 0
    for name, wanted in RUNS.items():
        specs = [m for m in wanted.methods.split(",") if m.split(":")[0] == method]
        scores: dict[tuple[str, str, str], dict[tuple[int, int], float]] = {}
        for r in solved(records_of(name)) if specs else []:
            places = scores.setdefault((r["protocol"], r["task"], r["method"]), {})
            places[r["seed"], r["index"]] = 100 * r["score"]
        for protocol, task, spec in sorted(key for key in scores if key[2] in specs):
            full, own = scores[protocol, task, "full"], scores[protocol, task, spec]
            both = sorted(full.keys() & own.keys())
            columns = [[x[place] for place in both] for x in (full, own)]
            more = [b - a for a, b in zip(*columns, strict=True)]
            cells += 1
            if any(more):
                texts = " | ".join(with_error(x, 1) for x in (*columns, more))
                lines.append(f"| {name} | {protocol} | {task} | {texts} | {len(both)} |")
    same = f"\nIn the other {cells - len(lines) + 2} of {cells} cells every sample scores alike.\n"
    return "\n".join(lines) + "\n" + same


def masks(name: str) -> str:
    """lsh beside the same estimator by masks, sample by sample."""
    scores: dict[tuple[str, str], dict[tuple[str, int], float]] = {}
    shares: dict[tuple[str, str], list[int]] = {}
    outputs: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for record in records_of(name):
        key = record["protocol"], record["method"]
        scores.setdefault(key, {})[record["task"], record["index"]] = 100 * record["score"]
        outputs.setdefault(key, {})[record["task"], record["index"]] = record["output"]
        counts = shares.setdefault(key, [0, 0])
        counts[0] += record["cost"]["rows"]
        counts[1] += record["cost"]["tokens"]
    lines = [
        "| protocol | lsh | native | by masks | difference | keys read | same output | samples |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for protocol in ("easy", "hard"):
        for spec in ("10:150", "9:120", "8:75"):
            ours, theirs = (protocol, f"lsh:{spec}"), (protocol, f"lsh-mask:{spec}")
            both = sorted(scores.get(ours, {}).keys() & scores.get(theirs, {}).keys())
            if len(both) < 2:
                continue
            native, masked = ([scores[key][place] for place in both] for key in (ours, theirs))
            more = [a - b for a, b in zip(native, masked, strict=True)]
            read = " / ".join(
                f"{100 * shares[key][0] / shares[key][1]:.2f}" for key in (ours, theirs)
            )
            texts = [with_error(x, 2) for x in (native, masked, more)]
            same = sum(outputs[ours][place] == outputs[theirs][place] for place in both)
            lines.append(
                f"| {protocol} | {spec} | {' | '.join(texts)} | {read} % | {same} | {len(both)} |"
            )
    return "\n".join(lines) + "\n"


def write() -> None:
    """Replaces the marked parts of docs/results.md for which there are samples."""

    def part(make: Callable[[str], str], name: str) -> str | None:
        if records_of(name):
            return make(name)
        console.print(f"no samples of {name}: its part stays")
        return None

    made = {"table": partial(part, table), "masks": partial(part, masks)}
    rewrite(PAGE, {**made, "differences": differences})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("run", "keep", "write"))
    parser.add_argument("name", nargs="?", choices=sorted(RUNS))
    parser.add_argument("--folder", type=Path, default=ROOT / "results")
    parser.add_argument("--processes", type=int, default=1, help="tasks at a time")
    parser.add_argument("--only", nargs="+", choices=TASKS, help="some of the tasks")
    parser.add_argument("--missing", action="store_true", help="not what was kept before")
    args, more = parser.parse_known_args()
    if args.action == "write":
        return write()
    if not args.name:
        parser.error("name a run")
    if args.action == "keep":
        return keep(args.name, args.folder)
    return run(args.name, args.folder, args.processes, more, args.only, args.missing)


if __name__ == "__main__":
    run_script(main)
