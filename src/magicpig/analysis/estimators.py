"""Estimates of attention over the far context, for all queries of a layer at once, in torch.

Written for study and apart from the methods that decode: each rule is a few lines over a matrix of
scores. A rule gives the log of every key's weight, -inf for keys that are not read; the estimate is
the weighted mean of the values, merged with exact attention over the window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from magicpig import reference
from magicpig.attention.merge import merge
from magicpig.config import LSHConfig
from magicpig.kv.layer import native_lsh

if TYPE_CHECKING:
    from magicpig.analysis.capture import LayerInput

DECISIVE = 0.1  # of a query's attention, from which on a key is called decisive

State = tuple[Tensor, Tensor]  # output [kv_heads, queries, dim], log-sum-exp [kv_heads, queries]


@dataclass(frozen=True)
class Scene:
    """Queries of one layer over a far context and a window, in float32.

    A KV head's queries are those of all positions and of all heads of its group: `queries` counts
    positions * group.

    queries: [kv_heads, queries, dim]. keys, values: [kv_heads, far, dim].
    scores: [kv_heads, queries, far]. window_scores: [kv_heads, queries, window], -inf where a query
        must not look. window, exact: attention over the window, and over everything.
    """

    positions: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scores: Tensor
    window_scores: Tensor
    window: State
    exact: Tensor

    @classmethod
    def of(cls, given: LayerInput, sinks: int, local: int) -> Scene:
        """The far context begins after the sinks and ends `local` tokens before the first query:
        all queries share it."""
        positions = len(given.queries)
        queries = by_kv_head(given.queries.float(), len(given.keys))
        keys, values = given.keys.float(), given.values.float()
        tokens = keys.shape[1]
        end = far_end(tokens, positions, local)
        near = [*range(sinks), *range(end, tokens)]
        raw = queries @ keys.transpose(1, 2) * given.scale
        if given.softcap is not None:
            raw = given.softcap * torch.tanh(raw / given.softcap)
        group = queries.shape[1] // positions
        at = torch.arange(tokens - positions, tokens).repeat_interleave(group)  # of each query
        behind = torch.tensor(near) > at[:, None]
        window_scores = raw[:, :, near].masked_fill(behind, -math.inf)
        scores = raw[:, :, sinks:end].contiguous()
        window = weighted(window_scores, values[:, near])
        exact, _ = merge(*window, *weighted(scores, values[:, sinks:end]))
        return cls(
            positions,
            queries,
            keys[:, sinks:end],
            values[:, sinks:end],
            scores,
            window_scores,
            window,
            exact,
        )

    def first(self, positions: int) -> Scene:
        """The same with the queries of the first positions only."""
        count = self.queries.shape[1] // self.positions * positions
        return Scene(
            positions,
            self.queries[:, :count],
            self.keys,
            self.values,
            self.scores[:, :count],
            self.window_scores[:, :count],
            (self.window[0][:, :count], self.window[1][:, :count]),
            self.exact[:, :count],
        )

    @property
    def num_far(self) -> int:
        return self.keys.shape[1]

    @cached_property
    def decisive(self) -> Tensor:
        """[kv_heads, queries, far]: which of the far keys have so much of a query's attention that
        an answer may hang on them."""
        everything = torch.cat([self.window_scores, self.scores], -1).softmax(-1)
        return everything[..., self.window_scores.shape[-1] :] >= DECISIVE

    def errors(self, far: State) -> Tensor:
        """|estimate - exact| / |exact|, [positions, heads], of a state over the far context."""
        out, _ = merge(*self.window, *far)
        return self.by_head((out - self.exact).norm(dim=-1) / self.exact.norm(dim=-1))

    def by_head(self, x: Tensor) -> Tensor:
        """[kv_heads, queries] as [positions, heads]."""
        kv_heads, count = x.shape
        split = x.view(kv_heads, self.positions, count // self.positions)
        return split.transpose(0, 1).flatten(1)


def far_end(tokens: int, positions: int, local: int) -> int:
    return tokens - positions - local


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """[positions, heads, ...] as [kv_heads, positions * group, ...]."""
    positions, heads, *rest = x.shape
    split = x.reshape(positions, kv_heads, heads // kv_heads, *rest)
    return split.transpose(0, 1).flatten(1, 2)


def weighted(log_weights: Tensor, values: Tensor) -> State:
    """The weighted mean of values, and the log of the weights' sum; (0, -inf) over nothing."""
    lse = log_weights.logsumexp(-1)
    base = torch.where(lse == -math.inf, 0.0, lse)
    return (log_weights - base[..., None]).exp() @ values, lse


def budget_rows(share: float, num_far: int) -> int:
    """Rows of a budget, at least one."""
    return min(num_far, max(1, round(share * num_far)))


def ranks(x: Tensor) -> Tensor:
    """Places [..., n] of numbers in descending order, from 0."""
    order = x.argsort(dim=-1, descending=True)
    places = torch.arange(x.shape[-1]).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def top_k(scores: Tensor, ranked: Tensor, rows: int) -> Tensor:
    """The keys of the highest scores. ranked: ranks(scores)."""
    return scores.masked_fill(ranked >= rows, -math.inf)


