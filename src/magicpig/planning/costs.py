"""The cost of a decode step: bytes and operations over what the machine gives of both.

The model behind `magicpig plan`; docs/performance.md writes it out and says how far off it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from magicpig.config import LSHConfig, ScanConfig, WindowConfig
from magicpig.planning.batch_memory import BatchMemory
from magicpig.planning.geometry import ModelGeometry
from magicpig.planning.machines import Cpu, Gpu

GPU_STREAMED = 0.75  # of a GPU's bandwidth, by kernels that read weights or keys
GPU_COMPUTED = 0.6  # of its operations, by large matrix products
CPU_STREAMED = 0.85  # of streamed reads, by exact attention (docs/log.md: 85 to 90 %)
CPU_LINEAR = 0.75  # of streamed reads, by linear layers
GPU_LAYER_SECONDS = 40e-6  # small kernels of a layer, where all is the GPU's
LAYER_SECONDS = 20e-6  # small kernels and the exchange of a layer of the CPU's attention
CALL_SECONDS = 45e-6  # of the CPU's threads, to begin and end a layer's attention
DRAW_SECONDS = 20e-6  # of a GPU, for a layer whose rows it draws, beside its codes
KEY_SECONDS = 120e-12  # of a GPU, for a coded key of a KV head: more than its memory takes
ROW_ALONE = 1.7  # a row takes longer where it is not asked for while others are drawn
CPU_LAYER_SECONDS = 200e-6  # Python and small operations of a layer, where there is no GPU
WINDOW, SCAN = WindowConfig(), ScanConfig()
ALWAYS_NEAR = WINDOW.sinks + WINDOW.local  # tokens of a sequence
WINDOW_TOKENS = ALWAYS_NEAR + 2 * WINDOW.block
DENSE_LAYERS = 2
GPU_BANDWIDTH, CPU_BANDWIDTH = "GPU bandwidth", "CPU bandwidth"


@dataclass(frozen=True)
class Load:
    """What is asked for: tokens of context of each sequence, and shares of keys read by `lsh`, with
    its default tables, and by `scan`."""

    context: int
    lsh_share: float = 0.035
    scan_share: float = 0.01


@dataclass(frozen=True)
class Step:
    """Seconds of a step of the whole batch, what takes most of them, and bytes of memory."""

    seconds: float
    bound: str
    gpu_memory: float
    cpu_memory: float


@dataclass(frozen=True)
class Machine:
    """Each with the memory that may be used. gpu: None for none."""

    gpu: Gpu | None
    cpu: Cpu


NO_GPU = Gpu("none", 0.0, 1.0, 1.0)


class System:
    """A way to attend, for a model on a machine.

    name: as methods are named; "gpu-only" is `full`.
    """

    name = "gpu-only"
    dense = 0  # layers that read everything where others do not

    def __init__(self, model: ModelGeometry, machine: Machine, load: Load) -> None:
        self.model, self.cpu, self.load = model, machine.cpu, load
        self.gpu = machine.gpu or NO_GPU

    @cached_property
    def memory(self) -> BatchMemory:
        method = "full" if self.name == "gpu-only" else self.name
        return BatchMemory(self.model, method, self.dense > 0, self.load.context, self.gpu.memory)

    def step(self, batch: int) -> Step:
        seconds, bound = self._seconds(batch)
        return Step(seconds, bound, *self.memory.of(batch))

    def _seconds(self, batch: int) -> tuple[float, str]:
        """And what takes most of them."""
        layers = self.model.layers
        return self._gpu_seconds(batch, layers) + layers * GPU_LAYER_SECONDS, GPU_BANDWIDTH

    def largest_batch(self, most: int = 4096) -> int:
        """That fits into both memories; 0: not even one sequence does."""
        return min(most, self.memory.largest(self.cpu.memory))

    def lacks(self) -> str:
        """Which memory one sequence does not fit into, where it does not."""
        return "GPU" if self.gpu is not NO_GPU and not self.memory.largest(None) else "CPU"

    def _gpu_seconds(self, batch: int, dense_layers: int) -> float:
        """Linear layers, and attention of the layers whose keys are there."""
        model, gpu, context = self.model, self.gpu, self.load.context
        read = model.weights_read(batch) / (GPU_STREAMED * gpu.bandwidth)
        computed = 2 * model.parameters_used * batch / (GPU_COMPUTED * gpu.flops)
        near = model.kv_bytes(min(WINDOW_TOKENS, context), model.layers - dense_layers)
        near += model.sliding_bytes(context)
        keys = batch * (model.kv_bytes(context, dense_layers) + near)
        small = len(model.spans) * GPU_LAYER_SECONDS
        return max(read, computed) + keys / (GPU_STREAMED * gpu.bandwidth) + small


class KvStream(System):
    """The cache in host memory, copied to the GPU at every step, layer by layer."""

    name = "kv-stream"

    def _seconds(self, batch: int) -> tuple[float, str]:
        moved = batch * self.model.kv_bytes(self.load.context) / self.gpu.link
        computed, bound = super()._seconds(batch)
        return moved + computed, "link" if moved > computed else bound


class Hybrid(System):
    """The far context in the CPU's memory, and attended to by it."""

    dense = DENSE_LAYERS  # where there are as many

    @property
    def dense_layers(self) -> int:
        return min(self.dense, self.model.layers)

    def _seconds_on_cpu(self, batch: int) -> tuple[float, str]:
        """Of a machine without a GPU."""
        model, cpu = self.model, self.cpu
        read = model.weights_read(batch) / (CPU_LINEAR * cpu.stream)
        computed = 2 * model.parameters_used * batch / (cpu.cores * cpu.flops)
        far, bound = max(self._cpu_seconds())
        dense = model.kv_bytes(self.load.context, 1) / (CPU_STREAMED * cpu.stream)
        near = dense * min(1.0, WINDOW_TOKENS / self.load.context)
        attention = (model.layers - self.dense_layers) * (far + near) + self.dense_layers * dense
        attention += model.sliding_bytes(self.load.context) / (CPU_STREAMED * cpu.stream)
        parts = [
            (read, "weights") if read > computed else (computed, "CPU cores"),
            (batch * attention, bound),
            ((model.layers + len(model.spans)) * CPU_LAYER_SECONDS, "Python"),
        ]
        return sum(seconds for seconds, _ in parts), max(parts)[1]

    def _seconds(self, batch: int) -> tuple[float, str]:
        """As one batch, or as two halves: whichever is better."""
        if self.gpu is NO_GPU:
            return self._seconds_on_cpu(batch)
        whole = self.by_turns(batch)
        return min(whole, self._in_halves(batch)) if batch > 1 else whole

    def by_turns(self, batch: int) -> tuple[float, str]:
        """GPU and CPU, of one batch."""
        gpu, cpu = self._on_gpu(batch), self._on_cpu(batch)
        return gpu + cpu, self._busier(gpu, cpu)

    def _in_halves(self, batch: int) -> tuple[float, str]:
        """One on the GPU while the other is on the CPU."""
        halves = -(-batch // 2), batch // 2
        gpu, cpu = sum(map(self._on_gpu, halves)), sum(map(self._on_cpu, halves))
        filling = (gpu / 2 + self._on_cpu(halves[0])) / self.model.layers
        return max(gpu, cpu) + filling, self._busier(gpu, cpu)

    def _busier(self, gpu: float, cpu: float) -> str:
        return max(self._cpu_seconds())[1] if cpu > gpu else GPU_BANDWIDTH

    def _on_gpu(self, batch: int) -> float:
        layers = self.model.layers - self.dense_layers
        there = LAYER_SECONDS + self._gpu_layer_seconds(batch)
        return self._gpu_seconds(batch, self.dense_layers) + layers * there

    def _on_cpu(self, batch: int) -> float:
        layers = self.model.layers - self.dense_layers
        return layers * (CALL_SECONDS + batch * max(self._cpu_seconds())[0])

    def _gpu_layer_seconds(self, batch: int) -> float:
        """That a GPU takes to draw a layer's rows."""
        return 0.0

    def _cpu_seconds(self) -> Iterator[tuple[float, str]]:
        """Of one sequence and layer, by what could bound them."""
        yield (
            self.model.kv_bytes(self.load.context, 1) / (CPU_STREAMED * self.cpu.stream),
            CPU_BANDWIDTH,
        )


class CpuDense(Hybrid):
    name = "cpu-dense"
    dense = 0


class Lsh(Hybrid):
    name = "lsh"

    def __init__(
        self, model: ModelGeometry, machine: Machine, load: Load, tables: tuple[int, int]
    ) -> None:
        super().__init__(model, machine, load)
        self.bits, self.num_tables = tables
        self.name = f"lsh:{self.bits}:{self.num_tables}"
        self.share = min(1.0, load.lsh_share * more_than_default(*tables))

    def _cpu_seconds(self) -> Iterator[tuple[float, str]]:
        model, cpu = self.model, self.cpu
        if self.load.context - ALWAYS_NEAR < 2**self.bits:  # which are read whole
            yield from super()._cpu_seconds()
            return
        entries = model.heads * self.num_tables * self.load.context / 2**self.bits
        rows = model.heads * self.load.context * self.share
        work = entries * cpu.entry_seconds + rows * _row_seconds(cpu, model)
        yield work / cpu.cores, "CPU cores"
        yield (2 * entries + rows * model.row_bytes) / cpu.gather, CPU_BANDWIDTH


def more_than_default(bits: int, num_tables: int) -> float:
    """How many times the keys are read that the default tables read, as of uniform buckets."""

    def share(bits: int, num_tables: int) -> float:
        together = 0.5**bits
        none, once = (1 - together) ** num_tables, (1 - together) ** (num_tables - 1)
        return 1 - none - num_tables * together * once

    default = LSHConfig()
    return share(bits, num_tables) / share(default.bits_per_table, default.num_tables)


class Scan(Hybrid):
    def __init__(self, model: ModelGeometry, machine: Machine, load: Load, bits: int) -> None:
        super().__init__(model, machine, load)
        self.bits = bits
        self.name = f"scan:{bits}:{100 * load.scan_share:g}%"
        self.code_bytes = model.head_dim * bits / 8 + 8

    @property
    def _codes(self) -> float:
        """Bytes, of one sequence and layer."""
        return self.model.kv_heads * self.load.context * self.code_bytes

    def _gpu_layer_seconds(self, batch: int) -> float:
        keys = self.model.kv_heads * self.load.context
        each = max(keys * KEY_SECONDS, self._codes / (GPU_STREAMED * self.gpu.bandwidth))
        return DRAW_SECONDS + batch * each

    def _cpu_seconds(self) -> Iterator[tuple[float, str]]:
        """The CPU reads rows; codes too, where there is no GPU to do that."""
        model, cpu = self.model, self.cpu
        least = min(SCAN.min_rows, self.load.context)
        rows = model.heads * max(least, self.load.context * self.load.scan_share)
        if self.gpu is not NO_GPU:
            yield rows * ROW_ALONE * _row_seconds(cpu, model) / cpu.cores, "CPU cores"
            yield rows * model.row_bytes / cpu.gather, CPU_BANDWIDTH
            return
        products = model.heads * self.load.context * model.head_dim
        yield (products / cpu.macs + rows * _row_seconds(cpu, model)) / cpu.cores, "CPU cores"
        yield self._codes / cpu.stream + rows * model.row_bytes / cpu.gather, CPU_BANDWIDTH


def _row_seconds(cpu: Cpu, model: ModelGeometry) -> float:
    return cpu.row_seconds * model.row_bytes / 512


def systems(model: ModelGeometry, machine: Machine, load: Load) -> list[System]:
    """All that are compared; those that need a GPU where there is one."""
    by_gpu = [System(model, machine, load), KvStream(model, machine, load)]
    return [
        *(by_gpu if machine.gpu else []),
        CpuDense(model, machine, load),
        Lsh(model, machine, load, (10, 150)),
        Lsh(model, machine, load, (10, 170)),
        Scan(model, machine, load, 2),
        Scan(model, machine, load, 4),
    ]
