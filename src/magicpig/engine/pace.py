"""Pace: whether a batch goes through the model faster whole or in two halves."""

from __future__ import annotations

from statistics import median

STEPS = 5  # that are compared; the first of them does not count
AGAIN = 256  # steps, after which the other way is tried again
SHARE = 0.5  # of the CPU in whole steps, above which halves are worth a try


class Pace:
    """Of batches of one kind, which are run whole at first.

    Halves read the model's weights twice, and hide the CPU's time behind the GPU's or the other way
    round. Where the CPU has much of a step they are tried, and the faster way is kept until the
    other is tried again.

    halved: how the next step is to be run.
    """

    def __init__(self) -> None:
        self.halved = False
        self._before: float | None = None  # seconds of the other way, while this one is tried
        self._since = AGAIN  # steps since the last try
        self._seconds: list[float] = []
        self._shares: list[float | None] = []

    def took(self, seconds: float, cpu_share: float | None) -> None:
        """What a step took that was run so. cpu_share: None where the CPU had no attention."""
        self._since += 1
        self._seconds.append(seconds)
        self._shares.append(cpu_share)
        if len(self._seconds) < STEPS:
            return
        middle = median(self._seconds[1:])
        if self._before is not None:
            if middle > self._before:
                self.halved = not self.halved
            self._before, self._since = None, 0
        elif self._since >= AGAIN and (self.halved or self._has_much_to_do()):
            self._before, self.halved = middle, not self.halved
        self._seconds, self._shares = [], []

    def _has_much_to_do(self) -> bool:
        shares = [share for share in self._shares[1:] if share is not None]
        return not shares or median(shares) > SHARE
