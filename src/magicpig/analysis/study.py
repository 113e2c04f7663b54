"""analyze: reads excerpts of a text with a model and studies every layer with full attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from magicpig.analysis import observations, summary, texts
from magicpig.analysis.capture import Reader
from magicpig.analysis.estimators import far_end
from magicpig.analysis.findings import findings
from magicpig.analysis.measure import Measures
from magicpig.analysis.settings import Settings
from magicpig.attention.plan import make_plan
from magicpig.models import LoadedModel

READING_SHARE = 0.4  # of the time that an input takes, for the bar

Progress = Callable[[str, float], None]


def analyze(
    loaded: LoadedModel,
    text: str,
    settings: Settings | None = None,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """One dictionary of plain numbers, and what they say; `report.write` makes files of it.

    loaded: the model, which is of no use to others afterwards.
    on_progress: told what is being done, and the share of all work that is done.
    """
    settings = settings or Settings()
    tell = on_progress or (lambda what, share: None)
    started = time.perf_counter()
    inputs = texts.excerpts(loaded.tokenizer, text, settings.tokens, settings.inputs)
    starts = texts.starts(loaded.tokenizer, text, settings.starts)
    reader = Reader(loaded)
    if settings.tokens > reader.max_length:
        raise ValueError(
            f"{loaded.name!r} reads at most {reader.max_length:,} tokens, "
            f"and inputs of {settings.tokens:,} are asked for: ask for less (--tokens)"
        )
    tell("reading", 0.0)
    numbers = observations.of_starts(reader.read_starts(starts))
    measures, mean_keys = Measures(settings), observations.MeanKeys(settings.sinks)
    for i, token_ids in enumerate(inputs):
        _study(reader, token_ids, measures, mean_keys, _part(tell, i, len(inputs)))
    about = {
        "model": loaded.name,
        **_about(reader, settings),
        "starts": len(starts),
        "first_token_is_special": texts.first_is_special(loaded.tokenizer),
    }
    results: dict[str, Any] = {
        "about": about,
        "observations": observations.rows(reader.layers, {**numbers, **mean_keys.result()}),
        "errors": summary.errors(measures, reader.layers, about["sampled_layers"]),
        "targets": summary.targets(measures, reader.layers, about["sampled_layers"]),
        "heads": summary.heads(measures, reader.layers),
        "inclusion": [
            {"bits_per_table": bits, "num_tables": tables, "bins": inclusion.result()}
            for (bits, tables), inclusion in measures.inclusion.items()
        ],
    }
    results["findings"] = findings(results)
    about["seconds"] = time.perf_counter() - started
    return results


def _part(tell: Progress, i: int, count: int) -> Progress:
    """For the i-th of `count` equal parts of the work."""
    return lambda what, share: tell(what, (i + share) / count)


def _study(
    reader: Reader,
    token_ids: list[int],
    measures: Measures,
    mean_keys: observations.MeanKeys,
    tell: Progress,
) -> None:
    """One input in all layers."""
    settings = measures.settings
    end = far_end(len(token_ids), settings.positions, settings.local)
    given = reader.read(
        token_ids,
        settings.positions,
        lambda done: tell("reading", READING_SHARE * done / len(token_ids)),
    )
    mean_keys.begin_input()
    for layer in given:
        mean_keys.add(layer, end)
    with closing(measures.add(given)) as measured:
        for done in measured:
            tell("measuring", READING_SHARE + (1 - READING_SHARE) * done / len(given))


def _about(reader: Reader, settings: Settings) -> dict[str, Any]:
    num_layers, layers = reader.config.num_hidden_layers, reader.layers
    dense = sorted(make_plan("lsh", num_layers, full_layers=layers).dense_layers)
    return {
        "dtype": str(reader.runner.dtype).removeprefix("torch."),
        "tokens": settings.tokens,
        "inputs": settings.inputs,
        "positions": settings.positions,
        "few_positions": settings.few_positions,
        "sinks": settings.sinks,
        "local": settings.local,
        "far_keys": far_end(settings.tokens, settings.positions, settings.local) - settings.sinks,
        "num_layers": num_layers,
        "layers": layers,
        "dense_layers": dense,
        "sampled_layers": [layer for layer in layers if layer not in dense] or layers,
        "num_heads": reader.config.num_attention_heads,
        "num_kv_heads": reader.heads[0],
        "head_dim": reader.heads[1],
    }
