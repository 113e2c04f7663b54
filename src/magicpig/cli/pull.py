"""`magicpig pull`: makes a built-in model available, offline from then on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pull(
    name: Annotated[str, typer.Argument(help="A built-in model.")] = "smollm2",
    adapter: Annotated[
        Path | None,
        typer.Option(help="adapter.safetensors, with its .json beside it; for smollm2-ruler-32k."),
    ] = None,
    verify: Annotated[bool, typer.Option(help="Check all files of an installed model.")] = False,
) -> None:
    """Fetch a built-in model into the cache folder, and print where it is."""
    from magicpig import models

    print(models.pull(name, adapter=adapter, verify=verify))
