"""Memory: what a request may come to need of it, and what there is.

Two kinds are counted apart: the host's, and that of the model's device where it is another one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from magicpig import _native
from magicpig.attention.base import Method
from magicpig.attention.full import Full
from magicpig.attention.kv_stream import KvStream
from magicpig.attention.lsh import Lsh
from magicpig.attention.on_host import HostMethod
from magicpig.attention.plan import Plan
from magicpig.attention.scan import Scan
from magicpig.attention.whole import WholeMethod
from magicpig.config import WindowConfig, draws_on_gpus
from magicpig.kv.base import LayerShape
from magicpig.kv.device_index import bytes_hashing, sizes_ahead
from magicpig.kv.host_prompt import block_of, tokens_of
from magicpig.kv.seats import ROOM
from magicpig.kv.segments import (
    BUILT_AT_ONCE,
    LONGEST,
    MOST_AHEAD,
    early_pieces,
    most_held,
    pieces,
)

SHARE = 0.9  # of the host's memory that is free, for keys, values and indexes
DEVICE_SHARE = 0.96  # of what a device has for them; the rest is between what it gives out
AT_HAND = 3  # layers' worth of a prompt on the device: as it comes, as it is kept, and of the next
FINISHED_AT_ONCE = 3  # layers of a prompt in host memory, made far
FINISHED = 2  # layers' worth of memory that it takes to make one far, on the device
LIBRARIES = 950_000_000  # bytes that CUDA and its libraries take of a GPU, in the end
# Bytes of work space for matrix products, of two halves and of what is recorded of each, and of
# what graphs have for themselves.
RECORDED = 200_000_000


@dataclass(frozen=True)
class Memory:
    """Bytes of the host's memory, and of the device's; on a CPU there is only the former."""

    host: int = 0
    device: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.host + other.host, self.device + other.device)

    def __mul__(self, count: int) -> Memory:
        return Memory(count * self.host, count * self.device)

    def most(self, other: Memory) -> Memory:
        """The larger one of each kind."""
        return Memory(max(self.host, other.host), max(self.device, other.device))

    def fits(self, there: Memory) -> bool:
        return self.host <= there.host and self.device <= there.device


@dataclass(frozen=True)
class Needed:
    """What a request may come to need.

    own: whoever else is there. reading: beside that, while its prompt is read; one is at a time.
    windows: for each sequence of a batch as much as for the longest. beside: likewise, where there
    are two or more. pinned: bytes of `own`, which torch keeps for others when it ends. blocks:
    bytes of `reading`, which are kept likewise, by the size of blocks.
    """

    own: Memory = Memory()
    reading: Memory = Memory()
    windows: Memory = Memory()
    beside: Memory = Memory()
    pinned: int = 0
    blocks: Mapping[int, int] = field(default_factory=dict)


def parse_bytes(name: str, value: int | str) -> int:
    """Bytes, from a number or a text like 24GiB, 48GB, 300MB, 8B."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{name} must be a number of bytes or a text like 24GiB, not {value!r}")
    if isinstance(value, int) and value < 1:
        raise ValueError(f"{name} must be above 0, not {value}")
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(i?)(b?)\s*", str(value).lower())
    nbytes = 0.0
    if match and (match[2] or match[4] or isinstance(value, int)):
        base, power = 1024.0 if match[3] else 1000.0, " kmgt".index(match[2] or " ")
        nbytes = float(match[1]) * base**power
    if not 1 <= nbytes <= 2**63:
        raise ValueError(f"{name} must be a number and a unit, like 24GiB or 48GB, not {value!r}")
    return min(int(nbytes), 2**63 - 1)


