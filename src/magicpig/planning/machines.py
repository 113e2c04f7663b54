"""GPUs and CPUs: what plans need to know of them.

GPUs: vendors' figures; the link is what pinned memory reaches, about 80 % of what PCIe names. CPUs:
cores and memory channels as sold; what a program gets of them is measured (docs/log.md) or, for
machines that were not at hand, taken in proportion.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

GB, GIB = 1e9, 2**30
FLOPS_PER_BYTE = 150  # of GPUs that are not listed; most that are have more
CORE_STREAM = 20 * GB  # that a core reads of memory, in order: 14 to 36 were measured
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

    def with_cores(self, cores: int) -> Cpu:
        """So many of them, who may not be enough for all that its memory gives."""
        share = min(1.0, cores * CORE_STREAM / self.stream)
        stream, gather = share * self.stream, share * self.gather
        return replace(self, cores=cores, stream=stream, gather=gather)


XEON = {"entry_seconds": 11e-9, "row_seconds": 50e-9}  # fitted to measurements (docs/log.md)


def _cpu(name: str, cores: int, channels: float, **seconds: float) -> Cpu:
    """channels: GB/s that its memory gives on paper."""
    stream = STREAMED * channels * GB
    return Cpu(name, cores, stream, GATHERED * stream, **seconds)


GPUS = [
    Gpu("A10", 24 * GIB, 600 * GB, 125e12),
    Gpu("A40", 48 * GIB, 696 * GB, 150e12),
    Gpu("A100-40GB", 40 * GIB, 1555 * GB, 312e12),
    Gpu("A100-80GB", 80 * GIB, 2039 * GB, 312e12),
    Gpu("B200", 180 * GIB, 8000 * GB, 2250e12, PCIE5),
    Gpu("H20", 96 * GIB, 4000 * GB, 148e12, PCIE5),
    Gpu("H100", 80 * GIB, 3350 * GB, 989e12, PCIE5),
    Gpu("H200", 140 * GIB, 4800 * GB, 989e12, PCIE5),
    Gpu("L4", 24 * GIB, 300 * GB, 121e12),
    Gpu("L20", 48 * GIB, 864 * GB, 119.5e12),
    Gpu("L40", 48 * GIB, 864 * GB, 181e12),
    Gpu("L40S", 48 * GIB, 864 * GB, 362e12),
    Gpu("RTX-3090", 24 * GIB, 936 * GB, 71e12),
    Gpu("RTX-4090", 24 * GIB, 1008 * GB, 165e12),
    Gpu("RTX-5090", 32 * GIB, 1792 * GB, 209e12, PCIE5),
    Gpu("RTX-A6000", 48 * GIB, 768 * GB, 155e12),
    Gpu("RTX-6000-Ada", 48 * GIB, 960 * GB, 364e12),
    Gpu("V100-32GB", 32 * GIB, 900 * GB, 125e12, 12 * GB),  # in float16
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
    """The machine of that name, however it is written; whole words of it are enough."""

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    def words_of(full: str) -> set[str]:
        words = full.lower().split("-")
        ends = range(1, len(words) + 1)
        return {"".join(words[first:end]) for end in ends for first in range(end)}

    found = [one for one in known if plain(one.name) == plain(name)]
    if not found:
        found = [one for one in known if plain(name) in words_of(one.name)]
    if len(found) != 1:
        which = "is not known" if not found else "could be more than one"
        names = ", ".join(one.name for one in found or known)
        raise ValueError(f"{flag} {name!r} {which}: {names}")
    return found[0]


def any_gpu(name: str, memory: float | None, bandwidth: float | None) -> Gpu:
    """One of those that are known, which has so much at most, or another with so much.

    ValueError for a GPU that is not known, and for more memory than it has.
    """
    try:
        gpu = named(name, GPUS, "--gpu")
    except ValueError as error:
        if memory and bandwidth:
            return Gpu(name, memory, bandwidth, FLOPS_PER_BYTE * bandwidth)
        raise ValueError(f"{error}; --gpu-memory and --gpu-bandwidth describe others") from None
    return limited(gpu, memory, bandwidth)


def limited(gpu: Gpu, memory: float | None, bandwidth: float | None) -> Gpu:
    if memory and memory > gpu.memory:
        raise ValueError(
            f"--gpu-memory is {memory / GIB:,.1f} GiB, more than the {gpu.name} has, "
            f"{gpu.memory / GIB:,.1f} GiB: take less, or another --gpu"
        )
    return replace(gpu, memory=memory or gpu.memory, bandwidth=bandwidth or gpu.bandwidth)
