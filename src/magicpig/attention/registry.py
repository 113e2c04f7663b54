"""Methods by name, and by spec: a name and parameters in one word, like quest:16:4%.

The built-in ones come in by the same door as anybody's: an entry point in the group
"magicpig.methods", or `register`.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points

from magicpig.attention.base import Method
from magicpig.attention.cpu_dense import CpuDense
from magicpig.attention.full import Full
from magicpig.attention.h2o import H2O
from magicpig.attention.kv_stream import KvStream
from magicpig.attention.loki import Loki
from magicpig.attention.lsh import Lsh
from magicpig.attention.oracle import Oracle
from magicpig.attention.quest import Quest
from magicpig.attention.scan import Scan
from magicpig.attention.streaming import Streaming
from magicpig.attention.topk import TopK

ENTRY_POINTS = "magicpig.methods"

_methods: dict[str, type[Method]] = {}


def register(method: type[Method]) -> type[Method]:
    """Makes a method known by its name. A name can be taken once."""
    taken = _methods.setdefault(method.name, method)
    if taken is not method:
        raise ValueError(f"the method name {method.name!r} is {taken.__qualname__}'s already")
    return method


for _method in (Full, Lsh, Scan, TopK, Oracle, Quest, H2O, Loki, Streaming, CpuDense, KvStream):
    register(_method)


@cache
def _load_entry_points() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        register(entry.load())


def methods() -> dict[str, type[Method]]:
    """All methods there are, by name."""
    _load_entry_points()
    return dict(_methods)


def parse(spec: str) -> Method:
    """The method of a spec: name[:parameter]..., parameters in order or as field=value."""
    name, *words = spec.strip().split(":")
    kind = _methods.get(name) or methods().get(name)
    if kind is None:
        raise ValueError(f"method must be one of {', '.join(methods())}, not {name!r}")
    names = [field.name for field in fields(kind)]
    takes = ", ".join(names) or "no parameters"
    given: dict[str, object] = {}
    for i, word in enumerate(words):
        key, equals, text = word.rpartition("=")
        if equals and key not in names:
            raise ValueError(f"{spec!r}: there is no parameter {key!r}; {name} takes {takes}")
        if not equals:
            if i >= len(names):
                raise ValueError(f"{spec!r} has too many parameters; {name} takes {takes}")
            if list(given) != names[:i]:
                raise ValueError(f"{spec!r}: {word!r} comes after a named parameter: name it too")
            key = names[i]
        if key in given:
            raise ValueError(f"{spec!r} gives {key} twice")
        given[key] = _value(spec, text)
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"method {spec!r}: {error}") from error


def _value(spec: str, text: str) -> int | float:
    try:
        if text.endswith("%"):
            return float(text[:-1]) / 100
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"method {spec!r}: {text!r} is not a number; write it like 16, 0.02 or 2%"
        ) from None
