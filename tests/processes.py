"""Running code in a process of its own, and code that fails."""

import os
import subprocess
import sys
import textwrap


def run_python(
    code: str, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )


def raising(error):
    def fail(*_, **__):
        raise error

    return fail
