"""Random far contexts and how close an answer has to be."""

from dataclasses import dataclass

import torch
from torch import Tensor

import magicpig
from magicpig import LayerKV, LSHConfig, reference


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
