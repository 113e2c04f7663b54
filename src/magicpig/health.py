"""The checks of `magicpig doctor`: facts about this machine and installation, and findings.

A check returns facts ready for JSON (what cannot be known here is None) and what it found. It
neither prints nor raises because something is missing or broken.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

import torch

import magicpig
from magicpig import _native, native
from magicpig.models import BUILTIN, cache_folder, store
from magicpig.self_check import difference

ROOT = Path("/")  # of /proc, /sys and /dev
DEFAULT_MODEL = "smollm2"
LITTLE_MEMORY = 2e9  # torch and the default model with a short context, and not much more
LOW_STREAM, LOW_GATHER = 5e9, 2e9  # bytes/s that one core of a machine at rest exceeds


@dataclass(frozen=True)
class Finding:
    """Something to tell: a problem costs speed or stops work, a hint does neither."""

    severity: Literal["problem", "hint"]
    what: str
    mend: str


Checked = tuple[dict[str, Any], list[Finding]]
T = TypeVar("T")


def problem(what: str, mend: str) -> Finding:
    return Finding("problem", what, mend)


def hint(what: str, mend: str) -> Finding:
    return Finding("hint", what, mend)


def versions() -> Checked:
    names = ("torch", "transformers", "numpy")
    facts = {
        "magicpig": magicpig.__version__,
        "python": platform.python_version(),
        **{name: _installed(name) for name in names},
        "platform": platform.platform(),
    }
    from packaging.requirements import Requirement

    findings = []
    for text in _or_none(lambda: metadata.requires("magicpig")) or []:
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        installed = _installed(needed.name)
        wanted = f"{needed.name}{needed.specifier}"
        if installed is None:
            findings.append(problem(f"{needed.name} is not installed", f"pip install '{wanted}'"))
        elif not needed.specifier.contains(installed, prereleases=True):
            what = f"{needed.name} is {installed}; magicpig needs {needed.specifier}"
            findings.append(problem(what, f"pip install --upgrade '{wanted}'"))
    return facts, findings


def cpu() -> Checked:
    lines = (_read("proc/cpuinfo") or "").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores, limit = _cores(), _cpu_limit()
    facts = {
        "model": models[0] if models else platform.processor() or platform.machine() or None,
        "cores": cores,
        "core_limit": limit,
    }
    findings = []
    usable = min((count for count in (cores, limit) if count is not None), default=math.inf)
    for name, threads, variable in (
        ("magicpig", _or_none(native.num_threads), "MAGICPIG_NUM_THREADS"),
        ("torch", torch.get_num_threads(), "OMP_NUM_THREADS"),
    ):
        if threads is not None and threads - 1 >= usable:  # so many as the cure says are well
            what = (
                f"{name} uses {threads} threads, more than the cores this process may use "
                f"({usable:g}): threads will wait for others that do not run"
            )
            mend = f"export {variable}={math.ceil(usable)}, or give the process more cores"
            findings.append(problem(what, mend))
    return facts, findings


def native_core() -> Checked:
    supported = native.supported_isas()
    forced, threads = (os.environ.get(f"MAGICPIG_{name}") for name in ("ISA", "NUM_THREADS"))
    facts = {
        "isa": _or_none(native.isa),
        "supported_isas": supported,
        "threads": _or_none(native.num_threads),
        "torch_threads": torch.get_num_threads(),
        "environment": {"MAGICPIG_ISA": forced, "MAGICPIG_NUM_THREADS": threads},
    }
    findings = []
    for name, ask in (("MAGICPIG_ISA", native.isa), ("MAGICPIG_NUM_THREADS", native.num_threads)):
        try:
            ask()
        except ValueError as error:
            findings.append(problem(str(error), f"unset {name}, or mend its value"))
    if forced in supported[:-1]:
        what = f"MAGICPIG_ISA={forced} forces a plainer instruction set than {supported[-1]}"
        findings.append(problem(what, "unset MAGICPIG_ISA"))
    passed_on = "in a virtual machine, have the host's CPU passed on (QEMU: -cpu host)"
    if supported == ["scalar"]:
        what = "no AVX2: attention takes several times as long as it could"
        findings.append(problem(what, f"use a CPU that has AVX2; {passed_on}"))
    elif supported[-1] == "avx2":
        what = "no AVX-512: attention would be quicker with it"
        findings.append(hint(what, f"nothing on a CPU that lacks it; {passed_on}"))
    return facts, findings


def memory() -> Checked:
    kilobytes = [
        int(words[1])
        for words in map(str.split, (_read("proc/meminfo") or "").splitlines())
        if len(words) > 1 and words[0] == "MemTotal:" and words[1].isdigit()
    ]
    total = kilobytes[0] * 1024 if kilobytes else None
    limit = _memory_limit()
    if limit is not None and limit >= (total or 1 << 60):
        limit = None  # what "no limit" looks like in version 1 of control groups
    free = _native.available_memory()
    known = [size for size in (free, limit) if size is not None and size < 1 << 63]
    available = min(known, default=None)
    setting = _read("sys/kernel/mm/transparent_hugepage/enabled") or ""
    huge_pages = setting.partition("[")[2].partition("]")[0] or None
    facts = {
        "total_bytes": total,
        "available_bytes": available,
        "limit_bytes": limit,
        "huge_pages": huge_pages,
    }
    findings = []
    if available is not None and available < LITTLE_MEMORY:
        what = f"{available / 1e9:.1f} GB of memory are available: long contexts will be refused"
        mend = "end other programs, or raise the memory limit of the container"
        findings.append(problem(what, mend))
    if huge_pages == "never":
        what = "transparent huge pages are off: reading random rows costs more page walks"
        mend = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        findings.append(problem(what, mend))
    return facts, findings


def gpu() -> Checked:
    build = torch.version.cuda or torch.version.hip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a driver that does not suit: told below
        usable = torch.cuda.is_available()
    gpus = [_gpu(i) for i in range(torch.cuda.device_count())] if usable else []
    facts = {"gpus": gpus, "torch_cuda": build}
    findings = []
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if any((ROOT / "dev").glob("nvidia[0-9]*")) and not usable and not hidden:
        if build is None:
            what = f"there is a GPU, but torch {torch.__version__} is built without CUDA"
            mend = "install a CUDA build of torch (pytorch.org, Get Started)"
        else:
            what = f"there is a GPU, but torch, built for CUDA {build}, cannot use it"
            mend = "see whether nvidia-smi works, and update the driver or install an older torch"
        findings.append(problem(what, mend))
    return facts, findings


def cache() -> Checked:
    elsewhere = "set MAGICPIG_CACHE to a folder that you may write to"
    try:
        folder = cache_folder()
    except (OSError, RuntimeError) as error:  # no home, or a current folder that was removed
        facts: dict[str, Any] = {
            "folder": None,
            "writable": False,
            "free_bytes": None,
            "models": {},
        }
        return facts, [problem(f"there is no place for the cache folder: {error}", elsewhere)]
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    writable = os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)
    free = _or_none(lambda: shutil.disk_usage(existing).free)
    models = {name: _model(folder / name, name) for name in BUILTIN}
    facts = {"folder": str(folder), "writable": writable, "free_bytes": free, "models": models}
    findings = []
    for name, model in models.items():
        if model["state"] == "damaged":
            what = f"the model {name} in {folder} is damaged or of an older format"
            findings.append(problem(what, f"magicpig pull {name}"))
    if models[DEFAULT_MODEL]["state"] == "missing":
        what = "the default model is not installed; the first `magicpig generate` will fetch it"
        findings.append(hint(what, f"magicpig pull {DEFAULT_MODEL}"))
    if models[DEFAULT_MODEL]["state"] == "intact":  # there is nothing to write
        return facts, findings
    needed = BUILTIN[DEFAULT_MODEL].disk_bytes
    if not writable:
        findings.append(problem(f"the cache folder {folder} is not writable", elsewhere))
    elif free is not None and free < needed:
        what = (
            f"{free / 1e6:,.0f} MB are free in {folder}; {DEFAULT_MODEL} needs {needed / 1e6:,.0f}"
        )
        mend = "make room, or set MAGICPIG_CACHE to a folder on another disk"
        findings.append(problem(what, mend))
    return facts, findings


def self_test() -> Checked:
    """Each instruction set against the reference. Not run when the threads are set wrongly."""
    if _or_none(native.num_threads) is None:
        return {}, []
    before = _or_none(native.isa) or native.supported_isas()[-1]
    facts: dict[str, str] = {}
    try:
        for isa in native.supported_isas():
            native.set_isa(isa)
            facts[isa] = difference() or "ok"
    finally:
        native.set_isa(before)
    mend = "do not trust results; reinstall magicpig, and report this with `magicpig doctor --json`"
    return facts, [
        problem(f"self-test on {isa}: {text}", mend) for isa, text in facts.items() if text != "ok"
    ]


def roofs() -> Checked:
    """Bytes per second that this machine's memory gives to the threads of the native core."""
    facts: dict[str, Any] = {"stream_bytes_per_second": None, "gather_bytes_per_second": None}
    threads = _or_none(native.num_threads)
    if threads is None:
        return facts, []
    try:
        stream, gather = native.memory_roofs()
    except (MemoryError, RuntimeError):  # too little memory, too many threads: told by others
        return facts, []
    facts = {"stream_bytes_per_second": stream, "gather_bytes_per_second": gather}
    findings = []
    for name, rate, low in (("streamed", stream, LOW_STREAM), ("random", gather, LOW_GATHER)):
        if rate < low:
            what = f"{name} reads give {rate / 1e9:.1f} GB/s with {threads} threads, which is low"
            mend = "the machine is busy or throttled: look at its load, and measure again"
            findings.append(problem(what, mend))
    return facts, findings


