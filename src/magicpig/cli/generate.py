"""`magicpig generate`: a document and a question in, an answer out, as it comes."""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from magicpig.cli.inputs import check_text, layer_list, prompt_of
from magicpig.cli.report import print_json

PROMPT, SAMPLING, ATTENTION, OUTPUT = "Prompt", "Sampling", "Attention", "Machine and output"


def option(panel: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **settings)


def generate(
    model: Annotated[
        str | None, option(PROMPT, help="Built-in name, folder or hub name. (smollm2)")
    ] = None,
    prompt: Annotated[
        str | None,
        option(PROMPT, "--prompt", "-p", help="The question. (stdin, if there is no --file)"),
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
        option(PROMPT, "--truncate-left", help="Leave out the beginning of a text too long."),
    ] = False,
    save_context: Annotated[
        Path | None, option(PROMPT, help="Keep the text, as read, in this file.")
    ] = None,
    context: Annotated[
        Path | None, option(PROMPT, help="Text that was kept so, instead of --file.")
    ] = None,
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
    n: Annotated[int, option(SAMPLING, "-n", help="So many answers, 64 at most.")] = 1,
    method: Annotated[
        str | None,
        option(
            ATTENTION, help="scan, lsh, full, topk:2%, quest:16:4% ...: docs/methods.md. (scan)"
        ),
    ] = None,
    bits_per_table: Annotated[int | None, option(ATTENTION, help="K of lsh. (10)")] = None,
    num_tables: Annotated[int | None, option(ATTENTION, help="L of lsh. (150)")] = None,
    dense_layers: Annotated[
        str | None,
        option(ATTENTION, help="Layers that read all, like 0,15. (first, middle)"),
    ] = None,
    device: Annotated[str, option(OUTPUT, help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str | None, option(OUTPUT, help="auto, bfloat16, float32, ... (auto)")] = None,
    threads: Annotated[int | None, option(OUTPUT, help="CPU threads. (all)")] = None,
    cpu_memory: Annotated[
        str | None, option(OUTPUT, help="For keys, values and index, like 64GiB. (most of it)")
    ] = None,
    gpu_memory: Annotated[
        str | None, option(OUTPUT, help="All that is used of a GPU, like 24GiB. (most of it)")
    ] = None,
    trace: Annotated[
        Path | None,
        option(OUTPUT, help="Write what happened when to this file, for chrome://tracing."),
    ] = None,
    as_json: Annotated[
        bool, option(OUTPUT, "--json", help="One JSON object instead of text.")
    ] = False,
) -> None:
    """Answer a question, about a long text if one is given.

    magicpig generate --file book.txt --prompt "Who keeps the light?"
    """
    # Imports and a model make a million objects that stay: looking through them for garbage
    # would take half a second of the start.
    gc.disable()
    document, question = prompt_of(
        prompt, file or [], system, raw, context, save_context, trace, truncate_left
    )
    for text in stop or ():
        check_text("--stop", text)
    from magicpig.cli import answer
    from magicpig.engine.params import SamplingParams
    from magicpig.trace import recording

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
    if n > 1 and temperature == 0:
        print(f"magicpig: all {n} answers are alike without --temperature", file=sys.stderr)
    answer.use_threads(threads)
    llm = answer.load_llm(
        context,
        {
            "model": model,
            "method": method,
            "bits_per_table": bits_per_table,
            "num_tables": num_tables,
            "dense_layers": layer_list(dense_layers),
            "dtype": dtype,
        },
        device,
        {"cpu_memory": cpu_memory, "gpu_memory": gpu_memory},
    )
    gc.freeze()
    gc.enable()
    if truncate_left:
        if max_tokens >= llm.max_length:
            raise ValueError(
                f"--max-tokens {max_tokens} leaves a prompt no room in the model's context, which "
                f"holds {llm.max_length}: --truncate-left makes room for as many"
            )
        document = document.cut_left(llm.tokenizer, question, llm.max_length - max_tokens)
    shown = answer.Shown.AS_JSON if as_json else answer.Shown.AS_TEXT
    with recording(trace) if trace else nullcontext():
        known = answer.known_context(llm, document, context, save_context, shown)
        about_context = answer.context_as_dict(known, save_context or context)
        if known is None:
            first, rest = document.parts(llm.tokenizer, question)
            prompt_ids = first + rest
            if file and not truncate_left and len(prompt_ids) >= llm.max_length:
                raise ValueError(
                    f"the prompt has {len(prompt_ids)} tokens, and the model's context holds "
                    f"{llm.max_length}: --truncate-left leaves the beginning of --file out"
                )
        elif question:
            prompt_ids = known.prompt_ids(llm, question)
        else:  # the text was to be kept, and is
            if as_json:
                print_json({**about_context, "completions": []})
            return
        kv = None if known is None else known.kv
        if as_json:
            generation = answer.generated(llm, prompt_ids, params, kv, shown)
            print_json({**about_context, **answer.as_dict(generation)})
        else:
            answer.answer(llm, prompt_ids, params, kv)
