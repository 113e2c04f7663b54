"""Native core of magicpig. Use it through the magicpig package."""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray
import torch


class Lsh:
    def __init__(self, bits_per_table: int, num_tables: int, min_collisions: int, projection: Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu', writable=False)]) -> None: ...

    def codes(self, x: Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu', writable=False)]) -> Annotated[torch.Tensor, dict(dtype='int32', shape=(None, None))]:
        """Buckets [n, num_tables] of vectors x [n, head_dim]."""

class Scan:
    def __init__(self, bits_per_dim: int, budget: float, min_rows: int, target_error: float, seed: int, head_dim: int, signs: Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu', writable=False)]) -> None: ...

class LayerKV:
    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str, lsh: Lsh | None, scan: Scan | None, exact_below: int) -> None: ...

    def append(self, keys: Annotated[torch.Tensor, dict(device='cpu', writable=False)], values: Annotated[torch.Tensor, dict(device='cpu', writable=False)]) -> None: ...

    def fork(self) -> LayerKV: ...

    def append_hashed(self, keys: Annotated[torch.Tensor, dict(device='cpu', writable=False)], values: Annotated[torch.Tensor, dict(device='cpu', writable=False)], found: tuple[Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu', writable=False)], Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu', writable=False)], Annotated[torch.Tensor, dict(dtype='uint16', shape=(None, None, None), order='C', device='cpu', writable=False)]] | tuple[Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu', writable=False)], Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu', writable=False)], Annotated[torch.Tensor, dict(dtype='uint32', shape=(None, None, None), order='C', device='cpu', writable=False)], Annotated[torch.Tensor, dict(dtype='uint16', shape=(None, None, None), order='C', device='cpu', writable=False)]]) -> None:
        """
        Adds a segment whose keys were hashed elsewhere. found: means of the keys [num_kv_heads, head_dim]; of keys less those, one over their norms, or 0, [num_kv_heads, tokens]; and either signs of their projections [num_kv_heads, projections / 16, tokens], sixteen to a number, or the tables that they are sorted into: where buckets begin [num_kv_heads, num_tables, buckets + 1], and rows [num_kv_heads, num_tables, tokens].
        """

    def read(self, first: int, keys: Annotated[torch.Tensor, dict(shape=(None, None, None), order='C', device='cpu')], values: Annotated[torch.Tensor, dict(shape=(None, None, None), order='C', device='cpu')]) -> None:
        """
        Copies tokens from `first` on to keys and values [num_kv_heads, tokens, head_dim].
        """

    def adopt(self, num_tokens: int, rows: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], tables: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        Adds a segment from memory that segment_memory gave, or a copy of it; the arrays are held, not copied.
        """

    def segment_memory(self, segment: int) -> tuple[Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)], Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)]]:
        """
        Views of a segment's rows and tables; the tables are empty where there is no index.
        """

    @property
    def num_tokens(self) -> int: ...

    @property
    def segment_sizes(self) -> list[int]: ...

    @property
    def build_seconds(self) -> tuple[float, float, float]:
        """
        Seconds it took to copy the rows, code the keys and sort the codes, over the segments there are.
        """

    def segment_codes(self, segment: int, kv_head: int) -> Annotated[torch.Tensor, dict(dtype='int32', shape=(None, None))]:
        """
        Buckets [tokens, num_tables] of a segment's keys, read back from its tables; for tests.
        """

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of rows and of the index."""

class GrowingSegment:
    """Of a sequence, for tokens that come in parts."""

    def __init__(self, kv: LayerKV, num_tokens: int) -> None: ...

    def add(self, keys: Annotated[torch.Tensor, dict(device='cpu', writable=False)], values: Annotated[torch.Tensor, dict(device='cpu', writable=False)]) -> None:
        """The next tokens."""

    def finish(self, found: tuple[Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu', writable=False)], Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu', writable=False)], Annotated[torch.Tensor, dict(dtype='uint16', shape=(None, None, None), order='C', device='cpu', writable=False)]] | tuple[Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu', writable=False)], Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu', writable=False)], Annotated[torch.Tensor, dict(dtype='uint32', shape=(None, None, None), order='C', device='cpu', writable=False)], Annotated[torch.Tensor, dict(dtype='uint16', shape=(None, None, None), order='C', device='cpu', writable=False)]] | None = None) -> None:
        """
        Adds the segment to kv, when all tokens are there. found: as in LayerKV.append_hashed; None: found here, where it is needed.
        """

