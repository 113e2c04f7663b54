"""Files that are whole or not there."""

from __future__ import annotations

import glob
import os
from pathlib import Path


def check_file(path: Path, what: str) -> None:
    """Raises unless a file can be written there: before the work, not after it."""
    name = repr(str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} for {what} does not exist")
    if path.is_dir():
        raise IsADirectoryError(f"{name} is a folder: name a file for {what}")
    if path.exists() and not path.is_file():
        raise ValueError(f"{name} is no ordinary file: name another for {what}")
    try:
        trial = partial_of(path.resolve())
        trial.open("xb").close()
        trial.unlink()
    except FileExistsError:  # somebody is writing to it
        pass
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PermissionError(
            f"{name} for {what} cannot be written ({reason}): name another"
        ) from None


def partial_of(path: Path) -> Path:
    """The name under which this process writes a file that is not whole yet."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def sweep(path: Path) -> None:
    """Removes what writers of this file left behind that were killed."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        process_id = left.name.split(".")[-2]
        if process_id.isdigit() and not Path(f"/proc/{process_id}").exists():
            left.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file under another name first, so that nobody ever finds half of it."""
    path = path.resolve()  # a link stays one
    sweep(path)
    temporary = partial_of(path)
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:  # which names no file where a disk is full
        raise OSError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
