"""Sequences on disk: rows, index and windows, written once and mapped back.

A file is a line that names the format, a header (JSON, with its own checksum), and blocks of bytes,
each at a multiple of 4096 with its checksum in the header. It is written under another name and
renamed when it is complete and on the disk: whoever opens it sees all of it or nothing.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from magicpig.config import IndexConfig, LSHConfig, ScanConfig, WindowConfig
from magicpig.files import check_file, partial_of, sweep
from magicpig.kv.base import LayerShape
from magicpig.kv.layer import DTYPES
from magicpig.kv.native_layer import NativeLayer
from magicpig.kv.sequence import SequenceKV
from magicpig.native import num_threads

MAGIC = b"magicpig context\n"
VERSION = 2
PAGE = 4096
LENGTHS = len(MAGIC) + 4 + 8 + 32  # format, version, length of the header, its SHA-256

Bytes = npt.NDArray[np.uint8]


class StoreError(RuntimeError):
    """A file that cannot be used: what is wrong with it."""


def save(path: Path, sequence: SequenceKV, about: dict[str, Any]) -> None:
    """Writes a sequence, and what else is to be known of it, to a file. All or nothing."""
    layers, blocks = _described(sequence)
    with ThreadPoolExecutor(num_threads()) as pool:
        checksums = list(pool.map(zlib.crc32, blocks))
    header = {
        "about": about,
        "num_tokens": sequence.num_tokens,
        "long_rope": sequence.long_rope,
        "layers": layers,
        "blocks": [
            {"bytes": len(block), "crc32": checksum}
            for block, checksum in zip(blocks, checksums, strict=True)
        ],
    }
    text = json.dumps(header).encode()
    needed = LENGTHS + len(text) + sum(_padded(len(block)) for block in blocks) + PAGE
    with _replacing(path, needed) as file:
        file.write(MAGIC + VERSION.to_bytes(4, "little") + len(text).to_bytes(8, "little"))
        file.write(hashlib.sha256(text).digest() + text)
        for block in blocks:
            file.write(bytes(-file.tell() % PAGE))
            file.write(block.data)


def _padded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _described(sequence: SequenceKV) -> tuple[list[dict[str, Any]], list[Bytes]]:
    """Descriptions of the layers, and the blocks they name, in order."""
    layers, blocks = [], []
    for i, layer in enumerate(sequence.layers):
        if not isinstance(layer, NativeLayer):
            raise StoreError(f"layer {i} is a {type(layer).__name__}, whose state cannot be saved")
        layer.settle(wait=True)
        far = layer.far
        segments = [far._native.segment_memory(j) for j in range(len(far.segment_sizes))]
        for rows, tables in segments:
            blocks += [rows, tables]
        window = layer.read_window()
        blocks += [tensor.contiguous().view(torch.uint8).numpy().reshape(-1) for tensor in window]
        layers.append(
            {
                "num_heads": far.num_heads,
                "num_kv_heads": far.num_kv_heads,
                "head_dim": far.head_dim,
                "dtype": DTYPES[far.dtype],
                "index": None if far.index is None else asdict(far.index),
                "window": asdict(layer.config),
                "span": layer.span,
                "segments": far.segment_sizes,
                "window_tokens": window[0].shape[1],
            }
        )
    return layers, blocks


@contextmanager
def _replacing(path: Path, needed_bytes: int) -> Iterator[BinaryIO]:
    """A file to write to, which takes the path's place when all went well."""
    path = path.resolve()  # a link stays one
    folder = path.parent
    try:
        check_file(path, "the context")
    except (OSError, ValueError) as error:
        raise StoreError(str(error)) from None
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StoreError(
            f"{str(path)!r} takes {needed_bytes / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free "
            f"in {str(folder)!r}"
        )
    sweep(path)
    temporary = partial_of(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise StoreError(f"{str(path)!r} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_about(path: Path) -> dict[str, Any]:
    """What `save` was told of the sequence, without reading the rest."""
    about: dict[str, Any] = _header(path, _opened(path))[0]["about"]
    return about


def load(path: Path) -> tuple[SequenceKV, dict[str, Any]]:
    """A sequence from a file, checked and mapped, and what was saved with it."""
    memory = _opened(path)
    header, at = _header(path, memory)
    blocks = []
    for block in header["blocks"]:
        at = _padded(at)
        blocks.append(memory[at : at + block["bytes"]])
        at += block["bytes"]
    if at > len(memory):
        raise StoreError(f"{str(path)!r} is truncated: it has {len(memory)} bytes of {at}")
    if at < len(memory):
        raise StoreError(f"{str(path)!r} is corrupted: it has {len(memory) - at} bytes too many")
    with ThreadPoolExecutor(num_threads()) as pool:
        for block, found in zip(header["blocks"], pool.map(zlib.crc32, blocks), strict=True):
            if found != block["crc32"]:
                raise StoreError(f"{str(path)!r} is corrupted: a checksum does not match")
    remaining = iter(blocks)
    try:
        layers = [_layer(description, remaining) for description in header["layers"]]
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise StoreError(f"{str(path)!r} is not well formed: {error}") from error
    long_rope = bool(header.get("long_rope"))  # which older files do not say
    return SequenceKV(layers, header["num_tokens"], long_rope), header["about"]


def _opened(path: Path) -> Bytes:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < LENGTHS:
                raise StoreError(f"{str(path)!r} is not a magicpig context, or a truncated one")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StoreError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    return np.frombuffer(mapped, dtype=np.uint8)


def _header(path: Path, memory: Bytes) -> tuple[dict[str, Any], int]:
    """The header and where it ends."""
    fixed = memory[:LENGTHS].tobytes()
    if not fixed.startswith(MAGIC):
        raise StoreError(f"{str(path)!r} is not a magicpig context")
    version = int.from_bytes(fixed[len(MAGIC) : len(MAGIC) + 4], "little")
    if version != VERSION:
        raise StoreError(
            f"{str(path)!r} has format version {version}, this magicpig reads {VERSION}: "
            "save it again"
        )
    length = int.from_bytes(fixed[len(MAGIC) + 4 : len(MAGIC) + 12], "little")
    if LENGTHS + length > len(memory):
        raise StoreError(f"{str(path)!r} is truncated: its header is not complete")
    text = memory[LENGTHS : LENGTHS + length].tobytes()
    if hashlib.sha256(text).digest() != fixed[-32:]:
        raise StoreError(f"{str(path)!r} is corrupted: its header's checksum does not match")
    return json.loads(text), LENGTHS + length


def _index(fields: dict[str, Any] | None) -> IndexConfig | None:
    if fields is None:
        return None
    return LSHConfig(**fields) if "num_tables" in fields else ScanConfig(**fields)


def _layer(description: dict[str, Any], blocks: Iterator[Bytes]) -> NativeLayer:
    dtype = getattr(torch, description["dtype"])
    layer = NativeLayer(
        LayerShape(
            description["num_heads"], description["num_kv_heads"], description["head_dim"], dtype
        ),
        _index(description["index"]),
        WindowConfig(**description["window"]),
        description["span"],
    )
    for num_tokens in description["segments"]:
        layer.far._native.adopt(num_tokens, next(blocks), next(blocks))
    shape = (layer.far.num_kv_heads, description["window_tokens"], layer.far.head_dim)
    keys, values = (
        torch.from_numpy(next(blocks).copy()).view(dtype).reshape(shape) for _ in range(2)
    )
    if shape[1] and not layer.window.append(keys, values):
        raise ValueError("the window holds numbers that are not finite")
    return layer
