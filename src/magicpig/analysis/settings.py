"""What is studied: how much text, which methods at which budgets."""

from __future__ import annotations

from dataclasses import dataclass

from magicpig.config import LSHConfig, ScanConfig, Strict, check_fraction, check_int

MAX_TOKENS = 65536  # one segment of an index
MIN_FAR = 64  # far keys, below which shares of them mean little


@dataclass(frozen=True)
class Settings(Strict):
    """tokens: of each input. inputs: excerpts that are read, two at least.
    positions: last tokens of an input whose queries are studied; few_positions: of them where
        every key is looked at one by one.
    sinks, local: first and last tokens that every method attends to exactly.
    budgets: shares of the far keys. tables: (bits_per_table, num_tables) of the hash tables.
    code_bits: bits per dimension of the codes that `scan` draws by. targets: errors that it is
        asked for, instead of a budget.
    page: keys of a page of Quest. starts: short inputs for the first token's state.
    """

    tokens: int = 6000
    inputs: int = 4
    positions: int = 16
    few_positions: int = 2
    sinks: int = 16
    local: int = 64
    budgets: tuple[float, ...] = (0.005, 0.01, 0.02, 0.04, 0.08, 0.2)
    tables: tuple[tuple[int, int], ...] = ((10, 150), (9, 120), (8, 75), (10, 300))
    code_bits: tuple[int, ...] = (1, 2, 4)
    targets: tuple[float, ...] = (0.05, 0.1)
    page: int = 16
    starts: int = 32

    def __post_init__(self) -> None:
        check_int("positions", self.positions, 1, 4096)
        check_int("few_positions", self.few_positions, 1, self.positions)
        check_int("sinks", self.sinks, 0, 4096)
        check_int("local", self.local, 1, 4096)
        shortest = self.sinks + self.local + self.positions + MIN_FAR
        check_int("tokens", self.tokens, shortest, MAX_TOKENS)
        check_int("inputs", self.inputs, 2, 64)
        check_int("page", self.page, 1, 4096)
        check_int("starts", self.starts, 2, 1024)
        for budget in self.budgets:
            if not 0 < budget <= 1:
                raise ValueError(f"budgets must be shares above 0 and at most 1, not {budget}")
        for bits_per_table, num_tables in self.tables:
            LSHConfig(bits_per_table, num_tables)
        for bits_per_dim in self.code_bits:
            ScanConfig(bits_per_dim)
        for error in self.targets:
            check_fraction("targets", error)

    def lsh(self, bits_per_table: int, num_tables: int, seed: int) -> LSHConfig:
        return LSHConfig(bits_per_table, num_tables, seed=seed, exact_below=0)

    def scan(self, bits_per_dim: int, budget: float, seed: int) -> ScanConfig:
        return ScanConfig(bits_per_dim, budget, min_rows=1, seed=seed, exact_below=0)

    def scan_to(self, bits_per_dim: int, error: float, seed: int) -> ScanConfig:
        """With a target; it indexes the far context, and not the window behind it."""
        window = self.sinks + self.local + self.positions
        return ScanConfig(bits_per_dim, 1.0, 1, seed, window + 1, error)


def percent(share: float) -> str:
    """As in the names of methods: 0.02 is 2%."""
    return f"{100 * share:g}%"
