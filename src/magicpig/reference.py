"""The algorithm in plain torch: slow, short, and the truth that every fast path is compared with.

One query head over one segment of keys at a time. The fast path shares only `projection` and
`rotation_signs`.
Symbols of the paper stand at the border: K = bits_per_table, L = num_tables.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from magicpig.config import LSHConfig, ScanConfig

MIN_NORM = 1e-12
AT_MEAN = 1e-4  # nearer to the mean than this share of its norm, a key has no direction


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


def sorted_into_tables(
    signs: Tensor, num_tables: int, bits_per_table: int
) -> tuple[Tensor, Tensor]:
    """Keys by their buckets, from signs of projections, sixteen to an int16 [kv_heads, words, n]:
    where buckets begin [kv_heads, L, 2**K + 1], and one bucket's keys after the other's, in their
    order, [kv_heads, L, n]."""
    words = torch.nn.functional.pad(signs.int() & 0xFFFF, (0, 0, 0, 1)).long()
    tables = []
    for table in range(num_tables):
        word, shift = divmod(table * bits_per_table, 16)
        both = words[:, word] | words[:, word + 1] << 16
        tables.append(both >> shift & 2**bits_per_table - 1)
    in_order, ids = torch.stack(tables, 1).sort(dim=2, stable=True)
    buckets = torch.arange(2**bits_per_table + 1, device=signs.device)
    borders = buckets.expand(*in_order.shape[:2], -1).contiguous()
    return torch.searchsorted(in_order, borders), ids


def centre(keys: Tensor) -> Tensor:
    """Keys [n, head_dim] less their mean; zeros for keys at the mean.

    At the mean is what lies closer to it than 1e-4 of its norm: what is left of such a key is
    rounding, and has no angle to a query.
    """
    mean = keys.double().mean(0)
    centred = (keys.double() - mean).float()
    border = (AT_MEAN * mean.norm()).clamp(min=MIN_NORM)
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


LEVEL_WIDTHS = {1: 1.0, 2: 0.9957, 4: 0.3352}  # Max 1960: best for a Gaussian of variance 1
TEMPERS = {1: 0.7, 2: 0.85, 4: 1.0}  # codes are noisy: proposals are flatter than they say
OPTIMISM = {1: 2.5, 2: 1.5, 4: 1.2}  # and real errors larger, by about this factor
ORDINARY = 0.1  # in mean squared distances of a value from the mean value
LEAST_PROBABILITY = 2.0**-16


def padded(head_dim: int) -> int:
    return -(-head_dim // 16) * 16


def rotation_signs(scan: ScanConfig, head_dim: int) -> Tensor:
    """1 or -1 [rounds, dim] of the rotation's rounds: two, or four where the dimension, padded to
    a multiple of 16, is no power of two."""
    dim = padded(head_dim)
    rounds = 2 if dim & (dim - 1) == 0 else 4
    signs = np.random.RandomState(scan.seed).randint(0, 2, (rounds, dim)) * 2 - 1
    return torch.from_numpy(signs.astype(np.float32))


def rotation(scan: ScanConfig, head_dim: int) -> Tensor:
    """An orthogonal matrix [dim, dim], float64.

    Each round flips signs and takes the Hadamard transform of as many dimensions as a power of two
    holds: of the first ones and of the last ones by turns.
    """
    dim = padded(head_dim)
    span = 1 << (dim.bit_length() - 1)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < span:
        top, bottom = torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)
        hadamard = torch.cat([top, bottom])
    matrix = torch.eye(dim, dtype=torch.float64)
    for i, signs in enumerate(rotation_signs(scan, head_dim).double()):
        first = dim - span if i % 2 else 0
        turn = torch.eye(dim, dtype=torch.float64)
        turn[first : first + span, first : first + span] = hadamard / math.sqrt(span)
        matrix = turn @ (signs[:, None] * matrix)
    return matrix


def rotate(x: Tensor, scan: ScanConfig) -> Tensor:
    """Vectors [n, head_dim], padded by zeros and rotated: [n, dim]."""
    matrix = rotation(scan, x.shape[-1])
    return x.double() @ matrix[:, : x.shape[-1]].T


def key_codes(keys: Tensor, scan: ScanConfig) -> tuple[Tensor, Tensor]:
    """Odd levels [n, dim] that stand for centred, rotated keys, and factors [n] that make products
    with them unbiased: factor * q.x is q.c on average over rotations. 0 for keys at the mean."""
    rotated = rotate(centre(keys), scan)
    energy = rotated.square().sum(-1, keepdim=True)
    width = LEVEL_WIDTHS[scan.bits_per_dim] * (energy / rotated.shape[-1]).sqrt()
    half = 2 ** (scan.bits_per_dim - 1)
    steps = torch.where(width > 0, rotated / width, 0.0).floor().clamp(-half, half - 1)
    levels = 2 * steps + 1
    product = (levels * rotated).sum(-1)
    return levels, torch.where(product > 0, energy[:, 0] / product, 0.0)


def value_biases(values: Tensor) -> Tensor:
    """Logs [n] of how far values lie from their mean, about: what a key has to say that others do
    not say."""
    mean = values.double().mean(0)
    distance = (values.double() - mean).square().sum(-1)
    squared = distance + ORDINARY * (distance.mean() + mean.square().sum())
    return torch.where(squared > 0, 0.5 * squared.log(), 0.0)


def proposals(
    query: Tensor, keys: Tensor, values: Tensor, scan: ScanConfig, scale: float
) -> Tensor:
    """Logs [n] of the weights by which keys are drawn: scores as the codes tell them, tempered, and
    the values' biases. The query has 8 bits per dimension."""
    levels, factors = key_codes(keys, scan)
    rotated = rotate(query[None], scan)[0]
    width = rotated.abs().max() / 127
    rounded = (rotated / width).round() * width if width > 0 else rotated
    estimates = factors * (levels @ rounded) + keys.double().mean(0) @ query.double()
    return TEMPERS[scan.bits_per_dim] * scale * estimates + value_biases(values)


