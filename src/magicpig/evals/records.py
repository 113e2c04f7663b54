"""What an evaluation found, sample by sample, in a file that a crash cannot spoil.

samples.jsonl has one line per (task, length, protocol, index, method) and only grows; beside it
settings.json says what all of them were made with. An evaluation that is run again goes on where
the last one stopped.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from magicpig.files import write_whole

Record = dict[str, Any]
Key = tuple[str, int, str, int, str]

FILE = "samples.jsonl"
SETTINGS_FILE = "settings.json"
KEY = ("task", "length", "protocol", "index", "method")


class Records:
    """The records of a folder's samples.jsonl, open to be added to; close it, or use `with`.

    folder: made if it is not there. One process at a time may have it open.
    settings: whatever records must have in common to be compared (model, seed, window ...), as
        JSON can hold it. Written when the folder is new; later they must be the same.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / FILE
        self._file: BinaryIO = open(self.path, "a+b")  # noqa: SIM115
        try:
            self._lock()
            _agree(self.folder, settings)
            self._records, whole = _parsed(self.path)
            self._file.truncate(whole)
        except BaseException:
            self._file.close()
            raise

    def done(self, task: str, length: int, protocol: str, index: int, method: str) -> bool:
        return (task, length, protocol, index, method) in self._records

    def get(self, task: str, length: int, protocol: str, index: int, method: str) -> Record | None:
        return self._records.get((task, length, protocol, index, method))

    def append(self, record: Record) -> None:
        """Adds a record to the file at once. One that is there already is a ValueError."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        _add(self._records, record, repr(str(self.path)))
        self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another evaluation is writing to {str(self.folder)!r}: wait for it, or take "
                "another folder"
            ) from None


def read(folder: str | Path) -> tuple[list[Record], dict[str, Any]]:
    """Records and settings of a folder, which is left as it is."""
    folder = Path(folder)
    for name in (FILE, SETTINGS_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"there is no {name} in {str(folder)!r}: no evaluation was run there")
    records, _ = _parsed(folder / FILE)
    return list(records.values()), _settings(folder / SETTINGS_FILE)


def _agree(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes the settings, or raises for one that is not what the folder was begun with."""
    path = folder / SETTINGS_FILE
    now = json.loads(json.dumps(settings, allow_nan=False))  # tuples become lists, as when read
    if not path.exists():
        write_whole(path, json.dumps(now, indent=2).encode() + b"\n")
        return
    begun = _settings(path)
    for name in [*begun, *(name for name in now if name not in begun)]:
        before, after = (
            json.dumps(values[name]) if name in values else "unset" for values in (begun, now)
        )
        if before != after:
            raise ValueError(
                f"the samples in {str(folder)!r} were made with {name} = {before}, and {name} is "
                f"{after} now: use another folder, or the same settings"
            )


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text())
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(
            f"{str(path)!r} is not JSON, or no object: put it right, or use another folder"
        )
    return settings


def _parsed(path: Path) -> tuple[dict[Key, Record], int]:
    """The records of a file, and the length of its whole lines: the last may have been cut."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    records: dict[Key, Record] = {}
    for number, line in enumerate(data[:whole].splitlines(), 1):
        where = f"line {number} of {str(path)!r}"
        try:
            record = json.loads(line)
        except ValueError:
            raise ValueError(f"{where} is not JSON: remove that line") from None
        _add(records, record, where)
    return records, whole


def _add(records: dict[Key, Record], record: Record, where: str) -> None:
    missing = [name for name in KEY if name not in record]
    if missing:
        raise ValueError(f"{where}: a record without {', '.join(missing)}")
    key: Key = tuple(record[name] for name in KEY)
    if key in records:
        said = ", ".join(f"{name} {value}" for name, value in zip(KEY, key, strict=True))
        raise ValueError(f"{where}: there is a record of {said} already")
    records[key] = record
