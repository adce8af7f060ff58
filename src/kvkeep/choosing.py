"""Choosing: views of a prefilled cache become kept positions. No cache is changed here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from kvkeep.allocation import Allocation, Demand, Scored, grouped_counts
from kvkeep.attention import Observation
from kvkeep.caches import RowGroup, bytes_per_row, is_plain, leaves_of, row_groups
from kvkeep.errors import BudgetError, CacheError, ConfigError
from kvkeep.policies import Policy
from kvkeep.selection import forced_rows, select_unequal_rows
from kvkeep.spec import EvictionConfig, LayerSelection
from kvkeep.views import layer_view


@dataclass(frozen=True)
class Ranked:
    """Scored rows at positions that n sets of one layer share.

    Attributes:
        sets: int [n], which of the layer's sets of positions these are.
        positions: int [R], ascending.
        scores: [n, R], float32.
    """

    sets: np.ndarray
    positions: np.ndarray
    scores: np.ndarray


#: Scored rows by layer.
Ranking: TypeAlias = Mapping[int, tuple[Ranked, ...]]


@dataclass(frozen=True)
class Chooser:
    """Scores layers and selects positions for one compaction.

    Attributes:
        config: protections, store and options.
        policy: what scores.
        allocation: what deals rows out.
        keep: mean rows per KV head.
        n_layers: L, evictable layers.
        seen: what the prefill saw.
        most_bytes: what the evictable layers may take, where the budget is in bytes.
        part: the part of a row that a share of the prompt allows beyond `keep`.
    """

    config: EvictionConfig
    policy: Policy
    allocation: Allocation
    keep: int
    n_layers: int
    seen: Observation
    most_bytes: int | None = None
    part: float = 0.0

    def keeps_all(self, cache: list[Any], layers: list[int]) -> bool:
        """Whether the prompt or the cache is so small that nothing is evicted."""
        first = leaves_of(cache)[layers[0]]
        return first.offset <= self.config.min_tokens or self.keep >= first.size()

    def choose(
        self, cache: list[Any], layers: list[int], ranking: Ranking | None = None
    ) -> dict[int, LayerSelection]:
        """Kept positions of each of these layers, per head or shared as the store asks.

        A model that attends where the seam cannot see it builds one mask from its first cache
        and lays it over all layers and heads. After a trim below the compaction point that is
        right only where all of them hold the same positions, so such a model gets one set,
        from the mean score over layers and heads.

        Args:
            cache: a cache list; `layers` counts its leaves.
            ranking: what `rank` gave, so that nothing is scored again.

        Raises:
            CacheError: one set is needed, and layers or heads hold different positions.
            BudgetError: the budget does not hold what is protected.
        """
        cache = leaves_of(cache)
        if self.seen.one_set:
            require_choosable(cache, layers, self.config, self.policy, one_set=True)
            require_one_count(self.allocation)
        if self._one_set or self.allocation.sight == "model" or self._may_exceed(cache, layers):
            return self._fitting(cache, layers, ranking or self.rank(cache, layers))
        if self.allocation.sight == "layer":
            return dict(self._layer_by_layer(cache, layers, ranking))
        counts = self._counts(self._demand(cache, layers))
        chosen = {}
        for index in layers:
            ranked = ranking[index] if ranking else self._ranked(cache[index], index)
            chosen[index] = self._selected(ranked, counts[index])
        return chosen

    def rank(self, cache: list[Any], layers: list[int]) -> Ranking:
        """Scored rows of each layer, as `choose` ranks them.

        They serve choosers of other budgets too, unless the policy's scores hang on the
        budget (`Policy.budget_aware`).
        """
        cache = leaves_of(cache)
        if self._one_set:
            return self._model(cache, layers)
        return {index: self._ranked(cache[index], index) for index in layers}

    def _layer_by_layer(
        self, cache: list[Any], layers: list[int], ranking: Ranking | None
    ) -> Iterator[tuple[int, LayerSelection]]:
        for index in layers:
            ranked = ranking[index] if ranking else self._ranked(cache[index], index)
            demand = replace(self._demand(cache, [index]), scored=(self._scored(ranked),))
            yield index, self._selected(ranked, self._counts(demand)[index])

    # -- scoring -----------------------------------------------------------------------

    @property
    def _one_set(self) -> bool:
        """Whether one score per position serves all layers and heads."""
        return self.policy.scope == "model" or self.seen.one_set

    @property
    def _shared(self) -> bool:
        """Whether one set of positions serves all heads of a layer."""
        alike = self._one_set or self.seen.facts.heads_alike
        return (alike or self.config.store == "shared") and not self.allocation.by_head

    def _ranked(self, cache: Any, index: int) -> tuple[Ranked, ...]:
        ranked = []
        for group in row_groups(cache):
            scores = self._scores(group, index)
            if self._shared:
                scores = scores.mean(axis=0, keepdims=True)
            # Bfloat16 has no NumPy form; float32 holds it exactly.
            table = np.asarray(scores.astype(mx.float32))
            sets = np.zeros(1, np.int64) if self._shared else group.heads
            if len(group.positions) == 1:
                ranked.append(Ranked(sets, group.positions[0], table))
            else:  # heads of a compact layer hold different positions
                ranked += [
                    Ranked(sets[i : i + 1], positions, table[i : i + 1])
                    for i, positions in enumerate(group.positions)
                ]
        return tuple(ranked)

    def _scores(self, group: RowGroup, index: int) -> mx.array:
        view = layer_view(
            group,
            index,
            self.seen,
            n_layers=self.n_layers,
            score_chunk_size=self.config.score_chunk_size,
            keep=self.keep,
        )
        width = self.policy.observation_window
        if view.queries is not None and view.queries.shape[1] > width:  # the allocation's
            view = replace(view, queries=view.queries[:, -width:] if width else None)
        return self.policy.score(view)

    def _model(self, cache: list[Any], layers: list[int]) -> Ranking:
        """One score per position for all layers, summed over them."""
        (first,) = row_groups(cache[layers[0]])
        rows, capture = first.keys.shape[1], self.seen.capture
        total = mx.array([[0.0] * rows if capture is None else capture.snap_scores(rows)])
        for index in layers:
            if capture is not None and index not in self.seen.observers:
                continue  # among the captured ones
            (group,) = row_groups(cache[index])
            scores = self._scores(group, index)
            if self.policy.scope == "model":
                total = total + scores.sum(axis=0, keepdims=True)
            else:
                total = total + scores.mean(axis=0, keepdims=True) / len(layers)
            mx.eval(total)
        table = np.asarray(total.astype(mx.float32))
        ranked = {}
        for index, sets in zip(layers, self._sets(cache, layers), strict=True):
            each = np.broadcast_to(table, (sets, rows))
            ranked[index] = (Ranked(np.arange(sets), first.positions[0], each),)
        return ranked

    # -- dealing out -------------------------------------------------------------------

    def _sets(self, cache: list[Any], layers: list[int]) -> list[int]:
        return [1 if self._shared else _heads(cache[index]) for index in layers]

    def _demand(self, cache: list[Any], layers: list[int]) -> Demand:
        heads = tuple(_heads(cache[index]) for index in layers)
        protected = max(self._protected(cache[index]) for index in layers)
        if protected > self.keep:
            raise BudgetError(
                f"{self.keep} rows cannot hold the {protected} protected positions",
                expected=f"at least {protected} rows per head",
                received=str(self.keep),
                remedy="Raise the budget or protect fewer positions.",
            )
        return Demand(
            keep=self.keep,
            heads=heads,
            held=tuple(
                _held(cache[index], sets)
                for index, sets in zip(layers, self._sets(cache, layers), strict=True)
            ),
            protected=protected,
            recent=self._recent(),
            layers=tuple(layers),
            preferences=self._preferences(cache, layers),
            part=self.part,
        )

    def _preferences(self, cache: list[Any], layers: list[int]) -> tuple[float, ...]:
        width = self.allocation.window
        if not width:
            return ()
        return tuple(
            sum(self._preference(group, index, width) for group in row_groups(cache[index]))
            for index in layers
        )

    def _preference(self, group: RowGroup, index: int, width: int) -> float:
        chunk = self.config.score_chunk_size
        view = layer_view(group, index, self.seen, n_layers=self.n_layers, score_chunk_size=chunk)
        if view.queries is not None:
            view = replace(view, queries=view.queries[:, -width:])
        return self.allocation.preference(view)

    def _protected(self, cache: Any) -> int:
        """Protected rows of the set that holds most of them."""
        most = 0
        for group in row_groups(cache):
            for positions in group.positions:
                inside = forced_rows(len(positions), 2**31, protected=self._ranges(positions))
                most = max(most, int(np.count_nonzero(inside)))
        return most

    def _counts(self, demand: Demand) -> dict[int, np.ndarray]:
        counts = self.allocation.counts(demand)
        if self.allocation.by_head and self.config.store in ("auto", "ragged"):
            groups = self.config.max_groups
            counts = [
                grouped_counts(layer, groups, held)
                for layer, held in zip(counts, demand.held, strict=True)
            ]
        return dict(zip(demand.layers, counts, strict=True))

    def _fitting(
        self, cache: list[Any], layers: list[int], ranked: Ranking
    ) -> dict[int, LayerSelection]:
        """The selection for `keep`, or for the most rows whose stored bytes fit the budget."""
        demand = self._demand(cache, layers)

        def chosen(keep: int) -> dict[int, LayerSelection]:
            at, asked = replace(self, keep=keep), replace(demand, keep=keep)
            if self.allocation.sight != "nothing":
                asked = replace(asked, scored=[at._scored(ranked[index]) for index in layers])
            counts = at._counts(asked)
            return {index: at._selected(ranked[index], counts[index]) for index in layers}

        selection = chosen(self.keep)
        if self.most_bytes is None or self.stored_nbytes(cache, selection) <= self.most_bytes:
            return selection
        fits, low, high = None, demand.least, self.keep
        while low < high:
            middle = (low + high) // 2
            tried = chosen(middle)
            if self.stored_nbytes(cache, tried) <= self.most_bytes:
                fits, low = tried, middle + 1
            else:
                high = middle
        if fits is None:
            raise BudgetError(
                "byte budget holds no row of this store",
                expected=f"at least {self.stored_nbytes(cache, chosen(demand.least))} bytes",
                received=f"{self.most_bytes} for the evictable layers",
                remedy="Raise --kv-budget, or choose another store.",
            )
        return fits

    def _may_exceed(self, cache: list[Any], layers: list[int]) -> bool:
        """Whether rows that meet a byte budget on average may still take more bytes."""
        if self.most_bytes is None:
            return False
        per_head = {bytes_per_row(cache[i]) / _heads(cache[i]) for i in layers}
        return self.config.store == "union" or len(per_head) > 1

    def stored_nbytes(self, cache: list[Any], selection: Mapping[int, LayerSelection]) -> int:
        """Bytes that a selection takes in the store that it goes to."""
        total = 0
        for index, chosen in selection.items():
            heads, row = _heads(cache[index]), bytes_per_row(cache[index])
            if self.config.store == "union":
                total += row * len(np.unique(np.concatenate(chosen.heads)))
            else:
                total += row * sum(chosen.counts) // (1 if chosen.shared else heads)
        return total

    # -- selecting ---------------------------------------------------------------------

    def _scored(self, ranked: tuple[Ranked, ...]) -> Scored:
        scores: dict[int, np.ndarray] = {}
        forced: dict[int, np.ndarray] = {}
        for rows in ranked:
            mask = forced_rows(len(rows.positions), self.keep, **self._ends(rows.positions))
            for at, head in enumerate(rows.sets.tolist()):
                scores[head], forced[head] = rows.scores[at], mask
        order = sorted(scores)
        return Scored(tuple(scores[h] for h in order), tuple(forced[h] for h in order))

    def _selected(self, ranked: tuple[Ranked, ...], counts: np.ndarray) -> LayerSelection:
        chosen: dict[int, np.ndarray] = {}
        for rows in ranked:
            wanted = counts[rows.sets]
            kept = select_unequal_rows(rows.scores, wanted, **self._ends(rows.positions))
            for head, row in zip(rows.sets.tolist(), kept, strict=True):
                chosen[head] = rows.positions[row]
        return LayerSelection(tuple(chosen[head] for head in sorted(chosen)))

    def _recent(self) -> int:
        recent = self.config.recent_tokens
        return self.policy.default_recent(self.keep) if recent is None else recent

    def _ends(self, positions: np.ndarray) -> dict[str, Any]:
        """What is forced, in rows: the rows of a compact layer are no positions."""
        sinks = self.config.sink_tokens
        if not self.config.guarantee_sinks:
            sinks = min(sinks, max(1, self.keep // 8))
        return {
            "sinks": int(np.searchsorted(positions, sinks)),
            "recent": self._recent(),
            "protected": self._ranges(positions),
        }

    def _ranges(self, positions: np.ndarray) -> list[tuple[int, int]]:
        ends = [np.searchsorted(positions, pair).tolist() for pair in self.config.protect]
        return [(start, stop) for start, stop in ends if start < stop]


def _heads(cache: Any) -> int:
    return cache.keys.shape[1] if is_plain(cache) else row_groups(cache)[0].layer_heads


def _held(cache: Any, sets: int) -> np.ndarray:
    """Rows [S] that each set of a layer holds."""
    held = np.zeros(_heads(cache), np.int64)
    for group in row_groups(cache):
        held[group.heads] = group.keys.shape[1]
    return held[:1] if sets == 1 else held


def require_compatible(config: EvictionConfig, policy: Policy, allocation: Allocation) -> None:
    """Refuse a choice of policy, allocation and store that has no meaning.

    Raises:
        ConfigError: says which two exclude each other, and why.
    """
    if allocation.by_head and config.store in ("shared", "per-head"):
        raise ConfigError(
            f"allocation {allocation.name!r} gives heads of a layer unequal numbers of rows",
            expected="store 'ragged' or 'union' (or 'auto')",
            received=f"store {config.store!r}",
        )
    if allocation.by_head and allocation.sight != "nothing" and policy.scope == "model":
        raise ConfigError(
            f"allocation {allocation.name!r} compares heads, and policy {policy.name!r} has one"
            " score for all of them",
            expected="a policy that scores each head, such as 'snapkv'",
            received=policy.name,
        )


def require_one_count(allocation: Allocation) -> None:
    """Refuse counts that differ by layer where the model needs one set of rows.

    Raises:
        ConfigError: names the allocation that would do.
    """
    if allocation.name != "uniform":
        raise ConfigError(
            "one mask serves all layers and heads of this model: they keep one set of rows",
            expected="allocation 'uniform'",
            received=allocation.name,
        )


def require_choosable(
    cache: list[Any],
    layers: list[int],
    config: EvictionConfig,
    policy: Policy,
    *,
    one_set: bool = False,
) -> None:
    """Refuse layers whose present positions the policy or the store cannot work on.

    Args:
        one_set: the model needs one set of positions for all its layers and heads.

    Raises:
        CacheError: layers or heads hold different positions and one set for all of them is
            asked for.
    """
    held = [_positions(cache[index]) for index in layers]
    by_head = any(len(positions) > 1 for positions in held)
    if policy.scope == "model" or one_set:
        differ = by_head or any(not np.array_equal(p[0], held[0][0]) for p in held)
        who = "this model's own attention" if one_set else f"policy {policy.name!r}"
        asked = f"{who} keeps one set of rows for the whole model"
    else:
        differ = by_head and config.store == "shared"
        asked = "store 'shared' keeps one set of rows for all heads of a layer"
    if differ:
        raise CacheError(
            asked,
            expected="layers and heads that all hold the same positions",
            received="rows that were chosen one by one in an earlier compaction",
            remedy="Go on with the policy and the store of that one, such as 'snapkv' per head.",
        )


def _positions(cache: Any) -> list[np.ndarray]:
    """The different sets of positions that a layer's heads hold."""
    if is_plain(cache):
        return [np.arange(cache.offset)]
    return [positions for group in row_groups(cache) for positions in group.positions]
