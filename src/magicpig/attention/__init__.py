"""Attention in parts: how partial results come together."""

from magicpig.attention.merge import merge

__all__ = ["merge"]
