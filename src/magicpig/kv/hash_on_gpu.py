"""Keys of a segment hashed on a GPU: all heads at once, and each key read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from magicpig import reference
from magicpig.attention.exchange_on_gpu import write_signs
from magicpig.attention.kernel_sizes import wide

AT_ONCE = 64  # keys, and columns of the projection, at most
NUMBERS = 8192  # of keys, or of columns: GPUs before Ampere have room for no more
MOST = tl.constexpr(1 / reference.MIN_NORM)  # which a norm's inverse exceeds by rounding alone
STAGES = 2  # of directions, in a processor's memory, where it can fetch the next ones meanwhile


@triton.jit(do_not_specialize=["tokens"])  # prompts of any length find it compiled
def _hash(
    keys, head_stride, token_stride, means, least, directions, inv_norms, signs,
    tokens, columns, stride,
    DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of some keys of one head. least: norms that are no larger have no direction."""
    head = tl.program_id(1).to(tl.int64)
    rows, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    there = (rows < tokens)[:, None] & (dims < DIM)[None, :]
    at = head * head_stride + rows.to(tl.int64)[:, None] * token_stride + dims[None, :]
    mean = tl.load(means + head * DIM + dims, mask=dims < DIM, other=0.0)
    key = tl.load(keys + at, mask=there, other=0.0).to(tl.float32)
    centred = tl.where(there, key - mean[None, :], 0.0)
    norms = tl.sqrt(tl.sum(centred * centred, 1))
    has_direction = norms > tl.load(least + head)
    centred = tl.where(has_direction[:, None], centred, 0.0).to(tl.bfloat16)
    inverse = tl.where(has_direction, tl.minimum(1.0 / norms, MOST), 0.0)
    tl.store(inv_norms + head * tokens + rows, inverse, mask=rows < tokens)
    signs += head * tl.cdiv(columns, 16) * tokens
    for first in range(0, columns, COLUMNS):
        write_signs(
            centred, rows, first, directions, signs, tokens, columns, stride,
            DIM, WIDE, ROWS, COLUMNS,
        )  # fmt: skip


def hash_keys(keys: Tensor, directions: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """As device_index.hash_keys. directions: as exchange_on_gpu.hash_signs has them."""
    heads, tokens, dim = keys.shape
    device, at_once = keys.device, max(16, min(AT_ONCE, NUMBERS // wide(dim)))
    if keys.stride(2) != 1:
        keys = keys.contiguous()
    means = keys.mean(1, dtype=torch.float32)
    least = (reference.AT_MEAN * means.norm(dim=1)).clamp(min=reference.MIN_NORM)
    inv_norms = torch.empty(heads, tokens, device=device)
    signs = torch.empty(heads, -(-columns // 16), tokens, dtype=torch.int16, device=device)
    _hash[(triton.cdiv(tokens, at_once), heads)](
        keys,
        keys.stride(0),
        keys.stride(1),
        means,
        least,
        directions,
        inv_norms,
        signs,
        tokens,
        columns,
        directions.shape[1],
        DIM=dim,
        WIDE=wide(dim),
        ROWS=at_once,
        COLUMNS=at_once,
        num_stages=STAGES,
    )
    return means, inv_norms, signs
