"""Compiles the kernels in Triton for a GPU that need not be there.

    python tests/compile_kernels.py 89      compute capability 8.9

Prints a line of JSON for each that comes of it: its name, and the shared memory that it takes.
"""

import json
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from magicpig import LSHConfig, ScanConfig, reference
from magicpig.attention import exchange_on_gpu, scan_on_gpu, whole_on_gpu, window_on_gpu
from magicpig.attention.mass_on_gpu import causal_mass
from magicpig.kv.hash_on_gpu import hash_keys
from magicpig.kv.tables_on_gpu import sort
from magicpig.nn import on_gpu
from magicpig.nn.twins import ACTIVATIONS

HALF, SINGLE = torch.bfloat16, torch.float32
# Heads, KV heads, head_dim, of queries and keys.
SHAPES = [(32, 8, 128, HALF), (9, 3, 64, HALF), (8, 4, 256, HALF), (2, 2, 80, SINGLE)]
LARGEST = 8, 4, 256, SINGLE
ADDRESSES = torch.zeros(4, dtype=torch.int64)


class Target:
    """As much of a driver as compiling needs."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_instead_of_running():
    run, seen = JITFunction.run, set()

    def compiled(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            name = f"{self.fn.__module__}.{self.fn.__name__}"
            print(json.dumps({"name": name, "shared": kernel.metadata.shared}))

    JITFunction.run = compiled
    torch.Tensor.is_cuda = True  # what only a GPU can do is asked for by it


def steps(num_heads, kv_heads, dim, dtype):
    queries = torch.zeros(2, num_heads, dim, dtype=dtype)
    new = torch.zeros(2, kv_heads, dim, dtype=dtype)
    near = torch.zeros(2, num_heads, dim), torch.zeros(2, num_heads)
    window_on_gpu.step(queries, new, new, ADDRESSES, 0.1, None, None, near)
    window_on_gpu.step(queries, new, new, ADDRESSES, 0.1, 30.0, 64, near)
    contexts = ADDRESSES[:3].view(1, 3)
    for softcap in (None, 30.0):
        whole_on_gpu.attend(queries, contexts, kv_heads, dtype, 0.1, softcap)
    exchange_on_gpu.ask(queries, queries.clone())
    exchange_on_gpu.answer(queries, near, near, ADDRESSES)
    exchange_on_gpu.answer(queries, near, None)


def prompts(num_heads, kv_heads, dim, dtype):
    q, k = (torch.zeros(1, n, 300, dim, dtype=dtype) for n in (num_heads, kv_heads))
    causal_mass(q, k, 0.1, None)
    on_gpu.rotary(q, k, *torch.zeros(2, 1, 300, dim, dtype=dtype))


def hashing(dim, dtype):
    directions = reference.projection(LSHConfig(10, 150), dim).bfloat16()
    directions, signs = exchange_on_gpu.padded(directions), torch.zeros(94, 32, dtype=torch.int16)
    exchange_on_gpu.hash_signs(torch.zeros(32, dim, dtype=dtype), directions, 1500, signs)
    for count in (5000, 4096):
        hash_keys(torch.zeros(2, count, dim, dtype=dtype), directions, 1500)


def drawing(num_heads, kv_heads, dim, dtype, bits):
    rotation = reference.rotation(ScanConfig(bits), dim)[:, :dim].float()
    sizes = 1, 4, 4, 8
    table = scan_on_gpu.Table(torch.zeros(scan_on_gpu.Table.words(*sizes)).long(), *sizes)
    drawn = scan_on_gpu.Drawing(1, num_heads, kv_heads, rotation.contiguous(), bits, 0, 99, 8, 4096)
    drawn.draw(torch.zeros(1, num_heads, dim, dtype=dtype), table, 0.1)


def main(capability):
    driver.set_active(Target(capability))
    compile_instead_of_running()
    for *heads, dtype in (*SHAPES, LARGEST):
        steps(*heads, dtype)
        hashing(heads[-1], dtype)
        prompts(*heads, dtype)
    for bits in (1, 2, 4):
        drawing(*SHAPES[0], bits)
    x = torch.zeros(3, 4096, dtype=HALF)
    on_gpu.rms_norm(x, x[0], 1e-5, False)
    for name in ACTIVATIONS:
        on_gpu.gate(x, name)
    for bits, tokens in ((10, 1000), (10, 4096), (5, 1000)):
        sort(torch.zeros(2, 64, tokens, dtype=torch.int16), 20, bits)
    exchange_on_gpu.write_stamp(ADDRESSES)
    for stamps in (None, ADDRESSES):
        exchange_on_gpu.send(ADDRESSES, ADDRESSES, stamps)
        exchange_on_gpu.await_answer(ADDRESSES, ADDRESSES, stamps)


if __name__ == "__main__":
    main(int(sys.argv[1]))
