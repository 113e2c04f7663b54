"""`magicpig doctor`: what this machine has and gives, and what is wrong with it."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show versions, CPU, GPU, memory, cache folder and measured speeds; name problems."""
    raise NotImplementedError
