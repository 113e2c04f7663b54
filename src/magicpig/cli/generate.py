"""`magicpig generate`: a document and a question in, an answer out, as it comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from magicpig.cli.inputs import layer_list, prompt_of

PROMPT, SAMPLING, ATTENTION, OUTPUT = "Prompt", "Sampling", "Attention", "Machine and output"


def option(panel: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **settings)


def generate(
    model: Annotated[str, option(PROMPT, help="Built-in name, folder or hub name.")] = "smollm2",
    prompt: Annotated[
        str | None,
        option(PROMPT, "--prompt", "-p", help="The question; without it and --file: stdin."),
    ] = None,
    file: Annotated[
        list[Path] | None,
        option(PROMPT, "--file", "-f", help="Text that comes before it; - is stdin. Repeatable."),
    ] = None,
    system: Annotated[str | None, option(PROMPT, help="System message.")] = None,
    raw: Annotated[
        bool, option(PROMPT, "--raw", help="Continue the text; no chat template.")
    ] = False,
    truncate_left: Annotated[
        bool,
        option(PROMPT, "--truncate-left", help="Cut a text that is too long."),
    ] = False,
    max_tokens: Annotated[int, option(SAMPLING, help="Longest answer.")] = 256,
    temperature: Annotated[float, option(SAMPLING, help="0: the likeliest token.")] = 0.0,
    top_p: Annotated[float, option(SAMPLING, help="Nucleus. 1 is off.")] = 1.0,
    top_k: Annotated[int, option(SAMPLING, help="Among so many. 0 is off.")] = 0,
    min_p: Annotated[float, option(SAMPLING, help="At least so likely. 0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, option(SAMPLING, help="Of tokens seen.")] = 1.0,
    seed: Annotated[int | None, option(SAMPLING, help="For the same answer again.")] = None,
    stop: Annotated[
        list[str] | None, option(SAMPLING, help="End before this text. Repeatable.")
    ] = None,
    n: Annotated[int, option(SAMPLING, "-n", help="So many answers.")] = 1,
    method: Annotated[
        str, option(ATTENTION, help="lsh samples the far context, full reads it.")
    ] = "lsh",
    bits_per_table: Annotated[int, option(ATTENTION, help="K of the paper.")] = 10,
    num_tables: Annotated[int, option(ATTENTION, help="L of the paper.")] = 150,
    dense_layers: Annotated[
        str | None,
        option(ATTENTION, help="Layers that read all, like 0,15; without: first, middle."),
    ] = None,
    device: Annotated[str, option(OUTPUT, help="auto, cpu, cuda, ...")] = "auto",
    dtype: Annotated[str, option(OUTPUT, help="auto, bfloat16, float32, ...")] = "auto",
    threads: Annotated[int | None, option(OUTPUT, help="CPU threads; without: all.")] = None,
    as_json: Annotated[
        bool, option(OUTPUT, "--json", help="One JSON object instead of text.")
    ] = False,
) -> None:
    """Answer a question, about a long text if one is given.

    magicpig generate --file book.txt --prompt "Who keeps the light?"
    """
    document, question = prompt_of(prompt, file or [], system, raw)
    from magicpig import LSHConfig
    from magicpig.attention.methods import check_method
    from magicpig.engine.params import SamplingParams
    from magicpig.llm import LLM
    from magicpig.native import set_num_threads

    check_method(method)
    if threads is not None:
        set_num_threads(threads)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        n=n,
    )
    lsh = LSHConfig(bits_per_table, num_tables)
    layers = layer_list(dense_layers)
    llm = LLM(
        model,
        method=method,
        lsh=lsh,
        dense_layers=layers,
        device=device,
        dtype=dtype,
    )
    if truncate_left:
        document = document.cut_left(llm.tokenizer, question, llm.max_length - max_tokens)
    first, rest = document.parts(llm.tokenizer, question)
    from magicpig.cli.answer import answer, as_dict, generated

    if as_json:
        print(json.dumps(as_dict(generated(llm, first + rest, params)), ensure_ascii=False))
    else:
        answer(llm, first + rest, params)