def empty_bytes(bytes: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
    """Memory for a segment that is made elsewhere; contents undefined."""

def available_memory() -> int:
    """Bytes that can still be had."""

def isa() -> str: ...

def supported_isas() -> list[str]: ...

def set_isa(name: str) -> None: ...

def num_threads() -> int: ...

def set_num_threads(count: int) -> None: ...

def rest_threads(count: int) -> None:
    """
    So many of the pool's threads leave their cores to others, until it is called again.
    """

def exp(x: Annotated[torch.Tensor, dict(dtype='float32', shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[torch.Tensor, dict(dtype='float32', shape=(None,), order='C', device='cpu')]) -> None:
    """The kernels' exponential, for tests."""

def log_inclusion_probability(angle_over_pi: float, bits_per_table: int, num_tables: int, min_collisions: int) -> float: ...

def stream_read_roof(bytes: int, repeats: int) -> float: ...

def gather_read_roof(bytes: int, row_bytes: int, repeats: int) -> float: ...

def attend(kvs: Sequence[LayerKV], queries: Annotated[torch.Tensor, dict(device='cpu', writable=False)], scale: float, softcap: float, exact: bool, out: Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None, None), order='C', device='cpu')], lse: Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu')], rows_read: Annotated[torch.Tensor, dict(dtype='int64', shape=(None, None), order='C', device='cpu')], visited: Annotated[torch.Tensor, dict(dtype='int64', shape=(None, None), order='C', device='cpu')], predicted: Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu')], signs: Annotated[torch.Tensor, dict(dtype='uint16', shape=(None, None), order='C', device='cpu', writable=False)] | None = None, drawn: tuple[Annotated[torch.Tensor, dict(dtype='uint16', shape=(None, None, None), order='C', device='cpu', writable=False)], Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None, None), order='C', device='cpu', writable=False)], Annotated[torch.Tensor, dict(dtype='int32', shape=(None, None, None), order='C', device='cpu', writable=False)], Annotated[torch.Tensor, dict(dtype='int32', shape=(None, None, None), order='C', device='cpu', writable=False)]] | None = None) -> tuple[float, float, float, list[int]]:
    """
    signs: of the queries' projections, where they are known already, sixteen to a number. drawn: ids in their segments and log probabilities of rows that were drawn elsewhere, and where each piece of 1,024 tokens has its own. Fills out, lse, rows_read, visited (entries of hash buckets) and, where there is a target error, predicted; returns the thread-seconds of drawing, of attention over drawn rows and over rows read whole, and the tokens of each kv.
    """

def serve(arrived: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)], ticket: int, patience: float, answered: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu')], kvs: Sequence[LayerKV], queries: Annotated[torch.Tensor, dict(device='cpu', writable=False)], scale: float, softcap: float, out: Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None, None), order='C', device='cpu')], lse: Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu')], rows_read: Annotated[torch.Tensor, dict(dtype='int64', shape=(None, None), order='C', device='cpu')], visited: Annotated[torch.Tensor, dict(dtype='int64', shape=(None, None), order='C', device='cpu')], predicted: Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu')], signs: Annotated[torch.Tensor, dict(dtype='uint16', shape=(None, None), order='C', device='cpu', writable=False)] | None = None, drawn: tuple[Annotated[torch.Tensor, dict(dtype='uint16', shape=(None, None, None), order='C', device='cpu', writable=False)], Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None, None), order='C', device='cpu', writable=False)], Annotated[torch.Tensor, dict(dtype='int32', shape=(None, None, None), order='C', device='cpu', writable=False)], Annotated[torch.Tensor, dict(dtype='int32', shape=(None, None, None), order='C', device='cpu', writable=False)]] | None = None, totals: Annotated[torch.Tensor, dict(dtype='int32', shape=(None, None), order='C', device='cpu', writable=False)] | None = None) -> tuple[float, tuple[float, float, float, list[int]]] | None:
    """
    attend, of what another device asks: begins when arrived[0] is the ticket, and writes the ticket to answered[0] at the end. totals: rows that were drawn for each head; where one has more than there is room for, they are drawn here instead. Returns the seconds since then and what attend returns, or None where the ticket did not come within `patience` seconds.
    """

