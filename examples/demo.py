"""A question about a long text, answered by the default model: full attention against sampled.

The text is read once. Then every decode step attends to all of its keys, to those that hash tables
draw, or to those that a pass over short codes draws.
"""

from pathlib import Path

from rich.table import Table

from magicpig import LLM, SamplingParams
from magicpig.attention.plan import make_plan
from magicpig.cli.answer import answer, console, reading_bar
from magicpig.context import Context
from magicpig.document import Document

TEXT = Path(__file__).parent / "lighthouse.txt"
QUESTION = "What was the name of the mail steamer that came to the island every second Thursday?"


def main() -> None:
    llm = LLM("smollm2")
    document = Document(TEXT.read_text().rstrip())
    num_tokens = len(document.parts(llm.tokenizer, "")[0])
    console.print(f"[bold]{TEXT.name}[/bold], {num_tokens:,} tokens, is read once ...")
    with reading_bar(num_tokens) as read:
        context = Context.read(llm, document, lambda event: read(event.prefilled))
    console.print(f"[bold]Question[/bold] {QUESTION}\n")
    table = Table("method", "decode", "keys read", "rows", "index", box=None, header_style="dim")
    for name in ("full", "lsh", "scan"):
        plan = make_plan(name, llm.engine.runner.model.config.num_hidden_layers)
        known = plan.adopt(context.kv)
        console.print(f"[bold]{name}[/bold]")
        prompt_ids = context.prompt_ids(llm, QUESTION)
        generation = answer(llm, prompt_ids, SamplingParams(max_tokens=60), known)
        usage = generation.completions[0].usage
        table.add_row(
            name,
            f"{generation.decode_tokens / generation.decode_seconds:.1f} tokens/s",
            f"{100 * usage.share_read:.1f} %",
            f"{usage.nbytes.rows / 1e6:.0f} MB",
            f"{usage.nbytes.index / 1e6:.0f} MB",
        )
        console.print()
    console.print(table)
    console.print(
        "keys read: of all layers and tokens, those included that are always read (two layers, the "
        "first and the last tokens)",
        style="dim",
    )


if __name__ == "__main__":
    main()
