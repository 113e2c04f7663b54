"""Running one prompt for people to watch: a bar while it is read, then its text as it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from magicpig.attention.base import Method
from magicpig.attention.lsh import Lsh
from magicpig.attention.plan import DEFAULT_METHOD
from magicpig.attention.registry import parse
from magicpig.cli.report import print_json
from magicpig.config import check_int
from magicpig.context import Context
from magicpig.document import Document
from magicpig.engine.params import SamplingParams
from magicpig.engine.sequence import Event
from magicpig.kv import store
from magicpig.kv.sequence import SequenceKV
from magicpig.llm import LLM, Generation
from magicpig.native import set_num_threads

BAR_FROM_TOKENS = 512  # shorter prompts are read before a bar would be seen

console = Console(stderr=True, highlight=False)


def use_threads(count: int | None) -> None:
    """For the native core and for torch; None: all there are."""
    if count is not None:
        check_int("--threads", count, 1, 1024)
        set_num_threads(count)
        torch.set_num_threads(count)


def load_llm(
    context: Path | None, options: dict[str, Any], device: str, memory: dict[str, str | None]
) -> LLM:
    """The model, as options say; where they say nothing (None), as the saved context was made.

    memory: limits, as LLM takes them.
    """
    known = store.load_about(context)["settings"] if context else {}
    chosen = {**known, **{name: value for name, value in options.items() if value is not None}}
    return LLM(
        chosen.get("model", "smollm2"),
        method=_method(known, options),
        dense_layers=chosen.get("dense_layers"),
        device=device,
        dtype=chosen.get("dtype", "auto"),
        **memory,  # type: ignore[arg-type]
    )


def _method(known: dict[str, Any], options: dict[str, Any]) -> Method:
    """As options say, and where they leave parameters open, as a saved context was made."""
    tables = any(options[name] is not None for name in ("bits_per_table", "num_tables"))
    spec = options["method"]
    if tables and spec and ":" in spec and isinstance(parse(spec), Lsh):
        raise ValueError(
            f"--method {spec} says which hash tables, and --bits-per-table or --num-tables does: "
            "leave one out"
        )
    saved = known.get("method", "lsh" if tables else DEFAULT_METHOD)
    method = parse(saved if spec in (None, saved.partition(":")[0]) else spec)
    for name in ("bits_per_table", "num_tables"):
        if isinstance(method, Lsh):
            value = options[name] if options[name] is not None else known.get(name)
            method = method if value is None else replace(method, **{name: value})
        elif options[name] is not None:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is a parameter of lsh, the method is {method.spec}")
    return method


def known_context(
    llm: LLM, document: Document, context: Path | None, save_context: Path | None, shown: Shown
) -> Context | None:
    """The saved context; or the document, read now and saved; or nothing."""
    if context:
        return Context.load(llm, context)
    if not save_context:
        return None
    method = llm.engine.runner.plan.method
    if not method.keeps_all:
        raise ValueError(
            f"{method.spec} drops tokens of a text, which can then not be kept for later: "
            "take another --method, or leave --save-context out"
        )
    token_ids, _ = document.parts(llm.tokenizer, "")
    try:
        with reading_bar(len(token_ids)) as read:
            known = Context.read(llm, document, lambda event: read(event.prefilled))
        known.save(llm, save_context)
    except KeyboardInterrupt:
        if shown is Shown.AS_JSON:
            print_interrupted([])
        raise
    kept = f"{len(token_ids):,} tokens kept in {save_context}"
    console.print(kept, style="dim", markup=False, soft_wrap=True)
    return known


class Shown(Enum):
    """What is printed of completions while they come, and when they are interrupted."""

    AS_TEXT = 1  # one alone as it comes, several when they are done
    AS_JSON = 2  # nothing; an object, if they are interrupted


def answer(
    llm: LLM, prompt_ids: list[int], params: SamplingParams, known: SequenceKV | None = None
) -> Generation:
    """Prints the completions; one alone is streamed."""
    generation = generated(llm, prompt_ids, params, known, Shown.AS_TEXT)
    if params.n > 1:
        print_numbered([completion.text for completion in generation.completions])
    console.print(summary(generation), style="dim", soft_wrap=True)
    return generation


def print_interrupted(texts: list[str]) -> None:
    """For --json."""
    parts = [{"text": text, "finish": "abort"} for text in texts]
    print_json({"interrupted": True, "completions": parts})


def print_numbered(texts: list[str]) -> None:
    for i, text in enumerate(texts):
        print(f"[{i + 1}/{len(texts)}]\n{text.strip()}\n")


def generated(
    llm: LLM,
    prompt_ids: list[int],
    params: SamplingParams,
    known: SequenceKV | None,
    shown: Shown,
) -> Generation:
    """The completions of a prompt, with a bar on a terminal. An interrupt shows what there is."""
    texts = [""] * params.n
    streamed = shown is Shown.AS_TEXT and params.n == 1
    before = known.num_tokens if known else 0

    def on_event(event: Event) -> None:
        read(event.prefilled - before)
        text = event.text if texts[event.index] else event.text.lstrip()
        texts[event.index] += text
        if streamed and text:
            sys.stdout.write(text)
            sys.stdout.flush()

    try:
        with reading_bar(len(prompt_ids) - before) as read:
            generation = llm.generate_from(prompt_ids, params, known, on_event)
    except KeyboardInterrupt:
        if shown is Shown.AS_JSON:
            print_interrupted(texts)
        elif not streamed and any(texts):
            print_numbered(texts)
        raise
    if streamed and not texts[0].endswith("\n"):
        print()
    return generation


@contextmanager
def reading_bar(total: int) -> Iterator[Any]:
    """A function that takes the tokens read so far, and moves a bar; it goes when all are read."""
    if total < BAR_FROM_TOKENS or not console.is_terminal:
        yield lambda done: None
        return
    bar = Progress(
        TextColumn("reading"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("reading", total=total)
    bar.start()

    def read(done: int) -> None:
        if done > 0:
            bar.update(task, completed=done)
        if done >= total:
            bar.stop()

    try:
        yield read
    finally:
        bar.stop()


def summary(generation: Generation) -> str:
    """One line: sizes, speeds, the share of keys read, memory."""
    usages = [completion.usage for completion in generation.completions]
    window = sum(usage.nbytes.window for usage in usages)
    share = sum(usage.share_read for usage in usages) / len(usages)
    known = f", {generation.known_tokens:,} read before" if generation.known_tokens else ""
    parts = [
        f"{generation.prompt_tokens:,} prompt tokens{known}",
        f"prefill {_rate(generation.read_tokens, generation.prefill_seconds)}",
        f"{generation.new_tokens:,} new",
        f"decode {_rate(generation.decode_tokens, generation.decode_seconds)}",
        f"{100 * share:.1f} % of keys read",
        f"rows {_megabytes(usages[0].nbytes.rows)}, index {_megabytes(usages[0].nbytes.index)}, "
        f"window {_megabytes(window)}",
    ]
    return " · ".join(parts)


def context_as_dict(known: Context | None, path: Path | None) -> dict[str, Any]:
    """For --json, of a text that was kept; nothing where none was."""
    if known is None:
        return {}
    return {"context": str(path), "context_tokens": known.kv.num_tokens}


def as_dict(generation: Generation) -> dict[str, Any]:
    """For --json."""
    return {
        "prompt_tokens": generation.prompt_tokens,
        "known_tokens": generation.known_tokens,
        "new_tokens": generation.new_tokens,
        "prefill_seconds": round(generation.prefill_seconds, 4),
        "decode_seconds": round(generation.decode_seconds, 4),
        "prefill_tokens_per_second": _per_second(
            generation.read_tokens, generation.prefill_seconds
        ),
        "decode_tokens_per_second": _per_second(
            generation.decode_tokens, generation.decode_seconds
        ),
        "completions": [
            {
                "text": completion.text,
                "finish": completion.finish.value,
                "tokens": len(completion.token_ids),
                "share_of_keys_read": round(completion.usage.share_read, 4),
                "row_bytes": completion.usage.nbytes.rows,
                "index_bytes": completion.usage.nbytes.index,
                "window_bytes": completion.usage.nbytes.window,
                "far_context": completion.usage.cost.as_dict(),
            }
            for completion in generation.completions
        ],
    }


def _per_second(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 2) if tokens and seconds > 0 else None


def _rate(tokens: int, seconds: float) -> str:
    rate = _per_second(tokens, seconds)
    return "-" if rate is None else f"{rate:,.1f} tokens/s"


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
