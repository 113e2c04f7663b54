"""What benchmarks are given, checked before anything is measured: types for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from magicpig.attention.plan import make_plan
from magicpig.engine.memory import parse_bytes
from magicpig.files import check_file
from magicpig.planning.geometry import config_of


def argument(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """For argparse, which tells a ValueError's text to nobody."""

    def converted(text: str) -> Any:
        try:
            return convert(text)
        except (ValueError, OSError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted


def of_a_model(text: str) -> argparse.ArgumentParser:
    """For a script of which the text tells: with a model's geometry and a device."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model, device = argument(a_model), argument(a_device)
    parser.add_argument("--model", type=model, default="llama-3.1-8b", help="its geometry")
    parser.add_argument("--device", type=device, default="cuda", help="cuda or cpu")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"must be a whole number from 1, not {text!r}")
    return int(text)


def some_seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1e6:
        raise ValueError(f"must be a number of seconds from 0, not {text!r}")
    return number


def a_device(text: str) -> str:
    """cpu, or cuda where there is one."""
    if text not in ("cpu", "cuda"):
        raise ValueError(f"must be cpu or cuda, not {text!r}")
    if text == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU here: --device cpu does without")
    return text


def a_method(text: str) -> str:
    make_plan(text, 1, dense_layers=())
    return text


def a_model(text: str) -> str:
    config_of(text)
    return text


def new_file(text: str) -> Path:
    """Where results can be written."""
    check_file(Path(text), "results")
    return Path(text)


def a_budget(text: str) -> str:
    if text != "none":
        parse_bytes("a budget", text)
    return text
