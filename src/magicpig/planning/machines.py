"""GPUs and CPUs: what plans need to know of them.

GPUs: vendors' figures; the link is what pinned memory reaches, about 80 % of what PCIe names. CPUs:
cores and memory channels as sold; what a program gets of them is measured (docs/log.md) or, for
machines that were not at hand, taken in proportion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

GB, GIB = 1e9, 2**30
STREAMED = 0.8  # of what memory channels give on paper
GATHERED = 0.4  # of streamed reads: random rows of 512 bytes, prefetched

PCIE4, PCIE5 = 25 * GB, 52 * GB


@dataclass(frozen=True)
class Gpu:
    """memory: bytes. bandwidth, link: bytes/s. flops: multiply-adds count two, dense, bfloat16."""

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float = PCIE4


@dataclass(frozen=True)
class Cpu:
    """stream, gather: bytes/s that all cores together read, in order or in random rows.

    entry_seconds: that a core takes for an entry of a hash bucket. row_seconds: for a row of 512
    bytes that was drawn. macs: products of codes and queries that it does in a second. flops: of
    linear layers on it, where there is no GPU.
    """

    name: str
    cores: int
    stream: float
    gather: float
    memory: float | None = None
    entry_seconds: float = 4.3e-9
    row_seconds: float = 14.5e-9
    macs: float = 118e9
    flops: float = 220e9


XEON = {"entry_seconds": 11e-9, "row_seconds": 50e-9}  # fitted to measurements (docs/log.md)


def _cpu(name: str, cores: int, channels: float, **seconds: float) -> Cpu:
    """channels: GB/s that its memory gives on paper."""
    stream = STREAMED * channels * GB
    return Cpu(name, cores, stream, GATHERED * stream, **seconds)


GPUS = [
    Gpu("A10", 24 * GIB, 600 * GB, 125e12),
    Gpu("A100-40GB", 40 * GIB, 1555 * GB, 312e12),
    Gpu("A100-80GB", 80 * GIB, 2039 * GB, 312e12),
    Gpu("H100", 80 * GIB, 3350 * GB, 989e12, PCIE5),
    Gpu("H200", 140 * GIB, 4800 * GB, 989e12, PCIE5),
    Gpu("L4", 24 * GIB, 300 * GB, 121e12),
    Gpu("L20", 48 * GIB, 864 * GB, 119.5e12),
    Gpu("L40S", 48 * GIB, 864 * GB, 362e12),
    Gpu("RTX-3090", 24 * GIB, 936 * GB, 71e12),
    Gpu("RTX-4090", 24 * GIB, 1008 * GB, 165e12),
    Gpu("RTX-5090", 32 * GIB, 1792 * GB, 209e12, PCIE5),
    Gpu("RTX-A6000", 48 * GIB, 768 * GB, 155e12),
    Gpu("RTX-6000-Ada", 48 * GIB, 960 * GB, 364e12),
]

CPUS = [
    Cpu("EPYC-2-cores", 2, 35 * GB, 14 * GB),  # measured: a virtual machine on Zen 4
    Cpu("Xeon-16-cores", 16, 119 * GB, 80 * GB, **XEON),  # measured: a machine beside an H200
    _cpu("Core-i9-14900K", 8, 89.6),  # its fast cores
    _cpu("EPYC-7543", 32, 204.8),
    _cpu("EPYC-9354", 32, 460.8),
    _cpu("Ryzen-7950X", 16, 83.2),
    _cpu("Xeon-6430", 32, 281.6, **XEON),
    _cpu("Xeon-8563C", 52, 358.4, **XEON),
]

Machine = TypeVar("Machine", Gpu, Cpu)


def named(name: str, known: list[Machine], flag: str) -> Machine:
    """The machine of that name, however it is written."""

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    found = [one for one in known if plain(one.name) == plain(name)]
    if not found:
        found = [one for one in known if plain(name) and plain(name) in plain(one.name)]
    if len(found) != 1:
        which = "is not known" if not found else "could be more than one"
        names = ", ".join(one.name for one in found or known)
        raise ValueError(f"{flag} {name!r} {which}: {names}")
    return found[0]
