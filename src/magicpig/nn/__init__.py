"""Layers of a language model on the native core: bfloat16, CPU, inference only."""

from magicpig.nn.embedding import PackedEmbedding
from magicpig.nn.linear import PackedLinear
from magicpig.nn.mlp import GatedMLP
from magicpig.nn.norm import RMSNorm
from magicpig.nn.swap import pack

__all__ = ["GatedMLP", "PackedEmbedding", "PackedLinear", "RMSNorm", "pack"]
