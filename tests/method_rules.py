"""Rules of methods, each written out for one query head at a time, and sequences to hold methods to
them."""

import math

import numpy as np
import torch
from specs import AT_100, EXACT

from magicpig import LSHConfig, WindowConfig, reference
from magicpig.attention.registry import parse
from magicpig.kv.base import LayerShape
from magicpig.kv.sequence import step

HEADS, KV_HEADS, DIM = 6, 2, 16
GROUP = HEADS // KV_HEADS
SHAPE = LayerShape(HEADS, KV_HEADS, DIM, torch.float32)
SCALE = 0.4
WINDOW = WindowConfig(sinks=2, local=4, block=8)
ROW = 2 * DIM * 4  # bytes of a key and a value


# The rules. Each takes a query [dim] and the far keys [tokens, dim], all float64, and gives
# {row: weight} of the rows that are read; the weight multiplies exp(score).


def score(query, key, softcap=None):
    product = SCALE * sum(q * k for q, k in zip(query, key, strict=True))
    return product if softcap is None else softcap * math.tanh(product / softcap)


def highest(values, share):
    count = math.ceil(share * len(values) - 1e-9)
    return sorted(range(len(values)), key=lambda i: values[i], reverse=True)[:count]


def everything(query, keys):
    return dict.fromkeys(range(len(keys)), 1.0)


def nothing(query, keys):
    return {}


def topk(share):
    def rule(query, keys):
        return dict.fromkeys(highest([score(query, key) for key in keys], share), 1.0)

    return rule


def quest(page, share):
    def rule(query, keys):
        pages = [range(i, min(i + page, len(keys))) for i in range(0, len(keys), page)]
        bounds = []
        for rows in pages:
            low, high = keys[rows].min(0), keys[rows].max(0)
            bounds.append(sum(max(q * a, q * b) for q, a, b in zip(query, low, high, strict=True)))
        return {i: 1.0 for chosen in highest(bounds, share) for i in pages[chosen]}

    return rule


def loki(dims, share):
    def rule(query, keys):
        if not len(keys):
            return {}
        _, _, components = np.linalg.svd(keys - keys.mean(0), full_matrices=True)
        basis = components[: math.ceil(dims * DIM)]
        scores = [float((basis @ query) @ (basis @ key)) for key in keys]
        return dict.fromkeys(highest(scores, share), 1.0)

    return rule


def collisions(query, keys, config):
    """Tables in which each key, less the mean of all, has the query's bits."""
    directions = reference.projection(config, DIM).double()  # the random numbers as such
    vectors = torch.from_numpy(np.stack([query, *(keys - keys.mean(0))]))
    signs = (vectors.float().bfloat16().double() @ directions > 0).view(
        len(vectors), config.num_tables, config.bits_per_table
    )
    return (signs[1:] == signs[0]).all(2).sum(1).tolist()


def lsh(config):
    """Weights are one over the probability to be drawn: to meet the query in two tables."""
    bits, tables = config.bits_per_table, config.num_tables

    def rule(query, keys):
        if len(keys) < config.shortest_indexed:
            return everything(query, keys)
        drawn = {}
        for i, met in enumerate(collisions(query, keys, config)):
            key = keys[i] - keys.mean(0)
            cosine = key @ query / np.linalg.norm(key) / np.linalg.norm(query)
            bucket = (1 - math.acos(cosine) / math.pi) ** bits
            missed = (1 - bucket) ** tables + tables * bucket * (1 - bucket) ** (tables - 1)
            if met >= 2:
                drawn[i] = 1 / (1 - missed)
        return drawn

    return rule


LSH = LSHConfig(3, 12, exact_below=24)
RULES = {
    **dict.fromkeys([*EXACT, *AT_100], everything),
    "topk:20%": topk(0.2),
    "topk:1%": topk(0.01),
    "quest:4:30%": quest(4, 0.3),
    "quest:7:20%": quest(7, 0.2),
    "loki:25%:20%": loki(0.25, 0.2),
    "loki:40%:10%": loki(0.4, 0.1),
    "loki:100%:20%": topk(0.2),
    "streaming": nothing,
}


class Sequence:
    """A sequence as a list of tokens, and which of them are far, by the words of WindowConfig."""

    def __init__(self, spec, prompt, window=WINDOW):
        self.config = window
        self.layer = parse(spec).new_layer(SHAPE, window, 3)
        self.keys, self.values = torch.randn(2, KV_HEADS, prompt, DIM).unbind()
        behind = prompt - window.sinks - window.local
        self.num_far = behind if behind >= window.block else 0

    def read_prompt(self, mass=None):
        self.layer.extend(self.keys, self.values, mass)

    def add(self, key, value):
        self.keys = torch.cat([self.keys, key[:, None]], 1)
        self.values = torch.cat([self.values, value[:, None]], 1)

    def settle(self):
        self.layer.settle()
        recent = self.keys.shape[1] - self.num_far - self.config.sinks
        if recent >= self.config.local + 2 * self.config.block:
            self.num_far += self.config.block

    def attend(self, query, rule, softcap=None):
        """Output [heads, dim], in float64."""
        first = self.config.sinks if self.num_far else 0
        far = range(first, first + self.num_far)
        out = np.zeros((HEADS, DIM))
        for head in range(HEADS):
            keys, values = (x[head // GROUP].double().numpy() for x in (self.keys, self.values))
            q = query[head].double().numpy()
            weights = {i: 1.0 for i in range(len(keys)) if i not in far}
            weights |= {first + i: weight for i, weight in rule(q, keys[far]).items()}
            exps = {i: w * math.exp(score(q, keys[i], softcap)) for i, w in weights.items()}
            out[head] = sum(exp * values[i] for i, exp in exps.items()) / sum(exps.values())
        return torch.from_numpy(out)


def step_all(sequences, softcap=None):
    """A random token of each: queries, and outputs."""
    queries = torch.randn(len(sequences), HEADS, DIM)
    keys, values = torch.randn(2, len(sequences), KV_HEADS, DIM).unbind()
    layers = [sequence.layer for sequence in sequences]
    out = step(layers, queries, keys, values, SCALE, softcap)
    for i, sequence in enumerate(sequences):
        sequence.add(keys[i], values[i])
    return queries, out
