"""Which instruction set the native core uses, how many threads, and what memory gives these.

Process-wide.
"""

from __future__ import annotations

from magicpig import _native
from magicpig.config import check_int

ROW_BYTES = 512  # key and value of a token: head_dim 128 in bfloat16


def isa() -> str:
    """The instruction set in use: the best supported one, unless MAGICPIG_ISA or set_isa chose."""
    return _native.isa()


def supported_isas() -> list[str]:
    """Instruction sets this machine supports, from the plainest to the best."""
    return _native.supported_isas()


def set_isa(name: str) -> None:
    """Chooses an instruction set for calls from now on."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {name!r}")
    _native.set_isa(name)


def num_threads() -> int:
    """Threads that work on a call, the caller's included."""
    return _native.num_threads()


def set_num_threads(count: int) -> None:
    """Sets how many threads work on a call.

    At first: the CPUs this process may use, or MAGICPIG_NUM_THREADS.
    """
    check_int("count", count, 1, 1024)
    _native.set_num_threads(count)


def memory_roofs() -> tuple[float, float]:
    """Bytes per second that all threads read together: one after the other, and in rows of 512 at
    random places. Takes seconds, and up to 4 GiB: caches of large processors hold half of one.
    """
    wanted, free = min(max(4, num_threads()), 16) << 28, _native.available_memory()
    size = min(wanted, max(free // 8, min(free // 2, 1 << 28)))
    return _native.stream_read_roof(size, 5), _native.gather_read_roof(size, ROW_BYTES, 3)
