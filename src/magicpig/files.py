"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file under another name first, so that nobody ever finds half of it."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
