"""BatchMemory: what a batch needs of both memories, as the engine counts it."""

from __future__ import annotations

import torch

from magicpig.attention.plan import make_plan
from magicpig.config import WindowConfig
from magicpig.engine.memory import LIBRARIES, Memory, Needs, largest_batch, usable
from magicpig.engine.prefill import part_tokens_on
from magicpig.hf.cache import full_attention_layers
from magicpig.planning.geometry import ModelGeometry

NEW_TOKENS = 64  # of each sequence, beyond its context
ENOUGH = 2**62


class BatchMemory:
    """Of sequences of so many tokens, by a method.

    dense: whether some layers read everything, as is the default. gpu_memory: 0 for no GPU.
    """

    def __init__(
        self, model: ModelGeometry, method: str, dense: bool, context: int, gpu_memory: float
    ) -> None:
        config = model.config
        text = config.get_text_config(decoder=True)
        plan = make_plan(
            method,
            text.num_hidden_layers,
            dense_layers=None if dense else (),
            full_layers=full_attention_layers(config),
        )
        device = "cuda" if gpu_memory else "cpu"
        place, part = torch.device(device), part_tokens_on(device)
        self._needs = Needs(config, plan, WindowConfig(), torch.bfloat16, place, part)
        self._context, self._gpu_memory = context, gpu_memory
        self._weights = model.parameters * model.itemsize
        self._one = self._needs.of(context, NEW_TOKENS) + self._needs.windows(context, NEW_TOKENS)
        self._reading = self._needs.reading(context)

    def of(self, batch: int) -> tuple[float, float]:
        """Bytes of the GPU and of the CPU."""
        host = self._reading.host + batch * self._one.host
        if not self._gpu_memory:
            return 0.0, float(self._weights + host)
        fixed = LIBRARIES + self._weights + self._needs.workspace()
        return float(fixed + self._reading.device + batch * self._one.device), float(host)

    def largest(self, cpu_memory: float | None) -> int:
        """The largest batch that fits; cpu_memory: None for enough."""
        host = ENOUGH if cpu_memory is None else int(cpu_memory)
        if not self._gpu_memory:
            there = Memory(max(0, host - self._weights))
        else:
            there = Memory(host, usable(self._needs, self._weights, int(self._gpu_memory)))
        return largest_batch(self._needs, there, self._context, NEW_TOKENS)
