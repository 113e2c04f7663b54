"""Configuration: frozen dataclasses that check themselves.

A bad value or an unknown field is a ``ValueError`` that names the field and the value.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

if TYPE_CHECKING:
    from typing_extensions import Self


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raises unless `value` is an int (not a bool) from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an int, not {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, not {value}")


def check_fraction(name: str, value: object) -> None:
    """Raises unless `value` is a number from 1e-9 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number like 0.01, not {value!r}")
    if not 1e-9 <= value <= 1:
        raise ValueError(f"{name} must be above 0 (1e-9 or more) and at most 1, not {value}")


class UnsupportedModel(ValueError):
    """A model that would get wrong results: what it does that cannot be followed."""


class Strict:
    """A configuration that refuses unknown fields with a message that lists the known ones."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __new__(cls, *_: object, **given: object) -> Self:
        known = [field.name for field in fields(cls)]  # without class variables
        for name in given.keys() - set(known):
            raise ValueError(
                f"unknown {cls.__name__} field {name}={given[name]!r}; known: {', '.join(known)}"
            )
        return super().__new__(cls)


@dataclass(frozen=True)
class WindowConfig(Strict):
    """Which tokens of a sequence are attended to exactly, apart from the far context.

    sinks: the first tokens of the sequence, for good.
    local: the newest tokens, at least this many.
    block: tokens that leave for the far context together, once as many have gathered behind the
        local ones. The window holds at most sinks + local + 2 * block tokens.
    """

    sinks: int = 16
    local: int = 64
    block: int = 256

    def __post_init__(self) -> None:
        check_int("sinks", self.sinks, 0, 65536)
        check_int("local", self.local, 1, 65536)
        check_int("block", self.block, 1, 65536)

    @classmethod
    def given(cls, window: WindowConfig | None) -> WindowConfig:
        """As callers give it; None: the default one."""
        if window is not None and not isinstance(window, cls):
            raise TypeError(f"window must be a WindowConfig or None, not {window!r}")
        return window or cls()


@dataclass(frozen=True)
class LSHConfig(Strict):
    """How keys are hashed and which of them a query draws (docs/parameters.md has the trade-offs).

    bits_per_table: sign bits that name a bucket of a table (K in the paper), 1 to 16.
    num_tables: hash tables (L in the paper), 1 to 4096.
    min_collisions: a key is drawn when it shares the query's bucket in this many tables or more.
    seed: of the random projection; equal configurations hash alike everywhere.
    exact_below: segments with fewer tokens are read whole instead of being indexed. None:
        2**bits_per_table, below which a table would have more buckets than keys.
    """

    bits_per_table: int = 10
    num_tables: int = 150
    min_collisions: int = 2
    seed: int = 0
    exact_below: int | None = None

    def __post_init__(self) -> None:
        check_int("bits_per_table", self.bits_per_table, 1, 16)
        check_int("num_tables", self.num_tables, 1, 4096)
        check_int("min_collisions", self.min_collisions, 1, 255)
        if self.min_collisions > self.num_tables:
            raise ValueError(
                f"min_collisions must be at most num_tables ({self.num_tables}), "
                f"not {self.min_collisions}"
            )
        check_int("seed", self.seed, 0, 2**32 - 1)
        if self.exact_below is not None:
            check_int("exact_below", self.exact_below, 0, 2**31 - 1)

    @property
    def shortest_indexed(self) -> int:
        """Tokens from which a segment is indexed."""
        return 2**self.bits_per_table if self.exact_below is None else self.exact_below


@dataclass(frozen=True)
class ScanConfig(Strict):
    """How keys are coded and how many of them a query draws (docs/parameters.md).

    bits_per_dim: of a key's code, 1, 2 or 4: more bits, better proposals, a larger index.
    budget: share of the far keys that a query head reads, about; the most, with a target_error.
    min_rows: rows that it reads at least, on average, where there are as many.
    target_error: of the attention output, relative to its norm, mean over heads: each head reads as
        many rows as its codes say that this takes. None: the whole budget.
    seed: of the rotation and of the draws; equal configurations draw alike everywhere.
    exact_below: segments with fewer tokens are read whole instead of being indexed.
    """

    bits_per_dim: int = 2
    budget: float = 0.01
    min_rows: int = 64
    seed: int = 0
    exact_below: int = 128
    target_error: float | None = None

    def __post_init__(self) -> None:
        if type(self.bits_per_dim) is not int or self.bits_per_dim not in (1, 2, 4):
            raise ValueError(f"bits_per_dim must be 1, 2 or 4, not {self.bits_per_dim!r}")
        check_fraction("budget", self.budget)
        if self.target_error is not None:
            check_fraction("target_error", self.target_error)
        check_int("min_rows", self.min_rows, 0, 2**31 - 1)
        check_int("seed", self.seed, 0, 2**32 - 1)
        check_int("exact_below", self.exact_below, 0, 2**31 - 1)

    @property
    def shortest_indexed(self) -> int:
        """Tokens from which a segment is indexed."""
        return self.exact_below


IndexConfig = LSHConfig | ScanConfig


def draws_on_gpus(index: IndexConfig | None) -> TypeGuard[ScanConfig]:
    """Whether an index is one of codes by which a GPU can draw, given Triton.

    Rows for a target of the error are the CPU's to draw: it predicts errors.
    """
    return isinstance(index, ScanConfig) and index.target_error is None
