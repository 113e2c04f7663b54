"""Numbers in sentences."""

from __future__ import annotations


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
