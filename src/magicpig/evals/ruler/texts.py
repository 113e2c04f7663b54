"""The text and the words that ship with the package (their sources: evals/data/README.md)."""

from __future__ import annotations

import lzma
from functools import cache
from importlib.resources import files

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@cache
def sentences() -> tuple[str, ...]:
    """A text of half a million characters, by sentence."""
    return tuple(_unpacked("messages.txt.xz").splitlines())


@cache
def adjectives() -> tuple[str, ...]:
    return tuple(_data("adjectives.txt").decode().split())


@cache
def nouns() -> tuple[str, ...]:
    return tuple(_data("nouns.txt").decode().split())


@cache
def short_words() -> tuple[str, ...]:
    """Adjectives, nouns and verbs of four letters or more: about a thousand."""
    verbs = _data("verbs.txt").decode().split()
    return tuple(sorted(word for word in {*adjectives(), *nouns(), *verbs} if len(word) > 3))


@cache
def more_words() -> tuple[str, ...]:
    """About eleven thousand words that are not among the short ones."""
    return tuple(sorted({*_unpacked("words.txt.xz").split()} - {*short_words()}))


def _unpacked(name: str) -> str:
    return lzma.decompress(_data(name)).decode()


def _data(name: str) -> bytes:
    return (files("magicpig.evals") / "data" / name).read_bytes()
