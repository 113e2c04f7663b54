"""How commands end: errors in one line, Ctrl-C and closed pipes without a fuss."""

from __future__ import annotations

import functools
import gc
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import typer

INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + signal.SIGPIPE


def fail(message: str) -> None:
    print(f"magicpig: error: {message}", file=sys.stderr)


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with what goes wrong told in a line instead of a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):  # which may be for less than Unicode
            sys.stdout.reconfigure(errors="replace")
        try:
            command(*args, **options)
            sys.stdout.flush()
        except typer.Exit:  # which is a RuntimeError
            raise
        except KeyboardInterrupt:
            _flush()
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            silence()
            raise typer.Exit(PIPE_CLOSED) from None
        except (ValueError, TypeError, OSError, MemoryError, RuntimeError) as error:
            _flush()
            fail(str(error) or type(error).__name__)
            raise typer.Exit(1) from None
        finally:
            gc.enable()  # which a command may have put off

    return run


def print_json(found: dict[str, Any]) -> None:
    """In one line, of characters that the output can have."""
    text = json.dumps(found, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(found)
    print(text)


def silence() -> None:
    """Nothing more is printed: at its end Python would flush once more, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flush() -> None:
    """Partial output ends with a line of its own."""
    if sys.stdout.isatty():
        print()
    sys.stdout.flush()
