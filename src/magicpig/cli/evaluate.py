"""`magicpig eval ruler | reasoning | perplexity`: methods compared on the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from magicpig.cli.inputs import layer_list, length_list, one_length, read_text, word_list
from magicpig.cli.report import reported

app = typer.Typer(
    name="eval",
    help="Compare methods: the same prompts, each read once, answered by every method.",
    no_args_is_help=True,
)

WHAT, HOW = "What is evaluated", "Machine and output"


def option(panel: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **settings)


Model = Annotated[str, option(WHAT, help="Built-in name, folder or hub name.")]
Methods = Annotated[
    str,
    option(WHAT, help="Specs with commas between: full,lsh:10:150,scan:2:1%,quest:16:4% ..."),
]
Lengths = Annotated[str, option(WHAT, help="Tokens of prompt and answer, like 4k,8k.")]
Samples = Annotated[int, option(WHAT, min=1, help="Prompts of each task and length.")]
Protocol = Annotated[
    str,
    option(
        WHAT,
        help="easy: the whole prompt is read exactly. hard: the context is, and the question goes "
        "through the method, token by token. easy,hard: both.",
    ),
]
DenseLayers = Annotated[
    str | None, option(WHAT, help="Layers that read all, like 0,15. (first, middle)")
]
Seed = Annotated[int, option(WHAT, min=0, help="Of the prompts.")]
Out = Annotated[
    Path | None,
    option(
        HOW,
        help="Folder for samples.jsonl, results.json, report.html and plots. Run again to go on.",
    ),
]
BatchSize = Annotated[
    int | None, option(HOW, min=1, help="Prompts answered together. (1 on CPUs, 8 on GPUs)")
]
Device = Annotated[str, option(HOW, help="auto, cpu, cuda or cuda:N.")]
DType = Annotated[str, option(HOW, help="auto, bfloat16, float32, ...")]
Threads = Annotated[int | None, option(HOW, min=1, help="CPU threads. (all)")]
AsJson = Annotated[bool, option(HOW, "--json", help="Figures as one JSON object.")]

DEFAULT_METHODS = "full,scan:2:1%,lsh:10:150,topk:2%,quest:16:4%"


@app.command()
@reported
def ruler(
    model: Model = "smollm2",
    methods: Methods = DEFAULT_METHODS,
    lengths: Lengths = "4k",
    tasks: Annotated[
        str, option(WHAT, help="Names with commas between, or all that have their data.")
    ] = "all",
    samples: Samples = 10,
    protocol: Protocol = "easy",
    dense_layers: DenseLayers = None,
    seed: Seed = 0,
    squad: Annotated[
        Path | None, option(WHAT, help="SQuAD as published (dev-v2.0.json), for qa_1.")
    ] = None,
    hotpotqa: Annotated[
        Path | None,
        option(WHAT, help="HotpotQA as published (hotpot_dev_distractor_v1.json), for qa_2."),
    ] = None,
    out: Out = None,
    batch: BatchSize = None,
    device: Device = "auto",
    dtype: DType = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """RULER: needles, chains of variables and word counts in long texts.

    magicpig eval ruler --methods full,lsh:10:150,quest:16:4%,topk:2% --lengths 4k --out ruler
    """
    from magicpig.cli import evaluating
    from magicpig.evals import ruler as suite

    data = {"qa_1": squad, "qa_2": hotpotqa}
    possible = [task for task in suite.TASKS if data.get(task, True)]
    chosen = word_list("--tasks", tasks, suite.TASKS, default=possible)
    for task, flag in (("qa_1", "--squad"), ("qa_2", "--hotpotqa")):
        if task in chosen and task not in possible:
            raise ValueError(f"{task} needs its data: give {flag} FILE")
    evaluating.generation_tasks(
        "RULER",
        lambda task, length, index, count, reserve: suite.make(
            task, length, index, count, seed, data.get(task), reserve=reserve
        ),
        chosen,
        evaluating.Settings(
            model, methods, length_list(lengths), samples, protocol, layer_list(dense_layers), seed
        ),
        evaluating.Machine(out, batch, device, dtype, threads, as_json),
    )


@app.command()
@reported
def reasoning(
    model: Model = "smollm2",
    methods: Methods = DEFAULT_METHODS,
    lengths: Lengths = "4k",
    tasks: Annotated[str, option(WHAT, help="ops2, ops4, ops5, or all.")] = "all",
    samples: Samples = 10,
    protocol: Protocol = "easy",
    dense_layers: DenseLayers = None,
    seed: Seed = 0,
    out: Out = None,
    batch: BatchSize = None,
    device: Device = "auto",
    dtype: DType = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Arithmetic word problems of 2, 4 and 5 operations among many statements that do not matter.

    magicpig eval reasoning --methods full,lsh:10:150,oracle:2% --lengths 4k --out reasoning
    """
    from magicpig.cli import evaluating
    from magicpig.evals import reasoning as suite

    evaluating.generation_tasks(
        "Reasoning",
        lambda task, length, index, count, reserve: suite.make(
            task, length, index, count, reserve, seed
        ),
        word_list("--tasks", tasks, suite.TASKS),
        evaluating.Settings(
            model, methods, length_list(lengths), samples, protocol, layer_list(dense_layers), seed
        ),
        evaluating.Machine(out, batch, device, dtype, threads, as_json),
    )


def _names(files: list[Path]) -> list[str]:
    """As short as they differ: of a file, with as many of its folders as it takes."""
    parts = [path.resolve().parts for path in files]
    depth = 1
    while len({each[-depth:] for each in parts}) < len(files):
        depth += 1
    return ["/".join(each[-depth:]) for each in parts]


@app.command()
@reported
def perplexity(
    file: Annotated[
        list[Path],
        option(WHAT, "--file", "-f", help="A long text. Repeatable.", show_default=False),
    ],
    model: Model = "smollm2",
    methods: Methods = DEFAULT_METHODS,
    tokens: Annotated[
        str | None, option(WHAT, help="Of each text, like 4k; the second half is predicted. (8k)")
    ] = None,
    dense_layers: DenseLayers = None,
    out: Out = None,
    device: Device = "auto",
    dtype: DType = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Perplexity of the second half of a text, decoded token by token with each method.

    magicpig eval perplexity --file book.txt --methods full,lsh:10:150 --out book
    """
    from magicpig.cli import evaluating
    from magicpig.evals.perplexity import Text

    if len({path.resolve() for path in file}) < len(file):
        raise ValueError("--file names a text twice: its samples would be no two")
    evaluating.perplexity(
        [Text(name, read_text(path)) for name, path in zip(_names(file), file, strict=True)],
        one_length("--tokens", tokens),
        evaluating.Settings(model, methods, [], 1, "easy", layer_list(dense_layers), 0),
        evaluating.Machine(out, None, device, dtype, threads, as_json),
    )
