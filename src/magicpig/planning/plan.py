"""Plans: every system at its largest and at its best batch, and which one is best."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from typing import Any

from magicpig.planning.costs import Load, Machine, Step, System, systems
from magicpig.planning.geometry import ModelGeometry

BATCHES = 256  # largest that is looked at
SHORTER = 1024  # tokens by which contexts are shortened, where nothing fits
ENOUGH = 0.99  # of the best throughput: the smallest batch that reaches it is taken


@dataclass(frozen=True)
class Choice:
    """batch: the smallest that has nearly the system's best throughput; 0: not one sequence fits.

    largest: that fits, of those that are looked at. alone: a step of one sequence. step: of
    `batch`. lacks: the memory that is too small where none fits, "GPU" or "CPU".
    """

    system: str
    largest: int
    batch: int
    alone: Step
    step: Step
    lacks: str | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.step.seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "system": self.system,
            "method": "full" if self.system == "gpu-only" else self.system,
            "largest_batch": self.largest,
            "batch": self.batch,
            "ms_per_step": 1e3 * self.step.seconds if self.batch else None,
            "tokens_per_second": self.tokens_per_second if self.batch else None,
            "tokens_per_second_alone": 1 / self.alone.seconds if self.batch else None,
            "bound": self.step.bound if self.batch else None,
            "lacks": self.lacks,
            "gpu_memory_bytes": int(self.step.gpu_memory),
            "cpu_memory_bytes": int(self.step.cpu_memory),
        }


def choices(
    model: ModelGeometry, machine: Machine, load: Load, most: int = BATCHES
) -> list[Choice]:
    return [_choice(system, most) for system in systems(model, machine, load)]


def _choice(system: System, most: int) -> Choice:
    largest = system.largest_batch(most)
    rates = {n: n / system.step(n).seconds for n in range(1, largest + 1)}
    best = max(rates.values(), default=0.0)
    batch = next((n for n, rate in rates.items() if rate >= ENOUGH * best), 0)
    alone, step = system.step(1), system.step(max(batch, 1))
    lacks = None if batch else system.lacks()
    return Choice(system.name, largest, batch, alone, step, lacks)


def best_of(found: list[Choice]) -> Choice | None:
    """With the highest throughput; None where nothing fits."""
    fitting = [choice for choice in found if choice.batch]
    return max(fitting, key=lambda choice: choice.tokens_per_second, default=None)


def longest_that_fits(model: ModelGeometry, machine: Machine, load: Load) -> dict[str, Any] | None:
    """The longest context of which one sequence fits, and a system that it fits with; None: not
    even a short one."""

    def fitting(steps: int) -> list[str]:
        shorter = replace(load, context=steps * SHORTER)
        return [s.name for s in systems(model, machine, shorter) if s.largest_batch(1)]

    most = min(load.context, model.longest or load.context) // SHORTER
    steps = bisect_left(range(1, most + 1), True, key=lambda n: not fitting(n))
    return {"context": steps * SHORTER, "system": fitting(steps)[0]} if steps else None


def as_dict(model: ModelGeometry, machine: Machine, load: Load, most: int) -> dict[str, Any]:
    found = choices(model, machine, load, most)
    best = best_of(found)
    return {
        "model": model.as_dict(),
        "gpu": asdict(machine.gpu) if machine.gpu else None,
        "cpu": asdict(machine.cpu),
        "load": asdict(load),
        "largest_looked_at": most,
        "context_too_long": load.context > (model.longest or load.context),
        "systems": [choice.as_dict() for choice in found],
        "best": best.system if best else None,
        "longest_that_fits": None if best else longest_that_fits(model, machine, load),
    }
