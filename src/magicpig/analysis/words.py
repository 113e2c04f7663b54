"""Verdicts, and numbers in sentences."""

from __future__ import annotations

AGREES, IN_PART, DIFFERS = "agrees", "agrees in part", "does not agree"
HELPS, HELPS_IN_PART, DOES_NOT_HELP = "helps", "helps in part", "does not help"

Finding = tuple[str, str, str]  # name, verdict, sentence


def helps(wins: int, cases: int) -> str:
    """The verdict on a method that was better in some of the cases."""
    return HELPS if wins == cases else HELPS_IN_PART if wins else DOES_NOT_HELP


def percent(share: float) -> str:
    """For sentences: three digits at the most, 4.1 %."""
    return f"{100 * share:.3g} %"


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def layers_in_words(layers: list[int]) -> str:
    """Numbers of layers, those that follow each other as a range: 0-2, 10, 11."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("layer " if len(layers) == 1 else "layers ") + ", ".join(parts)
