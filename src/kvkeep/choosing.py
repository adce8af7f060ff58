"""Choosing: views of a prefilled cache become kept positions. No cache is changed here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvkeep.attention import Observation
from kvkeep.caches import is_exact, is_plain, layer_positions, row_groups
from kvkeep.errors import CacheError
from kvkeep.policies import Policy
from kvkeep.selection import select_rows
from kvkeep.spec import EvictionConfig, LayerSelection, LayerView
from kvkeep.views import layer_view


@dataclass(frozen=True)
class Chooser:
    """Scores layers and selects positions for one compaction.

    Attributes:
        config: protections, store and options.
        policy: what scores.
        keep: rows per KV head.
        n_layers: L, evictable layers.
        seen: the window's queries (or captured scores) of the prefill.
    """

    config: EvictionConfig
    policy: Policy
    keep: int
    n_layers: int
    seen: Observation

    def choose(self, cache: list[Any], layers: list[int]) -> dict[int, LayerSelection]:
        """Kept positions of each of these layers, per head or shared as the store asks.

        A model that attends where the seam cannot see it builds one mask from its first cache
        and lays it over all layers and heads. After a trim below the compaction point that is
        right only where all of them hold the same positions, so such a model gets one set,
        from the mean score over layers and heads.

        Raises:
            CacheError: one set is needed, and layers or heads hold different positions.
        """
        if not self.seen.all_seen:
            require_choosable(cache, layers, self.config, self.policy, one_set=True)
        if self.policy.scope == "model" or not self.seen.all_seen:
            return dict.fromkeys(layers, self._model([cache[i] for i in layers], layers))
        return {index: self._layer(cache[index], index) for index in layers}

    def _layer(self, cache: Any, index: int) -> LayerSelection:
        scores = self.policy.score(self._view(cache, index))
        if self.config.store == "shared":
            scores = scores.mean(axis=0, keepdims=True)
        return self._select(scores, cache)

    def _model(self, caches: list[Any], layers: list[int]) -> LayerSelection:
        """One set of positions for all layers, from scores summed over them."""
        rows, capture = caches[0].size(), self.seen.capture
        total = mx.array([[0.0] * rows if capture is None else capture.snap_scores(rows)])
        for cache, index in zip(caches, layers, strict=True):
            if capture is not None and index not in self.seen.observers:
                continue  # among the captured ones
            scores = self.policy.score(self._view(cache, index))
            if self.policy.scope == "model":
                total = total + scores.sum(axis=0, keepdims=True)
            else:
                total = total + scores.mean(axis=0, keepdims=True) / len(layers)
            mx.eval(total)
        return self._select(total, caches[0])

    def _view(self, cache: Any, index: int) -> LayerView:
        (group,) = row_groups(cache)
        chunk = self.config.score_chunk_size
        return layer_view(group, index, self.seen, n_layers=self.n_layers, score_chunk_size=chunk)

    def _select(self, scores: mx.array, cache: Any) -> LayerSelection:
        config, keep = self.config, self.keep
        recent = config.recent_tokens
        recent = self.policy.default_recent(keep) if recent is None else recent
        sinks = config.sink_tokens
        if not config.guarantee_sinks:
            sinks = min(sinks, max(1, keep // 8))
        if is_exact(cache):
            rows = select_rows(scores, keep, sinks=sinks, recent=recent, protected=config.protect)
            return LayerSelection(tuple(rows))
        # Heads of a compact layer hold different positions: rows are chosen, then named.
        held, table = layer_positions(cache), np.asarray(scores.astype(mx.float32))
        chosen = []
        for head, row in enumerate(table):
            positions = held[head if len(held) > 1 else 0]
            ends = [np.searchsorted(positions, ends) for ends in config.protect]
            rows = select_rows(
                row,
                keep,
                sinks=int(np.searchsorted(positions, sinks)),
                recent=recent,
                protected=[(start, stop) for start, stop in ends if start < stop],
            )
            chosen.append(positions[rows[0]])
        return LayerSelection(tuple(chosen))


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
            asked for, or a trim left heads with unequal numbers of rows.
    """
    held = [
        np.arange(cache[i].offset)[None] if is_plain(cache[i]) else layer_positions(cache[i])
        for i in layers
    ]
    by_head = any(len(positions) > 1 for positions in held)
    if policy.scope == "model" or one_set:
        differ = by_head or any(not np.array_equal(positions, held[0]) for positions in held)
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
