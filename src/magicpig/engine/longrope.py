"""LongRope: rotary embeddings with a set of frequencies for short sequences and one for long ones.

Transformers chooses by the positions of each pass. Here passes are parts of a prompt, and all keys
of a sequence are to have the same set: it is chosen for a sequence, by the length it may come to.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from magicpig.config import UnsupportedModel
from magicpig.kv.sequence import SequenceKV

KIND = "longrope"


class LongRope:
    """Of a model, whose modules are changed.

    border: tokens of the longest sequence with the short set; None: the model has one set.
    """

    def __init__(self, model: nn.Module) -> None:
        self.border: int | None = None
        self._long = False
        self._places: list[tuple[Any, str, Any, Any]] = []  # module, name, short and long set
        for module in model.modules():
            kinds = getattr(module, "rope_type", None)
            for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
                if kind == KIND:
                    self._add(module, layer_type)

    def _add(self, module: Any, layer_type: str | None) -> None:
        parameters, prefix, of_type = module.config.rope_parameters, "", {}
        if layer_type is not None:
            parameters, prefix = parameters[layer_type], f"{layer_type}_"
            of_type = {"layer_type": layer_type}
        if parameters.get("short_mscale") != parameters.get("long_mscale"):
            raise UnsupportedModel("magicpig knows no longrope with another scale for long ones")
        border = int(parameters["original_max_position_embeddings"])
        name = f"{prefix}original_inv_freq"  # of short sequences: transformers looks there
        short = getattr(module, name)
        long, _ = ROPE_INIT_FUNCTIONS[KIND](
            module.config, short.device, seq_len=border + 1, **of_type
        )
        self._places.append((module, name, short, long))
        self.border = border if self.border is None else min(self.border, border)

    def is_long(self, prompt: int, new_tokens: int, known: SequenceKV | None = None) -> bool:
        """Whether a sequence of a prompt of so many tokens, and new ones, has the long set.

        known: its first tokens, which have theirs; ValueError where it is not what it has to be.
        """
        tokens = prompt + new_tokens - 1  # nothing is asked about the last one
        long = self.border is not None and tokens > self.border
        if known is None:
            return long
        if long and not known.long_rope:
            raise ValueError(
                f"the text was read for sequences of up to {self.border} tokens, beyond which the "
                f"model's rotary embeddings are others, and {tokens} are asked for: read text and "
                "question together, or ask for fewer new tokens"
            )
        return known.long_rope

    def choose(self, long: bool) -> None:
        """For the passes that follow."""
        if long != self._long:
            for module, name, short, other in self._places:
                setattr(module, name, other if long else short)
            self._long = long

    def choose_for(self, kv: SequenceKV) -> None:
        """For a sequence's next step."""
        if not kv.long_rope and self.is_long(kv.num_tokens, 2):
            raise ValueError(
                f"the sequence was begun as one of up to {self.border} tokens, beyond which the "
                "model's rotary embeddings are others"
            )
        self.choose(kv.long_rope)
