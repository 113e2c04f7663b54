"""Reading inputs: keys and values of every layer, queries of the last tokens, first tokens' states.

The model runs as it does in the engine: in its dtype, on packed layers, with exact attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from magicpig.attention.plan import make_plan
from magicpig.config import WindowConfig
from magicpig.engine.memory import heads_of
from magicpig.engine.prefill import Prefill
from magicpig.engine.runner import Runner
from magicpig.hf.cache import BatchLayer
from magicpig.hf.tagged import forget_pass
from magicpig.models import LoadedModel


@dataclass(frozen=True)
class LayerInput:
    """What attention of one layer is given, in CPU memory, in the model's dtype.

    queries: [positions, heads, dim] of the last tokens. keys, values: [kv_heads, tokens, dim].
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    softcap: float | None


@dataclass(frozen=True)
class Starts:
    """States of the first token and of a later one, of several short inputs.

    states: [layers, 2, inputs, hidden] as they enter each layer of full attention.
    keys: [layers, 2, inputs, kv_heads, dim].
    """

    states: Tensor
    keys: Tensor


class Recorder(BatchLayer):  # type: ignore[no-untyped-call]
    """A layer of a prompt that remembers the queries of its last tokens."""

    positions = 1
    queries: Tensor | None = None
    scale = 1.0
    softcap: float | None = None

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        parts = [queries] if self.queries is None else [self.queries, queries]
        self.queries = torch.cat(parts, 2)[:, :, -self.positions :].clone()
        self.scale, self.softcap = scale, softcap
        return super().attend(queries, keys, values, mask, scale, softcap)


class Reader:
    """A model that reads texts for study. It has the model for itself."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.config = loaded.model.config.get_text_config(decoder=True)
        plan = make_plan("full", self.config.num_hidden_layers)
        self.runner = Runner(loaded.model, plan, WindowConfig())
        self.heads = heads_of(self.config)  # KV heads and their dimension
        begun = self._begin([0, 0], 1)
        self.layers = sorted(self._full_attention(begun.cache))
        if not self.layers:
            raise ValueError(f"{loaded.name!r} has no layer with full attention to study")

    @property
    def max_length(self) -> int:
        return int(getattr(self.config, "max_position_embeddings", None) or 2**31 - 1)

    def read(
        self, token_ids: list[int], positions: int, on_part: Callable[[int], None]
    ) -> list[LayerInput]:
        """One input, with queries of its last tokens. on_part: told the tokens read so far."""
        prefill = self._begin(token_ids, positions)
        with self.runner.threads():
            while prefill.done < len(token_ids):
                self.runner.prefill(prefill)
                on_part(prefill.done)
        inputs = []
        for i, layer in self._full_attention(prefill.cache).items():
            assert layer.prompt is not None
            assert layer.queries is not None
            keys, values = layer.prompt.tensors
            queries = layer.queries[0].transpose(0, 1).contiguous().cpu()
            keys, values = keys[0].cpu(), values[0].cpu()
            inputs.append(LayerInput(i, queries, keys, values, layer.scale, layer.softcap))
        return inputs

    @torch.inference_mode()
    def read_starts(self, token_ids: list[list[int]]) -> Starts:
        """Short inputs of one length, as a batch: their first and their last tokens' states."""
        prefill = self._begin(token_ids[0], 1)
        cache = prefill.cache
        self.runner.rope.choose(prefill.long_rope)
        forget_pass()
        with self.runner.threads():
            out: Any = self.runner.model(
                input_ids=torch.tensor(token_ids, device=self.runner.device),
                past_key_values=cache,
                use_cache=True,
                output_hidden_states=True,
                logits_to_keep=1,
            )
        states, keys = [], []
        for i, layer in self._full_attention(cache).items():
            assert layer.prompt is not None
            ends = [0, -1]
            states.append(out.hidden_states[i][:, ends].transpose(0, 1).float().cpu())
            keys.append(layer.prompt.tensors[0][:, :, ends].permute(2, 0, 1, 3).float().cpu())
        return Starts(torch.stack(states), torch.stack(keys))

    def _begin(self, token_ids: list[int], positions: int) -> Prefill:
        prefill = self.runner.begin(token_ids)
        for i, layer in enumerate(prefill.cache.layers):
            if isinstance(layer, BatchLayer):
                recorder = Recorder(layer.new_row, layer.span, expected=len(token_ids))
                recorder.positions = positions
                prefill.cache.layers[i] = recorder
        return prefill

    @staticmethod
    def _full_attention(cache: Cache) -> dict[int, Recorder]:
        return {
            i: layer
            for i, layer in enumerate(cache.layers)
            if isinstance(layer, Recorder) and layer.span is None
        }
