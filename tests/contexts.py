"""Random far contexts and how close an answer has to be."""

from dataclasses import dataclass

import torch
from torch import Tensor

import magicpig
from magicpig import LayerKV, LSHConfig, ScanConfig, reference

SCAN = ScanConfig(budget=0.1, min_rows=8, exact_below=0)


@dataclass
class Context:
    kv: LayerKV
    queries: Tensor  # [num_heads, head_dim]
    keys: Tensor  # [num_kv_heads, tokens, head_dim], as stored, in float32
    values: Tensor

    @property
    def scale(self) -> float:
        return self.kv.head_dim**-0.5

    def kv_head(self, head: int) -> int:
        return head // (self.kv.num_heads // self.kv.num_kv_heads)

    def exact(self, head: int) -> tuple[Tensor, Tensor]:
        g = self.kv_head(head)
        return reference.exact_attention(
            self.queries[head], self.keys[g], self.values[g], self.scale
        )


def assert_weighted_softmax(context: Context, dtype: torch.dtype) -> None:
    """Attention is the softmax over the rows that were drawn, weighted by one over their chance."""
    out, lse = context.kv.attend(context.queries)
    all_rows, logs = context.kv.sample(context.queries)
    for head, rows in enumerate(all_rows):
        keys, values = (
            x[context.kv_head(head)][rows.long()] for x in (context.keys, context.values)
        )
        logits = keys.double() @ context.queries[head].double() * context.scale - logs[head]
        expected_out, expected_lse = reference.attend(logits, values)
        atol = tolerance(dtype)
        torch.testing.assert_close(out[head].double(), expected_out, rtol=0, atol=atol)
        torch.testing.assert_close(lse[head].double(), expected_lse, rtol=0, atol=atol)
    assert context.kv.last_stats is not None
    assert context.kv.last_stats.rows.tolist() == [len(rows) for rows in all_rows]


def make_context(
    *,
    tokens: int,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    index: LSHConfig | None = None,
    dtype: torch.dtype = torch.float32,
    spread: float = 1.0,
    query_norm: float = 1.0,
    seed: int = 0,
) -> Context:
    """A context of Gaussian keys around a common mean (as real keys have one), appended at once."""
    torch.manual_seed(seed)
    kv = LayerKV(num_heads, num_kv_heads, head_dim, index, dtype)
    mean = torch.randn(num_kv_heads, 1, head_dim)
    keys = (mean + spread * torch.randn(num_kv_heads, tokens, head_dim)).to(dtype)
    values = torch.randn(num_kv_heads, tokens, head_dim).to(dtype)
    queries = query_norm * torch.randn(num_heads, head_dim)
    kv.append(keys, values)
    return Context(kv, queries, keys.float(), values.float())


def tolerance(dtype: torch.dtype) -> float:
    """Absolute error of outputs of order one. AVX512-BF16 rounds softmax weights to bfloat16."""
    return 1e-2 if dtype == torch.bfloat16 and magicpig.isa() == "avx512_bf16" else 3e-5


def kv_of(keys, values=None, scan=SCAN, dtype=torch.float32):
    """One KV head of keys and values [tokens, head_dim]."""
    kv = LayerKV(1, 1, keys.shape[-1], scan, dtype)
    kv.append(keys[None], (torch.randn_like(keys) if values is None else values)[None])
    return kv