def page_ranks(queries: Tensor, keys: Tensor, page: int) -> Tensor:
    """Quest: every key has the rank of its page, by the highest score its page could hold.

    A page knows the least and greatest element of its keys in every dimension.
    """
    n = keys.shape[1]
    whole = torch.nn.functional.pad(keys, (0, 0, 0, -n % page), value=math.nan)
    pages = whole.view(len(keys), -1, page, keys.shape[2])
    low = pages.nan_to_num(nan=math.inf).amin(2)
    high = pages.nan_to_num(nan=-math.inf).amax(2)
    bounds = queries.clamp(min=0) @ high.transpose(1, 2) + queries.clamp(max=0) @ low.transpose(
        1, 2
    )
    return ranks(bounds).repeat_interleave(page, dim=-1)[..., :n]


def quest(scores: Tensor, paged: Tensor, rows: int, page: int) -> Tensor:
    """The keys of as many pages as the budget holds, at least one. paged: page_ranks(...)."""
    return scores.masked_fill(paged >= max(1, -(-rows // page)), -math.inf)


def oracle_draws(scores: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """Keys [kv_heads, queries, draws], drawn with replacement by their softmax weights."""
    chances = scores.softmax(-1).flatten(0, 1)
    drawn = torch.multinomial(chances, draws, replacement=True, generator=generator)
    return drawn.view(*scores.shape[:2], draws)


def oracle(scores: Tensor, drawn: Tensor) -> Tensor:
    """The plain mean over the draws; the far context's share of the whole is known exactly."""
    counts = torch.zeros_like(scores).scatter_add_(-1, drawn, torch.ones(drawn.shape))
    return counts.log() + (scores.logsumexp(-1, keepdim=True) - math.log(drawn.shape[-1]))


def priorities(scores: Tensor, generator: torch.Generator) -> Tensor:
    """Logs of w / U, with U uniform and drawn once per query and key."""
    uniform = torch.rand(scores.shape, generator=generator).clamp(min=1e-12)
    return scores - uniform.log()


def priority(scores: Tensor, logs: Tensor, ranked: Tensor, rows: int) -> Tensor:
    """The keys of the highest priorities, each with weight max(w, the first priority left out).

    logs: priorities(...); ranked: their ranks.
    """
    if rows >= scores.shape[-1]:
        return scores
    threshold = logs.masked_fill(ranked != rows, -math.inf).amax(-1, keepdim=True)
    return torch.maximum(scores, threshold).masked_fill(ranked >= rows, -math.inf)


@lru_cache(maxsize=16)
def _log_u_by_angle(bits_per_table: int, num_tables: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.linspace(0, math.pi * (1 - 1e-6), 16384)
    lsh = LSHConfig(bits_per_table, num_tables)
    log_u = reference.log_inclusion_probability(torch.from_numpy(np.cos(angles)), lsh)
    return angles, log_u.numpy()


def log_inclusion(cosine: Tensor, lsh: LSHConfig) -> Tensor:
    """log u of the reference for many keys, float32, from a table over the angle."""
    angles, log_u = _log_u_by_angle(lsh.bits_per_table, lsh.num_tables)
    at = np.interp(torch.acos(cosine.clamp(-1, 1)).numpy(), angles, log_u)
    return torch.from_numpy(at).float()


def cosines(queries: Tensor, keys: Tensor) -> Tensor:
    """Cosines [kv_heads, queries, keys]; 0 where a vector has no direction."""
    normal = torch.nn.functional.normalize
    return normal(queries, dim=-1) @ normal(keys, dim=-1).transpose(1, 2)


def centred(keys: Tensor) -> Tensor:
    """Keys [kv_heads, n, dim] less each head's mean."""
    return keys - keys.double().mean(1, keepdim=True).float()


def collisions(queries: Tensor, keys: Tensor, lsh: LSHConfig) -> Tensor:
    """Tables [kv_heads, queries, n] in which key and query share a bucket, both hashed as given."""
    native = native_lsh(lsh, keys.shape[-1])
    counts = torch.empty(*queries.shape[:2], keys.shape[1], dtype=torch.int16)
    for head, (head_queries, head_keys) in enumerate(zip(queries, keys, strict=True)):
        of_keys = native.codes(head_keys.contiguous()).T.to(torch.int16).contiguous()  # [L, n]
        of_queries = native.codes(head_queries.contiguous()).to(torch.int16)  # [queries, L]
        for i, codes in enumerate(of_queries):
            counts[head, i] = (of_keys == codes[:, None]).sum(0, dtype=torch.int16)
    return counts


def lsh_weights(scores: Tensor, queries: Tensor, keys: Tensor, lsh: LSHConfig) -> Tensor:
    """Keys that share enough buckets with the query, each weighted by one over its probability.

    keys: as they are hashed: centred, or raw to see what centring is good for.
    """
    drawn = collisions(queries, keys, lsh) >= lsh.min_collisions
    log_weights = torch.full_like(scores, -math.inf)
    log_u = log_inclusion(cosines(queries, keys)[drawn], lsh)
    log_weights[drawn] = scores[drawn] - log_u
    return log_weights
