"""Errors of the methods, mass of the top keys and inclusion rates, layer by layer."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from magicpig.analysis import estimators
from magicpig.analysis.capture import LayerInput
from magicpig.analysis.estimators import Scene, State, budget_rows, far_end
from magicpig.analysis.inclusion import Inclusion
from magicpig.analysis.settings import Settings, percent
from magicpig.config import IndexConfig, LSHConfig, ScanConfig
from magicpig.kv.layer import LayerKV, attend
from magicpig.native import num_threads

TOP_SHARE = 0.2  # of the keys, whose mass the paper looks at
TAIL_AFTER = 0.02  # of the far keys: what weighs less is called the tail
MAX_WORKERS = 4  # each needs some hundred megabytes for a large model


class LayerMeasures:
    """One layer of one input. All tensors are [positions, heads].

    errors, rows: by method; rows are shares of the far keys that were read.
    decisive: by method, [2, positions, heads]: how many decisive keys were read, and are there.
    mass: of the top 20 % of all keys, of the far keys, of their tail and of their top 20 %.
    inclusion: by (bits_per_table, num_tables).
    targets: by (bits_per_dim, error): errors, what was predicted of them, and shares of far keys.
    """

    def __init__(self, given: LayerInput, settings: Settings, seed: int) -> None:
        self.settings = settings
        self.errors: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        self.decisive: dict[str, Tensor] = {}
        self.mass: dict[str, Tensor] = {}
        self.inclusion: dict[tuple[int, int], Inclusion] = {}
        self.targets: dict[tuple[int, float], Tensor] = {}
        scene = Scene.of(given, settings.sinks, settings.local)
        ranked = estimators.ranks(scene.scores)
        self._weigh(scene, ranked)
        self._spend_budgets(scene, ranked, torch.Generator().manual_seed(seed))
        few = scene.first(settings.few_positions)
        cosine = estimators.cosines(few.queries, estimators.centred(few.keys))
        for bits_per_table, num_tables in settings.tables:
            lsh = settings.lsh(bits_per_table, num_tables, seed)
            kv = self._decode(f"lsh:{bits_per_table}:{num_tables}", given, scene, lsh)
            self._count_drawn(kv, given, lsh, cosine)
            raw = estimators.lsh_weights(few.scores, few.queries, few.keys, lsh)
            self._note(f"lsh-raw:{bits_per_table}:{num_tables}", few, raw)
        for bits, budget in itertools.product(settings.code_bits, settings.budgets):
            scan = settings.scan(bits, budget, seed)
            self._decode(f"scan:{bits}:{percent(budget)}", given, scene, scan)
        for bits, error in itertools.product(settings.code_bits, settings.targets):
            scan = settings.scan_to(bits, error, seed)
            self.targets[bits, error] = self._aim(given, scene, scan)

    def _spend_budgets(self, scene: Scene, ranked: Tensor, generator: torch.Generator) -> None:
        scores, page = scene.scores, self.settings.page
        paged = estimators.page_ranks(scene.queries, scene.keys, page)
        logs = estimators.priorities(scores, generator)
        by_priority = estimators.ranks(logs)
        rows_of = {budget: budget_rows(budget, scene.num_far) for budget in self.settings.budgets}
        drawn = estimators.oracle_draws(scores, max(rows_of.values()), generator)
        for budget, rows in rows_of.items():
            named = {
                "topk": estimators.top_k(scores, ranked, rows),
                f"quest:{page}": estimators.quest(scores, paged, rows, page),
                "oracle": estimators.oracle(scores, drawn[..., :rows]),
                "priority": estimators.priority(scores, logs, by_priority, rows),
            }
            for name, log_weights in named.items():
                self._note(f"{name}:{percent(budget)}", scene, log_weights)

    def _note(self, name: str, scene: Scene, log_weights: Tensor) -> None:
        read = log_weights.isfinite()
        rows = scene.by_head(read.sum(-1) / scene.num_far)
        state = estimators.weighted(log_weights, scene.values)
        self._put(name, scene, state, rows, (read & scene.decisive).sum(-1))

    def _put(self, name: str, scene: Scene, state: State, rows: Tensor, decisive: Tensor) -> None:
        self.errors[name] = scene.errors(state)
        self.rows[name] = rows
        there = scene.decisive.sum(-1)
        self.decisive[name] = torch.stack([scene.by_head(decisive), scene.by_head(there)])

    def _decode(self, name: str, given: LayerInput, scene: Scene, index: IndexConfig) -> LayerKV:
        """Rows drawn by an index as they are when decoding: through the native core."""
        kv = self._far_kv(given, index)
        kv_heads = kv.num_kv_heads
        forks = [kv.fork() for _ in given.queries]
        out, lse = attend(forks, given.queries, scale=given.scale, softcap=given.softcap)
        state = estimators.by_kv_head(out, kv_heads), estimators.by_kv_head(lse, kv_heads)
        shares = torch.stack([fork.last_stats.share for fork in forks if fork.last_stats])
        self._put(name, scene, state, shares, self._decisive_drawn(kv, given, scene))
        return kv

    def _decisive_drawn(self, kv: LayerKV, given: LayerInput, scene: Scene) -> Tensor:
        """[kv_heads, queries]: of the decisive keys, as many as a step reads."""
        group = kv.num_heads // kv.num_kv_heads
        found = torch.zeros(scene.decisive.shape[:2], dtype=torch.int64)
        for position, queries in enumerate(given.queries):
            for head, rows in enumerate(kv.sample(queries, given.scale)[0]):
                at = head // group, position * group + head % group
                found[at] = scene.decisive[at][rows.long()].sum()
        return found

    def _far_kv(self, given: LayerInput, index: IndexConfig) -> LayerKV:
        kv_heads, tokens, dim = given.keys.shape
        far = slice(self.settings.sinks, self._far_end(tokens))
        kv = LayerKV(given.queries.shape[1], kv_heads, dim, index, given.keys.dtype)
        kv.append(given.keys[:, far], given.values[:, far])
        return kv

    def _far_end(self, tokens: int) -> int:
        return far_end(tokens, self.settings.positions, self.settings.local)

    def _aim(self, given: LayerInput, scene: Scene, scan: ScanConfig) -> Tensor:
        """[3, positions, heads]. Windows stand behind the far context, where they are read whole:
        how many rows are drawn depends on them."""
        far, tokens = self._far_kv(given, scan), given.keys.shape[1]
        kvs = []
        for last in range(tokens - len(given.queries), tokens):
            window = [*range(self.settings.sinks), *range(self._far_end(tokens), last + 1)]
            kvs.append(far.fork())
            kvs[-1].append(given.keys[:, window], given.values[:, window])
        out, _ = attend(kvs, given.queries, scale=given.scale, softcap=given.softcap)
        got = estimators.by_kv_head(out, far.num_kv_heads)
        errors = (got - scene.exact).norm(dim=-1) / scene.exact.norm(dim=-1)
        stats = [kv.last_stats for kv in kvs if kv.last_stats]
        rows = [s.rows - (s.num_tokens - far.num_tokens) for s in stats]
        predicted = [s.predicted_error for s in stats if s.predicted_error is not None]
        shares = torch.stack(rows) / far.num_tokens
        return torch.stack([scene.by_head(errors), torch.stack(predicted), shares])

    def _count_drawn(self, kv: LayerKV, given: LayerInput, lsh: LSHConfig, cosine: Tensor) -> None:
        group = kv.num_heads // kv.num_kv_heads
        drawn = torch.zeros(cosine.shape, dtype=torch.bool)
        for position in range(self.settings.few_positions):
            for head, rows in enumerate(kv.sample(given.queries[position])[0]):
                drawn[head // group, position * group + head % group, rows.long()] = True
        inclusion = self.inclusion[lsh.bits_per_table, lsh.num_tables] = Inclusion()
        inclusion.add(cosine, drawn, lsh)

    def _weigh(self, scene: Scene, ranked: Tensor) -> None:
        everything = torch.cat([scene.window_scores, scene.scores], -1).softmax(-1)
        far = everything[..., scene.window_scores.shape[-1] :]
        top = budget_rows(TOP_SHARE, everything.shape[-1])
        tail = ranked >= budget_rows(TAIL_AFTER, scene.num_far)
        top_of_far = ranked < budget_rows(TOP_SHARE, scene.num_far)
        for name, mass in (
            ("top", everything.topk(top, -1, sorted=False).values.sum(-1)),
            ("far", far.sum(-1)),
            ("tail", (far * tail).sum(-1)),
            ("top_of_far", (far * top_of_far).sum(-1)),
        ):
            self.mass[name] = scene.by_head(mass)


class Measures:
    """What layers of inputs gave: tensors as in LayerMeasures, in the order they were added."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.errors: dict[str, list[Tensor]] = defaultdict(list)
        self.rows: dict[str, list[Tensor]] = defaultdict(list)
        self.decisive: dict[str, list[Tensor]] = defaultdict(list)
        self.mass: dict[str, list[Tensor]] = defaultdict(list)
        self.targets: dict[tuple[int, float], list[Tensor]] = defaultdict(list)
        self.inclusion = {tables: Inclusion() for tables in settings.tables}
        self.count = 0

    def add(self, layers: Sequence[LayerInput]) -> Generator[int]:
        """Measures layers, several at once; yields how many are done.

        Every one has random numbers of its own, which do not depend on the number of threads.
        """
        first, self.count = self.count, self.count + len(layers)
        # torch's own threads would wait for each other after every small operation.
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        pool = ThreadPoolExecutor(
            min(num_threads(), MAX_WORKERS), "magicpig-analysis", torch.set_num_threads, (1,)
        )
        try:
            seeds = range(first, self.count)
            measured = pool.map(LayerMeasures, layers, [self.settings] * len(layers), seeds)
            for done, layer in enumerate(measured, 1):
                self._take(layer)
                yield done
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)

    def _take(self, layer: LayerMeasures) -> None:
        for mine, theirs in (
            (self.errors, layer.errors),
            (self.rows, layer.rows),
            (self.decisive, layer.decisive),
            (self.mass, layer.mass),
        ):
            for name, tensor in theirs.items():
                mine[name].append(tensor)
        for target, found in layer.targets.items():
            self.targets[target].append(found)
        for tables, inclusion in layer.inclusion.items():
            self.inclusion[tables].include(inclusion)