def attend_rows(kvs: Sequence[LayerKV], queries: Annotated[torch.Tensor, dict(device='cpu', writable=False)], scale: float, softcap: float, rows: Annotated[torch.Tensor, dict(dtype='int32', shape=(None, None, None), order='C', device='cpu', writable=False)], log_probability: Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None, None), order='C', device='cpu', writable=False)], counts: Annotated[torch.Tensor, dict(dtype='int32', shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None, None), order='C', device='cpu')], lse: Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu')]) -> None:
    """
    Fills out and lse: attention over counts[i, h] rows [batch, num_heads, room], each weighted by one over its probability.
    """

def sample(kv: LayerKV, queries: Annotated[torch.Tensor, dict(device='cpu', writable=False)], scale: float) -> list[tuple[Annotated[torch.Tensor, dict(dtype='int32', shape=(None,))], Annotated[torch.Tensor, dict(dtype='float32', shape=(None,))]]]:
    """Per head: row ids and log inclusion probabilities."""

def tell(number: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu')], value: int) -> None:
    """
    Writes the value to number[0], behind all that was written before, for another device.
    """

class Window:
    def __init__(self, like: LayerKV) -> None:
        """A window for the heads, head_dim, dtype and index of a LayerKV."""

    def append(self, keys: Annotated[torch.Tensor, dict(device='cpu', writable=False)], values: Annotated[torch.Tensor, dict(device='cpu', writable=False)]) -> bool:
        """
        Adds tokens [num_kv_heads, tokens, head_dim]; says whether all are finite and in range.
        """

    def drop(self, first: int, count: int) -> None: ...

    def read(self, first: int, keys: Annotated[torch.Tensor, dict(shape=(None, None, None), order='C', device='cpu')], values: Annotated[torch.Tensor, dict(shape=(None, None, None), order='C', device='cpu')]) -> None:
        """
        Copies tokens from `first` on to keys and values [num_kv_heads, tokens, head_dim].
        """

    def fork(self) -> Window: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def spoiled(self) -> bool:
        """Whether it has held numbers that are not finite or out of range."""

    @property
    def reads(self) -> tuple[int, int]:
        """
        Rows that steps read, over all query heads, and the tokens there were to read.
        """

    @property
    def far_reads(self) -> tuple[int, int, int, int]:
        """
        Steps, rows of the far context that they read over all query heads, those there were, and entries of hash buckets that were walked through.
        """

    @property
    def seconds(self) -> tuple[float, float, float]:
        """
        Thread-seconds of steps in which this window was the first: drawing rows, attention over drawn rows, and over rows read whole.
        """

def step(windows: Sequence[Window], fars: Sequence[LayerKV], queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, softcap: float, span: int, out: torch.Tensor) -> None:
    """Appends a token to each window and attends to it all."""

def attend_prompt(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, softcap: float, span: int, out: torch.Tensor) -> None:
    """
    Exact attention of queries [num_heads, num_queries, head_dim], the last of the tokens of keys and values
    [num_kv_heads, num_tokens, head_dim], into out [num_queries, num_heads, head_dim]; all bfloat16. softcap: 0
    for none. span: how many tokens a query sees, itself the last; 0: all.
    """

class PackedLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None: ...

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out [..., out_features] of x [..., in_features], both bfloat16."""

    def lookup(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Rows of the weight, out [..., in_features], for ids (int64)."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

class GatedMLP:
    def __init__(self, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor, activation: str, gate_bias: torch.Tensor | None = None, up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None) -> None: ...

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out [..., out_features] of x [..., in_features], both bfloat16."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, one_plus_weight: bool, out: torch.Tensor) -> None:
    """
    out = x [..., dim] / sqrt(mean of squares + eps), times the weight or one plus the weight; all bfloat16.
    """
