"""What an evaluation ran on: versions, hardware, date, and the command that started it."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from magicpig import health


def about() -> dict[str, Any]:
    """Facts about this process and machine, ready for JSON; what cannot be known is None."""
    versions, cpu, core, memory, gpu = (
        check()[0]
        for check in (health.versions, health.cpu, health.native_core, health.memory, health.gpu)
    )
    return {
        "command": command(sys.argv),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions,
        "hardware": {
            "cpu": cpu["model"],
            "cores": cpu["cores"],
            "isa": core["isa"],
            "threads": core["threads"],
            "torch_threads": core["torch_threads"],
            "memory_bytes": memory["limit_bytes"] or memory["total_bytes"],
            "gpus": [
                {"name": one["name"], "memory_bytes": one["total_bytes"]} for one in gpu["gpus"]
            ],
        },
    }


def command(arguments: list[str]) -> str:
    """A command line as one would type it: without the folder that the program lies in."""
    program, *rest = arguments
    path = Path(program)
    if path.name == "__main__.py":
        return shlex.join(["python", "-m", path.parent.name, *rest])
    return shlex.join([path.name if path.is_absolute() else program, *rest])
