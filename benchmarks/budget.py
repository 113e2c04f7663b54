"""Whether the engine keeps to a GPU's memory limit: as many long prompts as it lets in, and more.

    python benchmarks/budget.py --context 96k --gpu-memory 24GiB
    python benchmarks/budget.py --device cpu --model smollm2 --context 1k --cpu-memory 300MB

One request more is given to the engine than it says will fit; all have random prompts of their own,
and weights are random. The engine reads prompts while earlier sequences decode. Torch refuses
memory beyond the limit, so that too small an estimate shows as an error.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import torch
from arguments import a_method, argument, new_file, of_a_model, positive
from ending import run_script
from machine import hardware
from rich.console import Console
from rich.progress import Progress
from throughput import Bench
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from magicpig import LLM, SamplingParams
from magicpig.cli.inputs import one_length
from magicpig.engine.memory import LIBRARIES
from magicpig.models import LoadedModel

console = Console(stderr=True, highlight=False)


def run(llm: LLM, context: int, new_tokens: int) -> dict[str, float]:
    """The most sequences at a time, seconds, and the peaks of memory."""
    engine = llm.engine
    fits = llm.largest_batch(context, new_tokens)
    vocabulary = engine.runner.model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    for _ in range(fits + 1):
        prompt = torch.randint(vocabulary, (context,), generator=generator).tolist()
        engine.add(prompt, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
    cuda = engine.runner.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()  # of making the weights
    most, start, done, taken = 0, time.perf_counter(), 0, 0
    with Progress(console=console) as progress:
        task = progress.add_task("tokens", total=(fits + 1) * new_tokens)
        while engine.has_work:
            events = engine.step()
            for event in events:
                if event.error:
                    raise SystemExit(f"a request failed: {event.error}")
            most = max(most, len(engine.scheduler.running))
            if cuda:
                free, total = torch.cuda.mem_get_info()
                taken = max(taken, total - free)
            done += len(events)
            progress.update(task, completed=done)
    found = {"fits": fits, "most": most, "seconds": time.perf_counter() - start}
    if cuda:
        found["allocated"] = torch.cuda.max_memory_allocated()
        found["reserved"] = torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
        found["libraries"] = total - free - torch.cuda.memory_reserved()  # other programs' too
        found["in_all"] = taken
    return found


def main() -> None:
    parser = of_a_model(__doc__)
    context = argument(partial(one_length, "the context"))
    parser.add_argument("--context", type=context, default="96k")
    parser.add_argument("--method", type=argument(a_method), default="scan:2:1%")
    parser.add_argument("--gpu-memory", help="of a GPU, like 24GiB")
    parser.add_argument("--cpu-memory", help="like 64GB")
    parser.add_argument(
        "--new-tokens", type=argument(positive), default=400, help="of each sequence"
    )
    parser.add_argument("--json", type=argument(new_file))
    args = parser.parse_args()
    bench = Bench(args.model, args.device)
    words = Tokenizer(WordLevel({f" {i}": i for i in range(bench.model.config.vocab_size)}, " 0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    model = LoadedModel(bench.model, tokenizer, args.model, Path())
    try:
        llm = LLM(model, method=args.method, gpu_memory=args.gpu_memory, cpu_memory=args.cpu_memory)
    except ValueError as error:
        parser.error(str(error))
    if not llm.largest_batch(args.context, args.new_tokens):
        raise SystemExit("not one sequence fits: take a shorter --context, or more memory")
    found = run(llm, args.context, args.new_tokens)
    print(f"{hardware()}; {args.model}, {args.method}, {args.context:,} tokens")
    print(
        f"the engine said {found['fits']} sequences fit; at most {found['most']} ran together, "
        f"{found['seconds']:.0f} s"
    )
    if "reserved" in found:
        print(
            f"GPU: {found['allocated'] / 1e9:.2f} GB allocated at the peak, "
            f"{found['reserved'] / 1e9:.2f} GB reserved, and {found['libraries'] / 1e9:.2f} GB of "
            f"CUDA's own ({LIBRARIES / 1e9:.2f} are counted); "
            f"{found['in_all'] / 1e9:.2f} GB in all, limit {args.gpu_memory}"
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    run_script(main)
