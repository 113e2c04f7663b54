"""What commands are given, checked before anything slow begins."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from magicpig.files import check_file

if TYPE_CHECKING:
    from magicpig.document import Document

STDIN = Path("-")
MOST_TOKENS = 2**30  # of a text, by its length alone


def prompt_of(
    prompt: str | None,
    files: Sequence[Path],
    system: str | None,
    raw: bool,
    context: Path | None = None,
    save_context: Path | None = None,
    trace: Path | None = None,
    truncate_left: bool = False,
) -> tuple[Document, str]:
    """The document and the question. Without files and prompt, stdin is the question."""
    if context and (files or system is not None or raw or save_context or truncate_left):
        raise ValueError(
            "--context comes instead of --file, --system, --raw, --save-context and "
            "--truncate-left: the file holds the text and how it was read"
        )
    if raw and system is not None:
        raise ValueError("--system is a message of the chat template, which --raw leaves out")
    if truncate_left and not files:
        raise ValueError("--truncate-left leaves out the beginning of --file: name one")
    for flag, text in (("--prompt", prompt), ("--system", system)):
        check_text(flag, text or "")
    if save_context and not files:
        raise ValueError("--save-context keeps the text of --file: name one")
    read = {"--context": [context] if context else [], "--file": [f for f in files if f != STDIN]}
    check_outputs(read, {"--save-context": save_context, "--trace": trace})
    if prompt is None and not files:
        if sys.stdin.isatty():
            print("magicpig: reading the prompt; end it with Ctrl-D", file=sys.stderr)
        prompt = decoded("stdin", sys.stdin.buffer.read())
        if not raw:  # a question does not end with the line that it was typed in
            prompt = re.sub(r"\r?\n\Z", "", prompt)
    texts = [
        decoded("stdin", sys.stdin.buffer.read()) if file == STDIN else read_text(file)
        for file in files
    ]
    text, question = "\n\n".join(texts), prompt or ""
    if not text.strip() and not question.strip():
        raise ValueError("the prompt is empty: give --prompt, --file, or text on stdin")
    from magicpig.document import Document

    return Document(text, system, raw), question


def check_outputs(inputs: Mapping[str, Sequence[Path]], outputs: Mapping[str, Path | None]) -> None:
    """Raises unless all can be written, each to a file that no other flag has.

    inputs, outputs: by flag.
    """
    flags = {os.path.realpath(path): flag for flag, paths in inputs.items() for path in paths}
    for flag, path in outputs.items():
        if path is None:
            continue
        check_file(path, flag)
        if (other := flags.setdefault(os.path.realpath(path), flag)) != flag:
            raise ValueError(
                f"{flag} {str(path)!r} would overwrite the file of {other}: name another"
            )


def check_text(flag: str, text: str) -> None:
    """Raises for arguments that were not text: Python keeps a byte that is none as a lone
    surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{flag} is not UTF-8 text: character {error.start} is {text[error.start]!a}; "
            "convert it first, or set the locale to one of UTF-8"
        ) from None


def read_text(file: Path) -> str:
    try:
        return decoded(str(file), file.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {str(file)!r}") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{str(file)!r} is a folder; name a text file") from None


def decoded(name: str, data: bytes) -> str:
    """UTF-8 text; anything else is refused."""
    if (at := data.find(0)) >= 0:
        raise ValueError(f"{name} is not text: byte {at} is zero")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}; "
            "convert it first, for example with iconv"
        ) from None


def layer_list(text: str | None) -> list[int] | None:
    """Numbers from a text like 0,15; an empty text is no layer at all."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(
            f"--dense-layers must be numbers with commas between, like 0,15, not {text!r}"
        ) from None


def length_list(text: str) -> list[int]:
    """Numbers of tokens from a text like 4k,8192,1M; k is 1,024, M as many k."""
    lengths = []
    for word in (part.strip() for part in text.split(",")):
        unit = {"k": 1024, "m": 1024**2}.get(word[-1:].lower(), 1)
        number = word if unit == 1 else word[:-1]
        if not number.isdecimal() or len(number) > 10 or not 0 < int(number) * unit <= MOST_TOKENS:
            raise ValueError(
                f"a length must be a number of tokens, {MOST_TOKENS:,} at most, like 4k or 6000, "
                f"not {word!r}"
            )
        lengths.append(int(number) * unit)
    return lengths


def one_length(flag: str, text: str | None) -> int | None:
    """A number of tokens, or None where there is no text."""
    if text is None:
        return None
    if re.fullmatch(r"\s*\d{1,3}(,\d{3})+\s*", text):  # 98,304
        text = text.replace(",", "")
    lengths = length_list(text)
    if len(lengths) > 1:
        raise ValueError(f"{flag} must be one length, not {text!r}")
    return lengths[0]


def word_list(
    flag: str, text: str, known: Sequence[str], default: Sequence[str] | None = None
) -> list[str]:
    """Names from a text like a,b; `all` is the default ones."""
    if text.strip() == "all":
        return list(known if default is None else default)
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise ValueError(f"{flag} must be all or some of {', '.join(known)}, not {word!r}")
    if not words:
        raise ValueError(f"{flag} is empty: name some of {', '.join(known)}, or all")
    return words


def check_folder(folder: Path) -> None:
    """Raises unless results can be put there: before the work, not after it."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"--out {str(folder)!r} is a file; name a folder")
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not os.access(there, os.W_OK):
        raise PermissionError(f"--out {str(folder)!r} cannot be written; name another folder")
