"""`magicpig pull`: makes a built-in model available, offline from then on."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(
    name: Annotated[str, typer.Argument(help="A built-in model.")] = "smollm2",
    verify: Annotated[bool, typer.Option(help="Check all files of an installed model.")] = False,
) -> None:
    """Fetch a built-in model into the cache folder, and print where it is."""
    from magicpig import models

    print(models.pull(name, verify=verify))
