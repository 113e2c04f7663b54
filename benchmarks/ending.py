"""How benchmarks end where somebody ends them: without a traceback."""

import sys
from collections.abc import Callable

from magicpig.cli.report import INTERRUPTED, PIPE_CLOSED, silence


def run_script(main: Callable[[], None]) -> None:
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        silence()
        sys.exit(PIPE_CLOSED)
