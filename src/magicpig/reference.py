"""The algorithm in plain torch: slow, short, and the truth that every fast path is compared with.

One query head over one segment of keys at a time. The fast path shares only `projection`.
Symbols of the paper stand at the border: K = bits_per_table, L = num_tables.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from magicpig.config import LSHConfig

MIN_NORM = 1e-12


def projection(lsh: LSHConfig, head_dim: int) -> Tensor:
    """The Gaussian directions [head_dim, L * K] of all heads and layers, in values bfloat16 holds.

    numpy's RandomState stream is frozen: a seed gives the same directions everywhere, for ever.
    """
    normal = np.random.RandomState(lsh.seed).standard_normal(
        (head_dim, lsh.num_tables * lsh.bits_per_table)
    )
    return torch.from_numpy(normal).bfloat16().float()


def project(x: Tensor, lsh: LSHConfig) -> Tensor:
    """Projections [n, L, K] of vectors [n, head_dim] rounded to bfloat16. Signs are the hash.

    Vectors shorter than 1e-12 count as zero: their products may be lost to underflow.
    """
    x = torch.where(x.norm(dim=-1, keepdim=True) >= MIN_NORM, x, 0.0)
    directions = projection(lsh, x.shape[-1]).double()
    return (x.bfloat16().double() @ directions).view(len(x), lsh.num_tables, lsh.bits_per_table)


def codes(x: Tensor, lsh: LSHConfig) -> Tensor:
    """Bucket [n, L] of each vector in each table: bit j is set where projection j is >= 0."""
    bits = (project(x, lsh) >= 0).long()
    return (bits << torch.arange(lsh.bits_per_table)).sum(-1)


def centre(keys: Tensor) -> Tensor:
    """Keys [n, head_dim] less their mean; zeros for keys at the mean.

    At the mean is what lies closer to it than 1e-4 of its norm: what is left of such a key is
    rounding, and has no angle to a query.
    """
    mean = keys.double().mean(0)
    centred = (keys.double() - mean).float()
    border = (1e-4 * mean.norm()).clamp(min=MIN_NORM)
    return torch.where(centred.double().norm(dim=-1, keepdim=True) > border, centred, 0.0)


def at_mean(centred: Tensor) -> Tensor:
    """Which [n] of the centred keys are at the mean. They are always drawn."""
    return (centred == 0).all(-1)


def cosine(query: Tensor, centred: Tensor) -> Tensor:
    """Cosine [n] between a query and centred keys; 0 where either has no direction."""
    query_norm, norms = query.double().norm(), centred.double().norm(dim=-1)
    product = centred.double() @ query.double()
    directed = (query_norm >= MIN_NORM) & (norms > 0)
    return torch.where(directed, product / (query_norm * norms), 0.0).clamp(-1, 1)


def log_inclusion_probability(cos: Tensor, lsh: LSHConfig) -> Tensor:
    """log u: u = P(query and key share a bucket in at least min_collisions of the L tables)."""
    agree = 1 - torch.acos(cos.double()) / math.pi  # P(one sign bit agrees)
    log_b = lsh.bits_per_table * agree.log()  # P(one table agrees)
    log_miss = torch.log1p(-log_b.exp())
    terms = []
    for j in range(lsh.min_collisions, lsh.num_tables + 1):
        ways = (
            math.lgamma(lsh.num_tables + 1)
            - math.lgamma(j + 1)
            - math.lgamma(lsh.num_tables - j + 1)
        )
        misses = (lsh.num_tables - j) * log_miss if j < lsh.num_tables else 0.0
        terms.append(ways + j * log_b + misses)
    return torch.logsumexp(torch.stack(terms), 0).clamp(max=0.0)


def collisions(query_codes: Tensor, key_codes: Tensor) -> Tensor:
    """Tables [n] in which each key [n, L] shares the query's bucket [L]."""
    return (query_codes == key_codes).sum(-1)


def drawn(query: Tensor, keys: Tensor, lsh: LSHConfig) -> tuple[Tensor, Tensor]:
    """Indices of the keys that the query draws, and the logs of their probabilities to be drawn."""
    centred = centre(keys)
    always = at_mean(centred)
    shared = collisions(codes(query[None], lsh)[0], codes(centred, lsh))
    rows = ((shared >= lsh.min_collisions) | always).nonzero()[:, 0]
    log_u = log_inclusion_probability(cosine(query, centred[rows]), lsh)
    return rows, torch.where(always[rows], 0.0, log_u)


def attend(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax-weighted mean of values and log of the denominator; (0, -inf) over nothing."""
    lse = torch.logsumexp(logits.double(), 0)
    weights = (logits.double() - lse).exp() if len(logits) else logits.double()
    return weights @ values.double(), lse


def scores(query: Tensor, keys: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """Scores [n] of keys [n, head_dim]; some models bend them towards +-softcap."""
    raw = keys.double() @ query.double() * scale
    return raw if softcap is None else softcap * torch.tanh(raw / softcap)


def exact_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of one query [head_dim] over all keys and values [n, head_dim]."""
    return attend(scores(query, keys, scale, softcap), values)


def sampled_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lsh: LSHConfig,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The estimate: the drawn keys only, each weighted by one over its inclusion probability."""
    rows, log_u = drawn(query, keys, lsh)
    return attend(scores(query, keys[rows], scale, softcap) - log_u, values[rows])


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each."""
    lse = torch.logaddexp(lse_a, lse_b)
    if lse == -math.inf:
        return torch.zeros_like(out_a), lse
    return out_a * (lse_a - lse).exp() + out_b * (lse_b - lse).exp(), lse
