"""Error of sampled attention on a real model's queries, keys and values.

Runs a Hugging Face model once over a text, takes the last token's queries and all keys and values
of every layer, and compares sampled attention over the far context (exact over 4 sink and 64 local
tokens) with full attention: error = |out - exact| / |exact| per head. Needs transformers (and gguf,
accelerate for a .gguf file).

    python benchmarks/real_keys.py --model FOLDER_OR_GGUF --text FILE --tokens 6000
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from ending import run_script
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from magicpig import LayerKV, LSHConfig, merge

SINK, LOCAL = 4, 64
CONFIGS = [LSHConfig(10, 150), LSHConfig(9, 120), LSHConfig(8, 75), LSHConfig(10, 300)]


def capture(model_path: Path, text: str, tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per layer: the last token's queries [heads, dim], keys and values [kv_heads, tokens, dim]."""
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    captured: list[tuple[Tensor, Tensor, Tensor]] = []

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
    ) -> Any:
        captured.append((query[0, :, -1].clone(), key[0].clone(), value[0].clone()))
        return sdpa_attention_forward(module, query, key, value, *args, **kw)

    AttentionInterface.register("capture", attention)
    AttentionMaskInterface.register("capture", sdpa_mask)
    where = {"gguf_file": model_path.name} if model_path.suffix == ".gguf" else {}
    folder = model_path.parent if where else model_path
    tokenizer = AutoTokenizer.from_pretrained(folder, **where)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    model.set_attn_implementation("capture")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise SystemExit(f"the text has only {ids.shape[1]} tokens; --tokens asks for {tokens}")
    with torch.inference_mode():
        model(ids, use_cache=False, logits_to_keep=1)
    return captured


def errors(q: Tensor, k: Tensor, v: Tensor, lsh: LSHConfig) -> tuple[Tensor, float]:
    """Error per head, and the share of far keys read."""
    heads, kv_heads, dim = len(q), len(k), k.shape[-1]
    far, window = (LayerKV(heads, kv_heads, dim, index, torch.float32) for index in (lsh, None))
    end = k.shape[1] - LOCAL
    far.append(k[:, SINK:end], v[:, SINK:end])
    for part in (slice(0, SINK), slice(end, None)):
        window.append(k[:, part], v[:, part])
    exact, _ = merge(*window.attend(q), *far.attend(q, exact=True))
    sampled, _ = merge(*window.attend(q), *far.attend(q))
    share = far.last_stats.share.mean().item() if far.last_stats else 0.0
    return (sampled - exact).norm(dim=-1) / exact.norm(dim=-1), share


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder or .gguf file")
    parser.add_argument("--text", type=Path, required=True, help="a long text file")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--seeds", type=int, default=4, help="draws of the projection")
    parser.add_argument("--dense", type=int, nargs="*", default=[0, 15], help="layers left out")
    args = parser.parse_args()
    for path in (args.model, args.text):
        if not path.exists():
            parser.error(f"{str(path)!r} is not here: name a folder or a .gguf file, and a text")
    layers = capture(args.model, args.text.read_text(errors="replace"), args.tokens)
    kept = [layer for i, layer in enumerate(layers) if i not in args.dense]
    table = Table(title=f"{args.model.name}, {args.text.name}, {args.tokens:,} tokens")
    for name in ("lsh", "far keys read", "mean error", "median", "p90", "p99"):
        table.add_column(name, justify="right")
    for lsh in track(CONFIGS, description="attending", transient=True):
        seeds = [
            LSHConfig(lsh.bits_per_table, lsh.num_tables, seed=seed) for seed in range(args.seeds)
        ]
        results = [errors(*layer, config) for config in seeds for layer in kept]
        error = torch.cat([e for e, _ in results])
        quantiles = error.quantile(torch.tensor([0.5, 0.9, 0.99])).tolist()
        share = sum(s for _, s in results) / len(results)
        table.add_row(
            f"({lsh.bits_per_table}, {lsh.num_tables})",
            f"{100 * share:.1f} %",
            *(f"{x:.3f}" for x in (error.mean().item(), *quantiles)),
        )
    Console().print(table)


if __name__ == "__main__":
    run_script(main)
