"""streaming: the first and the newest tokens only, as in StreamingLLM (arXiv 2309.17453)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from magicpig.attention.scoring import Scoring
from magicpig.attention.tensor_method import TensorMethod, attend_to_windows
from magicpig.kv.far_tokens import FarTokens
from magicpig.kv.seats import Seats
from magicpig.kv.tensor_layer import TensorLayer


@dataclass(frozen=True)
class Streaming(TensorMethod):
    """The window is all there is; what leaves it is gone. Tokens keep their positions."""

    name: ClassVar[str] = "streaming"
    keeps_all: ClassVar[bool] = False
    kept_share = 0.0

    def grown(self, layer: TensorLayer, keys: Tensor, values: Tensor) -> FarTokens:
        return layer.far

    def attend(
        self,
        layers: Sequence[TensorLayer],
        seats: Seats,
        queries: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        return attend_to_windows(layers, seats, queries, Scoring(scale, softcap))[0]