CHECKS: dict[str, Callable[[], Checked]] = {
    "versions": versions,
    "cpu": cpu,
    "native": native_core,
    "memory": memory,
    "gpu": gpu,
    "cache": cache,
    "self_test": self_test,
    "roofs": roofs,
}
MEASURED = ("roofs",)  # left out when there is no time


def _or_none(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except (OSError, ValueError, metadata.PackageNotFoundError):
        return None


def _installed(package: str) -> str | None:
    return _or_none(lambda: metadata.version(package))


def _read(path: str) -> str | None:
    return _or_none(lambda: (ROOT / path).read_text(errors="replace"))


def _cores() -> int | None:
    """CPUs that the scheduler may put this process on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _group_settings(controller: str, file: str) -> Iterator[str]:
    """What the control groups of this process, from its own to the root, have in a file."""
    for line in (_read("proc/self/cgroup") or "0::/").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        group = PurePosixPath(path.lstrip("/"))
        for above in (group, *group.parents):  # in a container only the root may be there
            if text := _read(f"sys/fs/cgroup/{controllers}/{above}/{file}"):
                yield text.strip()


def _cpu_limit() -> float | None:
    """CPUs' worth of time that the control groups grant."""
    version_1 = (_group_settings("cpu", f"cpu.cfs_{part}_us") for part in ("quota", "period"))
    pairs = [
        *(text.split() for text in _group_settings("cpu", "cpu.max")),
        *zip(*version_1, strict=False),
    ]
    quotas = [pair for pair in pairs if len(pair) == 2 and all(part.isdigit() for part in pair)]
    return min((int(quota) / int(period) for quota, period in quotas), default=None)


def _memory_limit() -> int | None:
    files = ("memory.max", "memory.limit_in_bytes")  # versions 2 and 1
    texts = [text for file in files for text in _group_settings("memory", file)]
    return min((int(text) for text in texts if text.isdigit()), default=None)


def _gpu(number: int) -> dict[str, Any]:
    try:
        free, total = torch.cuda.mem_get_info(number)
    except RuntimeError:  # full, or another process has it to itself
        free, total = None, torch.cuda.get_device_properties(number).total_memory
    return {
        "name": torch.cuda.get_device_name(number),
        "free_bytes": free,
        "total_bytes": total,
    }


def _model(folder: Path, name: str) -> dict[str, Any]:
    if not os.path.exists(folder):
        return {"state": "missing", "bytes": 0}
    sizes = _or_none(lambda: [path.stat().st_size for path in folder.iterdir()])
    intact = store._intact(folder, BUILTIN[name], verify=False)
    return {"state": "intact" if intact else "damaged", "bytes": sum(sizes) if sizes else None}
