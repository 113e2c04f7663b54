"""Which rows to draw, and how: estimators of attention on a real model's queries, keys and values.

What `scan` is made of was chosen by these tables (docs/log.md). Every rule is a few lines of torch
over all keys; error = |estimate - exact| / |exact| of the attention output, window included.

    python benchmarks/estimators.py                      the default model, excerpts of its text
    python benchmarks/estimators.py --model smollm2-ruler-32k --task niah_multikey_3 --tokens 8192

Excerpts and prompts are other ones than those of `magicpig analyze` and of evaluations.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from ending import run_script
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn.functional import pad

from magicpig import ScanConfig, reference
from magicpig.analysis import texts
from magicpig.analysis.capture import LayerInput, Reader
from magicpig.analysis.estimators import Scene, weighted
from magicpig.evals import ruler
from magicpig.evals.prompts import count_tokens, prompt_of
from magicpig.models import LoadedModel, load

SINKS, LOCAL, POSITIONS = 4, 64, 4
BITS = (1, 2, 4)
BLOCK = 64
NEVER = torch.tensor(-math.inf)


@dataclass(frozen=True)
class Far:
    """A scene, and what rules may know of it: [kv_heads, queries, n] but for `values`, which has 1
    in place of queries.

    estimates: scores as codes tell them, by bits. uniform: a number for each query and key.
    distance: squared distances of values from their mean, in mean squared distances.
    blocks: [kv_heads, queries, blocks], logs of the weights of BLOCK keys after another, as their
        mean tells them; of two numbers, the second also uses their variance in each dimension.
    """

    scene: Scene
    estimates: dict[int, Tensor]
    uniform: Tensor
    distance: Tensor
    blocks: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, given: LayerInput, generator: torch.Generator) -> Far:
        scene = Scene.of(given, SINKS, LOCAL)
        squared = (scene.values - scene.values.mean(1, keepdim=True)).square().sum(-1)
        return cls(
            scene,
            {bits: estimated(scene, given.scale, bits) for bits in BITS},
            torch.rand(scene.scores.shape, generator=generator),
            (squared / squared.mean(-1, keepdim=True))[:, None],
            block_logs(scene, given.scale),
        )


def estimated(scene: Scene, scale: float, bits: int) -> Tensor:
    """Scores by codes of the keys and 8 bits per dimension of the queries."""
    scan = ScanConfig(bits)
    heads = []
    for keys, queries in zip(scene.keys, scene.queries, strict=True):
        levels, factors = reference.key_codes(keys, scan)
        rotated = reference.rotate(queries, scan)
        width = rotated.abs().amax(-1, keepdim=True) / 127
        products = (rotated / width).round() * width @ levels.T * factors
        heads.append(scale * (products + queries.double() @ keys.double().mean(0)[:, None]))
    return torch.stack(heads).float()


def block_logs(scene: Scene, scale: float) -> tuple[Tensor, Tensor]:
    keys, temper = scene.keys.float().transpose(1, 2), reference.TEMPERS[2]
    padded = pad(keys, (0, -keys.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK))
    count = pad(torch.ones(keys.shape[2]), (0, -keys.shape[2] % BLOCK)).view(-1, BLOCK).sum(1)
    mean, square = padded.sum(-1) / count, padded.square().sum(-1) / count
    queries = temper * scale * scene.queries.float()
    by_mean = queries @ mean + count.log()
    return by_mean, by_mean + 0.5 * queries.square() @ (square - mean.square())


def thresholds(logs: Tensor, rows: int) -> Tensor:
    """log t with sum min(1, exp(logs) / t) = rows, for each query."""
    ordered = logs.sort(-1, descending=True).values
    rest = ordered.flip(-1).logcumsumexp(-1).flip(-1)
    heavy = torch.arange(logs.shape[-1])
    found = rest - (rows - heavy).clamp(min=1e-9).log()
    first = ((ordered <= found) & (heavy < rows)).float().argmax(-1, keepdim=True)
    return found.gather(-1, first)


def top(far: Far, logs: Tensor, rows: int) -> Tensor:
    """The keys of the highest weights, as they are."""
    least = logs.topk(rows, -1).values[..., -1:]
    return torch.where(logs >= least, far.scene.scores, NEVER)


def priority(far: Far, logs: Tensor, rows: int) -> Tensor:
    """The keys of the highest w / U."""
    priorities = logs - far.uniform.log()
    border = priorities.topk(rows + 1, -1).values[..., -1:]
    weights = far.scene.scores - (logs - border).clamp(max=0)
    return torch.where(priorities > border, weights, NEVER)


def poisson(far: Far, logs: Tensor, rows: int) -> Tensor:
    """Each key by itself."""
    log_p = (logs - thresholds(logs, rows)).clamp(max=0)
    return torch.where(far.uniform.log() < log_p, far.scene.scores - log_p, NEVER)


def systematic(far: Far, logs: Tensor, rows: int) -> Tensor:
    """One key wherever the sum of probabilities passes a whole number, less a random one."""
    log_p = (logs - thresholds(logs, rows)).clamp(max=0)
    after = log_p.double().exp().cumsum(-1) + far.uniform[..., :1]
    before = torch.cat([far.uniform[..., :1].double(), after[..., :-1]], -1)
    drawn = (after.floor() > before.floor()) | (log_p >= 0)
    return torch.where(drawn, far.scene.scores - log_p, NEVER)


def shared(far: Far, logs: Tensor, rows: int) -> Tensor:
    """Heads of a KV head read what any of them draws, by the same random numbers."""
    group = logs.shape[1] // far.scene.positions
    log_p = (logs - thresholds(logs, rows)).clamp(max=0)
    log_p = log_p.unflatten(1, (-1, group)).amax(2).repeat_interleave(group, 1)
    uniform = far.uniform.unflatten(1, (-1, group))[:, :, 0].repeat_interleave(group, 1)
    return torch.where(uniform.log() < log_p, far.scene.scores - log_p, NEVER)


def staged(share: float, by: int) -> Rule:
    """Some blocks for all heads of a KV head, a quarter of them by chance alone; then keys of these
    blocks. Codes of other blocks need not be read.

    share: of the blocks. by: which of Far.blocks.
    """

    def rule(far: Far, logs: Tensor, rows: int) -> Tensor:
        group, mass = logs.shape[1] // far.scene.positions, far.blocks[by]
        mass = (mass - mass.logsumexp(-1, keepdim=True)).unflatten(1, (-1, group)).logsumexp(2)
        number = share * mass.shape[-1]
        heavy = (mass - thresholds(mass, max(1, round(0.75 * number)))).clamp(max=0).exp()
        log_block = (heavy + 0.25 * share).clamp(max=1).log().repeat_interleave(group, 1)
        generator = torch.Generator().manual_seed(rows)
        chance = torch.rand(mass.shape, generator=generator).log().repeat_interleave(group, 1)

        def each(blocks: Tensor) -> Tensor:
            return blocks.repeat_interleave(BLOCK, -1)[..., : logs.shape[-1]]

        log_block, drawn, border = each(log_block), each(chance < log_block), thresholds(logs, rows)
        for _ in range(8):  # until as many rows are expected
            log_p = torch.minimum(log_block, logs - border)
            border = border + (log_p.exp().sum(-1, keepdim=True) / rows).log()
        drawn = drawn & (far.uniform.log() < log_p - log_block)
        return torch.where(drawn, far.scene.scores - log_p, NEVER)

    return rule


Rule = Callable[[Far, Tensor, int], Tensor]


def variants(far: Far) -> Iterator[tuple[str, Rule, Tensor]]:
    """Names, rules, and the logs of the weights by which they choose."""
    scores = far.scene.scores
    bias = 0.5 * (far.distance + reference.ORDINARY).log()
    yield "top-k, exact scores", top, scores
    yield "priority, exact scores", priority, scores
    yield "priority, exact scores, values", priority, scores + bias
    for bits, logs in far.estimates.items():
        temper = reference.TEMPERS[bits]
        yield f"priority, {bits}-bit codes", priority, logs
        yield f"poisson, {bits}-bit codes", poisson, logs
        if temper < 1:
            yield f"poisson, {bits}-bit codes, tempered {temper}", poisson, temper * logs
        yield f"poisson, {bits}-bit codes, tempered {temper}, values", poisson, temper * logs + bias
    two = far.estimates[2]
    for temper in (0.7, 1.0):
        yield f"poisson, 2-bit codes, tempered {temper}, values", poisson, temper * two + bias
    for ordinary in (0.0, 1.0):
        biased = 0.85 * two + 0.5 * (far.distance + ordinary).log()
        yield f"poisson, 2-bit codes, tempered 0.85, values + {ordinary:g}", poisson, biased
    yield "systematic, 2-bit codes, tempered 0.85, values", systematic, 0.85 * two + bias
    for share in (0.125, 0.25, 0.5):
        for by, name in enumerate(("means", "means and variances")):
            what = f"{share:.1%} of blocks by {name}, then poisson, as before"
            yield what, staged(share, by), 0.85 * two + bias
    yield "rows of a group shared, 2-bit codes, tempered 0.85, values", shared, 0.85 * two + bias


def inputs(loaded: LoadedModel, task: str | None, tokens: int, count: int) -> list[list[int]]:
    tokenizer = loaded.tokenizer
    if task is None:
        excerpts = texts.excerpts(tokenizer, texts.default_text(), tokens, 3 * count + 1)
        return excerpts[2::3][:count]
    prompts = []
    for index in range(1000, 1000 + count):
        sample = ruler.make(task, tokens, index, lambda text: count_tokens(text, tokenizer), 1)
        prompt = prompt_of(sample, tokenizer)
        prompts.append(prompt.context + prompt.question)
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--task", choices=ruler.TASKS, help="prompts of RULER in place of text")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--inputs", type=int, default=2)
    parser.add_argument("--every", type=int, default=3, help="take each such layer, from 1 on")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.005, 0.01, 0.02])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    console = Console(stderr=True)
    loaded = load(args.model)
    reader = Reader(loaded)
    generator = torch.Generator().manual_seed(7)
    found: dict[tuple[str, float], list[tuple[Tensor, Tensor]]] = {}
    for token_ids in inputs(loaded, args.task, args.tokens, args.inputs):
        layers = reader.read(token_ids, POSITIONS, lambda done: None)[1 :: args.every]
        for given in track(layers, "layers", console=console):
            far = Far.of(given, generator)
            for name, rule, logs in variants(far):
                for budget in args.budgets:
                    weights = rule(far, logs, max(1, round(budget * far.scene.num_far)))
                    error = far.scene.errors(weighted(weights, far.scene.values)).flatten()
                    read = weights.isfinite().float().mean(-1).flatten()
                    found.setdefault((name, budget), []).append((error, read))
    rows = []
    for (name, budget), parts in found.items():
        error, read = (torch.cat(each) for each in zip(*parts, strict=True))
        high, highest = error.quantile(torch.tensor([0.9, 0.99])).tolist()
        numbers = read.mean().item(), error.mean().item(), error.median().item(), high, highest
        rows.append((name, budget, *numbers))
    if args.json:
        print(json.dumps(rows))
        return
    print("| rule | budget | keys read | mean error | median | p90 | p99 |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, budget, read, *errors in rows:
        words = [name, f"{budget:.2%}", f"{read:.2%}", *(f"{error:.4f}" for error in errors)]
        print(f"| {' | '.join(words)} |")


if __name__ == "__main__":
    run_script(main)
