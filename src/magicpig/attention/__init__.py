"""Attention: methods over the far context, and how partial results come together."""

from magicpig.attention.merge import merge

__all__ = ["merge"]
