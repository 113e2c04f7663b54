"""Calling transformers without its noise, and importing it without the garbage collector's."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@contextmanager
def without_collections() -> Iterator[None]:
    """No garbage collections inside.

    Importing torch and transformers makes a million objects that stay: collections on the way
    find nothing and take a fifth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = True) -> list[int]:
    """Of a text of any length: whether a model's context holds it is for the caller to say.

    special: whether to add what the tokenizer adds to a text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:  # which tokenizers do not tell of
        raise ValueError(
            f"the text cannot be UTF-8: character {error.start} is {text[error.start]!a}"
        ) from None
    encoded = tokenizer(text, add_special_tokens=special, verbose=False)
    return list(encoded["input_ids"])


@contextmanager
def quietly() -> Iterator[None]:
    """No progress bars of transformers inside, and only its errors; afterwards all is as before.

    Like the settings themselves this is process-wide: other threads are quiet meanwhile, too.
    """
    from transformers.utils import logging as transformers_logging

    def without_bar(bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return bar(*args, **{**options, "disable": True})

    verbosity = transformers_logging.get_verbosity()
    hook = transformers_logging.set_tqdm_hook(without_bar)
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.set_tqdm_hook(hook)
