"""Choosing: views of a prefilled cache become kept positions. No cache is changed here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvkeep.attention import Observation
from kvkeep.caches import is_exact, layer_positions, layer_rows
from kvkeep.errors import CacheError
from kvkeep.policies import Policy
from kvkeep.selection import select_rows
from kvkeep.spec import EvictionConfig, LayerSelection, LayerView


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

    def layer(self, cache: Any, index: int) -> LayerSelection:
        """Kept positions of one layer, per head or shared as the store asks."""
        scores = self.policy.score(self._view(cache, index))
        if self.config.store == "shared":
            scores = scores.mean(axis=0, keepdims=True)
        return self._select(scores, cache)

    def model(self, caches: list[Any], layers: list[int]) -> LayerSelection:
        """One set of positions for all layers, from scores summed over them."""
        held = [layer_positions(cache) for cache in caches]
        if any(p.shape != held[0].shape or (p != held[0]).any() for p in held) or len(held[0]) > 1:
            raise CacheError(
                f"policy {self.policy.name!r} keeps one set of rows for the whole model",
                expected="layers that all hold the same positions",
                received="layers that were compacted one by one",
                remedy="Use a policy that scores per layer, such as 'snapkv'.",
            )
        if self.seen.capture is not None:
            rows = held[0].shape[1]
            return self._select(mx.array(self.seen.capture.snap_scores(rows))[None], caches[0])
        total = mx.zeros((1, held[0].shape[1]))
        for cache, index in zip(caches, layers, strict=True):
            total = total + self.policy.score(self._view(cache, index)).sum(axis=0, keepdims=True)
            mx.eval(total)
        return self._select(total, caches[0])

    def _view(self, cache: Any, index: int) -> LayerView:
        keys, values = layer_rows(cache)
        observer = self.seen.observers.get(index)
        queries = None if observer is None or observer.queries is None else observer.queries[0]
        return LayerView(
            keys=keys,
            values=values,
            queries=queries,
            scale=1.0 if observer is None else observer.scale,
            layer=index,
            n_layers=self.n_layers,
            sinks=None if observer is None else observer.sinks,
            score_chunk_size=self.config.score_chunk_size,
        )

    def _select(self, scores: mx.array, cache: Any) -> LayerSelection:
        config, keep = self.config, self.keep
        recent = config.recent_tokens
        recent = self.policy.default_recent(keep) if recent is None else recent
        sinks = config.sink_tokens
        if not config.guarantee_sinks:
            sinks = min(sinks, max(1, keep // 8))
        held = layer_positions(cache)
        if is_exact(cache):
            rows = select_rows(scores, keep, sinks=sinks, recent=recent, protected=config.protect)
            return LayerSelection(tuple(rows))
        table = np.asarray(scores.astype(mx.float32))
        table = _lift_protected(table, held, config.protect)
        # Heads of a compact layer hold different positions: rows are chosen, then named.
        rows = select_rows(table, keep, sinks=_rows_below(held, sinks), recent=recent)
        held = np.broadcast_to(held, (len(rows), held.shape[1])) if len(held) == 1 else held
        return LayerSelection(tuple(np.take_along_axis(held, rows, axis=1)))


def _lift_protected(
    scores: np.ndarray, held: np.ndarray, protect: tuple[tuple[int, int], ...]
) -> np.ndarray:
    """Scores with protected positions above all others (compact layers: held [1|H, R])."""
    if not protect:
        return scores
    inside = np.zeros(held.shape, bool)
    for start, stop in protect:
        inside |= (held >= start) & (held < stop)
    return np.where(inside, scores.max() + 1, scores)


def _rows_below(held: np.ndarray, position: int) -> int:
    """Rows that every head holds in front of `position`."""
    return int((held < position).sum(axis=1).min())