def log_threshold(logs: Tensor, rows: float) -> float:
    """log t with sum_i min(1, exp(logs_i) / t) = rows; -inf where that takes all."""
    if rows >= len(logs):
        return -math.inf
    ordered = logs.double().sort(descending=True).values
    rest = ordered.flip(0).logcumsumexp(0).flip(0)  # of all that are not heavier
    for heavy in range(math.ceil(rows)):
        threshold = float(rest[heavy]) - math.log(rows - heavy)
        if ordered[heavy] <= threshold:
            return threshold
    return float(ordered[math.ceil(rows)])


def linear_power(x: Tensor) -> Tensor:
    """2**x, linear between whole numbers."""
    whole = x.double().floor()
    return 2**whole * (1 + x.double() - whole)


def inclusion_probability(logs: Tensor, threshold: float) -> Tensor:
    """Of keys [n]: each is drawn by itself with this probability, about exp(logs) / threshold.

    Interpolated powers are larger than true ones, by 0.5 / log(2)**2 on average: that is taken off.
    """
    excess = math.log(0.5 / math.log(2) ** 2)
    ratio = linear_power((logs.double() - threshold - excess).clamp(max=0) / math.log(2))
    return ratio.clamp(min=LEAST_PROBABILITY)


def predicted_error(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scan: ScanConfig,
    scale: float,
    threshold: float,
    near: tuple[Tensor, Tensor] | None = None,
) -> float:
    """What the codes say about the error of the output, relative to its norm.

    The error's variance is sum_i (1 / p_i - 1) (w_i |v_i - o|)^2 / W^2. Codes give weights w_i and
    their sum W; distances from the mean value stand for those from the output o. Of o itself the
    near part is known; the far part is the mean value, and deviations that add up like random ones.
    near: output [dim] and log-sum-exp of attention to other tokens, which is exact.
    """
    logs, biases = proposals(query, keys, values, scan, scale), value_biases(values)
    estimates = (logs - biases) / TEMPERS[scan.bits_per_dim]
    peak = estimates.max() if near is None else torch.maximum(estimates.max(), near[1].double())
    weights = (estimates - peak).exp()
    changes = weights * biases.exp()
    out = weights.sum() * values.double().mean(0)
    if near is not None:
        out += (near[1].double() - peak).exp() * near[0].double()
    chance = (logs - threshold).exp().clamp(max=1)
    variance = ((1 / chance - 1) * changes.square()).sum()
    whole = out.square().sum() + changes.square().sum()
    return OPTIMISM[scan.bits_per_dim] * math.sqrt(variance / whole) if whole > 0 else 0.0


def scan_threshold(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scan: ScanConfig,
    scale: float,
    near: tuple[Tensor, Tensor] | None = None,
) -> float:
    """Of the budget; with a target, the highest that meets it, within the budget and min_rows."""
    logs = proposals(query, keys, values, scan, scale)
    low = log_threshold(logs, max(scan.budget * len(keys), scan.min_rows))
    if scan.target_error is None:
        return low
    high = log_threshold(logs, max(scan.min_rows, 1))

    def meets(threshold: float) -> bool:
        error = predicted_error(query, keys, values, scan, scale, threshold, near)
        return error <= float(scan.target_error or 0)

    if meets(high):
        return high
    bottom = float(logs.min()) if low == -math.inf else low  # where all are drawn
    if not meets(bottom):
        return low
    for _ in range(60):
        middle = (bottom + high) / 2
        bottom, high = (middle, high) if meets(middle) else (bottom, middle)
    return bottom


def scanned_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scan: ScanConfig,
    scale: float,
    uniform: Tensor,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The estimate: keys drawn where their uniform numbers [n] say so, each weighted by one over
    its probability."""
    logs = proposals(query, keys, values, scan, scale)
    chance = inclusion_probability(logs, scan_threshold(query, keys, values, scan, scale))
    drawn = (uniform <= chance).nonzero()[:, 0]
    exact = scores(query, keys[drawn], scale, softcap)
    return attend(exact - chance[drawn].log(), values[drawn])
