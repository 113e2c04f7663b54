"""The command line: `magicpig generate`, `eval`, `analyze`, `plan`, `pull`, `doctor`."""

from __future__ import annotations

import os
import sys

import typer

from magicpig.cli.analyze import analyze
from magicpig.cli.doctor import doctor
from magicpig.cli.evaluate import app as evaluate
from magicpig.cli.generate import generate
from magicpig.cli.plan import plan
from magicpig.cli.pull import pull
from magicpig.cli.report import INTERRUPTED, fail, reported, silence

PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"  # settings of torch

app = typer.Typer(
    name="magicpig",
    help="Long-context LLM decoding with sampled attention over a KV cache in CPU memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        import magicpig

        print(magicpig.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


for command in (generate, analyze, plan, pull, doctor):
    app.command(rich_help_panel="Commands")(reported(command))

app.add_typer(evaluate, rich_help_panel="Commands")


def _pin_with_threads() -> None:
    """Before torch is there, which pins host memory twice as fast and more by several threads.
    Settings of its allocators that are there already are left alone."""
    settings = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
    if not any(name in os.environ for name in settings):
        os.environ[settings[0]] = PINNING


def main() -> None:
    _pin_with_threads()
    if sys.stdin is None:  # they are None where they were closed
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        fail("stdout is closed: there is nowhere to print to")
        sys.exit(1)
    try:
        app(prog_name="magicpig")
    # Outside a command: while modules are imported, while help is printed.
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        silence()
        fail(str(error))
        sys.exit(1)
