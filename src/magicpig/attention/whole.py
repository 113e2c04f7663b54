"""Methods that read every row of the far context, where the model computes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from magicpig.attention.gpu import has_triton
from magicpig.attention.scoring import Scoring, attend_to_all
from magicpig.attention.tensor_method import NearAndFar, spend_on_step
from magicpig.kv.far_tokens import FarTokens
from magicpig.kv.seats import Seats
from magicpig.kv.tensor_layer import TensorLayer


class WholeMethod(NearAndFar):
    """On a GPU with kernels of its own, which read far contexts where they are."""

    @abstractmethod
    def there(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Keys or values of a far context, on the device."""

    def step(
        self,
        layers: Sequence[TensorLayer],
        seats: Seats,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        if not has_triton(queries):
            return super().step(layers, seats, queries, keys, values, scale, softcap)
        from magicpig.attention import exchange_on_gpu, whole_on_gpu, window_on_gpu

        near = (
            torch.empty_like(queries, dtype=torch.float32),
            torch.empty(queries.shape[:2], device=queries.device),
        )
        seats.make_room()
        new = keys.to(seats.keys), values.to(seats.keys)
        window_on_gpu.step(queries, *new, seats.place_there, scale, softcap, None, near)
        seats.advance()
        spend_on_step(layers)
        fars = [layer.far for layer in layers]
        if not any(far.num_tokens for far in fars):
            return near[0]
        spend_on_all(layers, [far.num_tokens for far in fars])
        there = [
            FarTokens(self.there(far.keys, queries.device), self.there(far.values, queries.device))
            for far in fars
        ]
        contexts = torch.tensor([far.place for far in there], device=queries.device)
        shape = seats.keys.shape[1], seats.keys.dtype
        far = whole_on_gpu.attend(queries, contexts, *shape, scale, softcap)
        return exchange_on_gpu.answer(queries.contiguous(), near, far)

    def attend_far(
        self, layers: Sequence[TensorLayer], far: FarTokens, queries: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        spend_on_all(layers, far.lengths)
        keys, values = (self.there(x, queries.device) for x in (far.keys, far.values))
        hidden = None if far.hidden is None else far.hidden.to(queries.device)
        return attend_to_all(queries, keys, values, scoring, hidden)


def spend_on_all(layers: Sequence[TensorLayer], lengths: Sequence[int]) -> None:
    """The cost of reading every row, once for a group."""
    for layer, tokens in zip(layers, lengths, strict=True):
        shape = layer.shape
        rows, row_bytes = shape.num_heads * tokens, shape.num_kv_heads * tokens * shape.row_bytes
        layer.spend({"rows": rows, "row_bytes": row_bytes})
