"""Models: the built-in ones, fetched once into a cache folder, and loading any model."""

from magicpig.models.catalog import BUILTIN, Builtin, ModelError
from magicpig.models.loader import LoadedModel, load
from magicpig.models.store import cache_folder, pull

__all__ = ["BUILTIN", "Builtin", "LoadedModel", "ModelError", "cache_folder", "load", "pull"]
