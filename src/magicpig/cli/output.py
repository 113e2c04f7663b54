"""rich's console for what commands print."""

from rich.console import Console


class Output(Console):
    """A closed pipe is ours to answer (report.py): rich would exit by itself."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