@dataclass(frozen=True)
class Needs:
    """What requests need, for a model under a plan.

    part_tokens: of a prompt, read at once.
    """

    config: PreTrainedConfig
    plan: Plan
    window: WindowConfig
    dtype: torch.dtype
    device: torch.device
    part_tokens: int

    def request(self, prompt_tokens: int, new_tokens: int, n: int, known: bool) -> Needed:
        """As in `of`."""
        own = self.of(prompt_tokens, new_tokens, n, known)
        return Needed(
            own,
            self.reading(prompt_tokens, known),
            self.windows(prompt_tokens, new_tokens),
            self.beside(prompt_tokens, new_tokens),
            own.host if self._pins else 0,
            self.blocks(prompt_tokens),
        )

    def of(self, prompt_tokens: int, new_tokens: int, n: int = 1, known: bool = False) -> Memory:
        """Of the far contexts of n completions of a prompt, till they end; they share it, until it
        is merged or grows.

        known: whether it goes on from tokens that were read before, some of which may be near.
        """
        total, moved = Memory(), self._moved(new_tokens, known)
        held: dict[Method, tuple[int, int]] = {}
        for i, layer in enumerate(self._layers):
            if not _is_full(layer):
                continue
            method = self.plan.of(i)
            if method not in held:
                held[method] = self._far(method, prompt_tokens, moved, n)
            rows, index = held[method]
            if not self._elsewhere:
                total += Memory(rows + index)
            elif not method.on_host:
                total += Memory(0, rows + index)
            else:
                total += Memory(rows + index, index if self._codes_there(i) else 0)
        if self._pins:
            total += Memory(0, n * (prompt_tokens + new_tokens) * self._vectors)  # layer by layer
        return total

    def windows(self, prompt_tokens: int, new_tokens: int) -> Memory:
        """Of a sequence's windows. Those of a batch lie side by side, each as long as the longest.

        They grow by steps, here as on devices.
        """
        total, tokens = 0, prompt_tokens + new_tokens
        for layer in self._layers:
            if type(layer) is DynamicSlidingWindowLayer:
                most = layer.sliding_window + self.window.block
            elif _is_full(layer):
                most = self.window.sinks + self.window.local + 2 * self.window.block
            else:
                continue
            total += (3 * min(tokens, most) // 2 + ROOM) * self._vectors
        return self._near(total)

    def beside(self, prompt_tokens: int, new_tokens: int) -> Memory:
        """Of a sequence among others, which most methods in torch want side by side: each takes as
        much as the longest, beside its own far context."""
        total, moved = 0, self._moved(new_tokens, True)
        for i, layer in enumerate(self._layers):
            method = self.plan.of(i)
            where_they_are = self._elsewhere and isinstance(method, WholeMethod)
            if _is_full(layer) and not where_they_are and not self._in_segments(method):
                total += sum(self._far(method, prompt_tokens, moved, 1))
        return self._near(total)

    def _moved(self, new_tokens: int, known: bool) -> int:
        """New tokens that may leave the window. When the last one is chosen none need be moved."""
        return max(0, new_tokens - 2 + (self.window.block - 1 if known else 0))

    def _far(self, method: Method, prompt: int, moved: int, n: int) -> tuple[int, int]:
        """Bytes of rows and of indexes of far contexts in one layer.

        moved: new tokens that may have to leave the window.
        """
        far, shape = max(0, prompt - self.window.sinks - self.window.local), self._shape
        block = self.window.block
        if far < block:  # it stays in the window, till a block has gathered there
            far, moved = 0, far + moved
        if not self._in_segments(method):  # but in tensors, copied when they grow
            copies, far = (n, far + moved) if moved >= 2 * block else (1, far)
            tokens = math.ceil(method.kept_share * far)
            rows = tokens * self._vectors
            if self._pins and isinstance(method, KvStream):
                rows = 2 * _power_of_two(rows // 2)
            return copies * rows, copies * method.index_bytes(shape, tokens)
        index = method.index if isinstance(method, HostMethod) else None
        of_prompt = tuple(early_pieces(far, index) if self._elsewhere else pieces(far))
        segments = Counter(of_prompt)
        for size, count in Counter(most_held(of_prompt, moved // block, block)).items():
            segments[size] += n * count
        of_index = sum(
            count * method.index_bytes(shape, size)
            for size, count in segments.items()
            if index and size >= index.shortest_indexed
        )
        return sum(size * count for size, count in segments.items()) * self._vectors, of_index

    def _in_segments(self, method: Method) -> bool:
        if isinstance(method, Full):
            return not self._elsewhere
        return isinstance(method, HostMethod)

    def reading(self, prompt_tokens: int, known: bool = False) -> Memory:
        """Beside that, while the prompt is read, and then made far: some of its layers are there
        twice; and while a layer that the device keeps grows, of which there is a copy then.

        known: as in `of`; such prompts are made far when all is read, from copies in host memory.
        """
        layers = [i for i, layer in enumerate(self._layers) if _is_full(layer)]
        layer = prompt_tokens * self._vectors
        if not self._elsewhere:
            return Memory(min(1, len(layers)) * layer)
        pinned = [i for i in layers if self.plan.of(i).on_host]
        if not pinned:
            return Memory(0, FINISHED * layer)
        device = AT_HAND * layer  # dense layers are copied when they are made far: no more at once
        device -= sum(  # which come with the first step
            self._far(self.plan.of(i), prompt_tokens, 0, 1)[1]
            for i in pinned
            if self._codes_there(i)
        )
        device = max(device, layer if len(pinned) < len(layers) else 0)
        host = sum(self.blocks(prompt_tokens).values())
        if known:
            host += 2 * min(FINISHED_AT_ONCE, len(pinned)) * layer
        return Memory(host, max(0, device))

    def blocks(self, prompt_tokens: int) -> dict[int, int]:
        """Bytes of pinned memory that a prompt is read to, by the size of its blocks, in which it
        is kept for the next one."""
        found: Counter[int] = Counter()
        layers = [i for i, layer in enumerate(self._layers) if _is_full(layer)]
        pinned = sum(self.plan.of(i).on_host for i in layers) if self._elsewhere else 0
        token = self._vectors // 2  # bytes of a key, or of a value
        block = block_of(prompt_tokens * token)
        found[block] += 2 * pinned * -(-prompt_tokens // tokens_of(block, token)) * block
        if isinstance(self.plan.method, Lsh):
            index = self.plan.method.index
            sizes = [sizes_ahead(index, self._shape, n) for n in sorted(set(pieces(prompt_tokens)))]
            for each in map(_power_of_two, chain(*sizes)):
                found[each] += min(BUILT_AT_ONCE, pinned) * each
            ahead = _power_of_two(sum(sizes[-1])) if sizes else 0  # of the longest, for all
            found[ahead] += MOST_AHEAD * ahead if pinned else 0
        return {size: nbytes for size, nbytes in found.items() if nbytes}

    def workspace(self) -> int:
        """Of the device, for a part of a prompt on its way through a layer, for hashing it, and for
        steps that are recorded."""
        text = self.config.get_text_config(decoder=True)
        intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        widths = 8 * text.hidden_size + 3 * intermediate
        hashing = 0
        if isinstance(self.plan.method, Lsh):
            shape = self._shape
            longest = getattr(text, "max_position_embeddings", None) or LONGEST
            hashing = bytes_hashing(self.plan.method.index, shape, min(LONGEST, longest))
        return int(self.part_tokens * widths * self.dtype.itemsize) + hashing + RECORDED

    @property
    def _pins(self) -> bool:
        """Whether far contexts are in pinned memory."""
        return self._elsewhere and isinstance(self.plan.method, KvStream)

    def _codes_there(self, layer: int) -> bool:
        """Whether codes of far contexts are on the device too."""
        method = self.plan.of(layer)
        return self._elsewhere and isinstance(method, Scan) and draws_on_gpus(method.index)

    @property
    def _layers(self) -> list[Any]:
        return list(DynamicCache(config=self.config).layers)

    @property
    def _elsewhere(self) -> bool:
        return self.device.type != "cpu"

    def _near(self, nbytes: int) -> Memory:
        """Where the model computes."""
        return Memory(0, nbytes) if self._elsewhere else Memory(nbytes)

    @property
    def _shape(self) -> LayerShape:
        heads, dim = heads_of(self.config.get_text_config(decoder=True))
        text = self.config.get_text_config(decoder=True)
        return LayerShape(text.num_attention_heads, heads, dim, self.dtype, self.device)

    @property
    def _vectors(self) -> int:
        """Bytes of a token's keys and values in one layer."""
        shape = self._shape
        return shape.num_kv_heads * 2 * (-(-shape.head_dim // 16) * 16) * self.dtype.itemsize


def heads_of(config: PreTrainedConfig) -> tuple[int, int]:
    """KV heads and their dimension, of a model's layers: the most of any."""
    if getattr(config, "is_heterogeneous", False):
        heads, dims = zip(*map(heads_of, config.per_layer_config), strict=True)
        return max(heads), max(dims)
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, dim


def there_is(
    needs: Needs, weights: int, host: int | str | None, device: int | str | None
) -> Memory:
    """What requests may use together.

    weights: bytes of the model on the device. host, device: limits; None: most of what is free,
    and no more than that. ValueError when a device's limit, or what it has, leaves nothing.
    """
    free_host = int(_native.available_memory())
    asked = int(free_host * SHARE) if host is None else parse_bytes("cpu_memory", host)
    for_host = min(asked, free_host)
    if needs.device.type != "cuda":
        if device is not None:
            raise ValueError("gpu_memory limits a GPU; the model is on the CPU: leave it out")
        return Memory(for_host)
    limit = 2**63 - 1 if device is None else parse_bytes("gpu_memory", device)
    _usable(needs, weights, limit, "gpu_memory is")
    torch.cuda.set_per_process_memory_fraction(1.0, needs.device)  # another may have set it
    free, total = torch.cuda.mem_get_info(needs.device)
    others = max(0, torch.cuda.memory_allocated(needs.device) - weights)  # of this process
    # Of what free lacks, CUDA has taken some; what it will take in the end is counted below.
    most = min(free + torch.cuda.memory_reserved(needs.device) + LIBRARIES, total) - others
    if limit < most:
        share = min(1.0, (limit - LIBRARIES) / total)
        torch.cuda.set_per_process_memory_fraction(share, needs.device)
    return Memory(for_host, _usable(needs, weights, min(limit, most), "the GPU has"))


def _usable(needs: Needs, weights: int, limit: int, words: str) -> int:
    left = usable(needs, weights, limit)
    if not left:
        parts = weights, needs.workspace(), LIBRARIES
        raise ValueError(
            f"{words} {size(limit)}, and {size(sum(parts))} are needed before the first "
            f"sequence: {size(parts[0])} for weights, {size(parts[1])} for work space, "
            f"{size(parts[2])} for CUDA"
        )
    return left


def usable(needs: Needs, weights: int, limit: int) -> int:
    """Bytes that a device's limit leaves to requests."""
    return max(0, int((limit - LIBRARIES - weights - needs.workspace()) * DEVICE_SHARE))


def largest_batch(needs: Needs, there: Memory, prompt_tokens: int, new_tokens: int) -> int:
    """Sequences with prompts of their own that fit at the same time; 0: not even one."""
    one = needs.of(prompt_tokens, new_tokens) + needs.windows(prompt_tokens, new_tokens)
    reading = needs.reading(prompt_tokens)
    each = one + needs.beside(prompt_tokens, new_tokens)
    left = there.host - reading.host, there.device - reading.device
    kinds = [kind for kind in zip(left, (each.host, each.device), strict=True) if kind[1]]
    several = min((max(0, have) // most for have, most in kinds), default=0)
    return max(several, int((one + reading).fits(there)) if kinds else 0)


def _is_full(layer: object) -> bool:
    return type(layer) is DynamicLayer


def _power_of_two(nbytes: int) -> int:
    """What torch takes for so many bytes of pinned memory."""
    return 1 << max(0, nbytes - 1).bit_length() if nbytes else 0


def size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"
