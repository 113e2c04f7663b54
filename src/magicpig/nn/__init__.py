"""Layers of a language model on the native core, or fused on a GPU: inference only."""

from magicpig.nn.embedding import PackedEmbedding
from magicpig.nn.joint import Joint
from magicpig.nn.linear import PackedLinear
from magicpig.nn.mlp import FusedMLP, GatedMLP
from magicpig.nn.norm import RMSNorm
from magicpig.nn.swap import pack

__all__ = ["FusedMLP", "GatedMLP", "Joint", "PackedEmbedding", "PackedLinear", "RMSNorm", "pack"]
