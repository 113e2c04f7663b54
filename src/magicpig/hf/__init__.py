"""The drop-in for Hugging Face models: `with magicpig.hf.enable(model): model.generate(...)`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from magicpig.attention.base import Method
from magicpig.attention.plan import Plan, make_plan
from magicpig.config import LSHConfig, UnsupportedModel, WindowConfig
from magicpig.hf.attention import DROP_IN, register
from magicpig.hf.cache import BatchLayer, full_attention_layers, link
from magicpig.hf.tagged import forget_pass

__all__ = ["enable"]


class _Enabled:
    """A model's caches while the drop-in is in force."""

    def __init__(self, model: PreTrainedModel, plan: Plan, window: WindowConfig) -> None:
        self.config = model.config
        self.plan = plan
        self.window = window
        self.prompts_on_host = model.device.type != "cpu"
        self.in_force = True

    def before_forward(
        self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A torch hook: the model's full-attention layers get caches of ours."""
        forget_pass()
        names = list(inspect.signature(model.forward).parameters)
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        cache = kwargs.get("past_key_values")
        use_cache = kwargs.get("use_cache")
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = kwargs["past_key_values"] = DynamicCache(config=self.config)
        if cache is not None:
            self.adopt(cache)
        return (), kwargs

    def adopt(self, cache: Cache) -> None:
        if not isinstance(cache, DynamicCache) or cache.offloading:
            offloads = getattr(cache, "offloading", False)
            given = f"{'an offloaded ' if offloads else ''}{type(cache).__name__}"
            raise ValueError(
                f"magicpig keeps keys and values in a DynamicCache, not in {given}; "
                "leave out past_key_values and cache_implementation"
            )
        if not cache.layers:
            cache.layers = DynamicCache(config=self.config).layers
        for i, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                new_row = partial(self.plan.new_layer, i, window=self.window)
                watch = self.plan.of(i).watches_prompts
                on_host = self.prompts_on_host and self.plan.of(i).on_host
                ours = BatchLayer(
                    new_row, check=self.check, watch=watch, on_host=on_host, draws_there=True
                )
                if layer.keys is not None and layer.values is not None:
                    ours.fill(layer.keys, layer.values)
                cache.layers[i] = ours
        link(cache.layers)

    def check(self) -> None:
        if not self.in_force:
            raise RuntimeError(
                "this cache was made under magicpig.hf.enable, which is no longer in force; "
                "use it inside the context manager, or start with a new one"
            )


def _implementations(model: PreTrainedModel) -> dict[str, Any]:
    """What set_attn_implementation has to be given to leave a model and its parts as they are."""
    parts = {"": model.config}
    parts |= {name: getattr(model.config, name) for name in model.config.sub_configs}
    return {
        name: part._attn_implementation
        for name, part in parts.items()
        if part is not None and part._attn_implementation is not None
    }


@contextmanager
def enable(
    model: PreTrainedModel,
    method: str | Method | None = None,
    *,
    lsh: LSHConfig | None = None,
    dense_layers: Sequence[int] | None = None,
    window: WindowConfig | None = None,
) -> Iterator[PreTrainedModel]:
    """Inside the context, the model's decode steps attend to the far context by the method.

    method: see magicpig.LLM. Prompts are always read exactly.
    lsh: the hash tables. dense_layers: layers that read every row; None: the first and the middle
    one. window: which tokens stay exact.

    Layers without full attention keep the model's own cache. On leaving the context the model is
    as it was; caches made inside cannot be used outside. Host memory that prompts of a model on a
    GPU were kept in stays pinned for the next ones; torch.accelerator.empty_host_cache() gives it
    back.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, not {type(model).__name__}")
    if model.config._attn_implementation == DROP_IN:
        raise RuntimeError("magicpig is enabled for this model already: leave that context first")
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    enabled = _Enabled(
        model,
        make_plan(method, num_layers, lsh, dense_layers, full_attention_layers(model.config)),
        WindowConfig.given(window),
    )
    register()
    before = _implementations(model)
    hook = model.register_forward_pre_hook(enabled.before_forward, with_kwargs=True)
    try:
        model.set_attn_implementation(DROP_IN)
        if model.config._attn_implementation != DROP_IN:
            raise UnsupportedModel(f"{type(model).__name__} does not let its attention be replaced")
        yield model
    finally:
        enabled.in_force = False
        hook.remove()
        model.set_attn_implementation(before)
