"""That something is being done, on terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def spinner(words: str) -> Iterator[Callable[[str], object]]:
    """Turns beside the words, where somebody watches; gives a way to change them."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda words: None
        return
    with console.status(words) as status:
        yield status.update
