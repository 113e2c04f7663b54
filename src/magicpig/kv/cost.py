"""Cost: what attention over the far context took, by one definition for all methods."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class Cost:
    """Sums over decode steps, layers and query heads; windows do not count.

    steps: decode steps.
    rows: far tokens whose key and value entered the output.
    tokens: far tokens there were, evicted ones included.
    row_bytes: read of those keys and values: once for a KV head where all query heads of its group
        read all of them, else once for each query head. lsh reads a norm of 4 bytes with each.
    search_bytes: read to find out which rows to read: keys, their codes or projections, bounds of
        pages, hash buckets; not what all tokens share, such as directions to project on.
    search_ops: multiply-adds to the same end.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    row_bytes: int = 0
    search_bytes: int = 0
    search_ops: int = 0

    @property
    def share_read(self) -> float:
        """Of the far rows, those that were read; 1 where there were none."""
        return self.rows / self.tokens if self.tokens else 1.0

    def __add__(self, other: Cost) -> Cost:
        """Of both together, where they are layers of the same steps."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Cost(**{**sums, "steps": max(self.steps, other.steps)})

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
