"""Parts of pages that scripts write, between marks; the words around them are written by hand.

<!-- NAME ARGUMENT -->
what is replaced
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from magicpig.files import write_whole

MARK = r"<!-- (?P<name>{names}) (?P<argument>[\w-]+) -->\n.*?<!-- end -->"


def rewrite(page: Path, parts: Mapping[str, Callable[[str], str | None]]) -> None:
    """Replaces the parts of these names; a part for which there is None stays as it is."""

    def replaced(match: re.Match[str]) -> str:
        text = parts[match["name"]](match["argument"])
        opening = match[0].splitlines()[0]
        return match[0] if text is None else f"{opening}\n{text.rstrip()}\n<!-- end -->"

    mark = MARK.format(names="|".join(map(re.escape, parts)))
    write_whole(page, re.sub(mark, replaced, page.read_text(), flags=re.S).encode())
