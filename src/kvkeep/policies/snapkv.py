"""SnapKV: window attention per KV head, pooled over positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.base import Need, Scope, WindowPolicy
from kvkeep.policies.grouping import grouped
from kvkeep.policies.window import window_mass
from kvkeep.spec import LayerView


@dataclass(frozen=True)
class SnapKV(WindowPolicy):
    """Mean over the window of softmax attention, pooled, then the mean over the group.

    The softmax runs over all T keys; the window's own columns are then cut off and rank
    above everything (max over the layer + 1), so the window counts inside the budget.
    Pooling comes before the group mean (or maximum): they do not commute in general.

    Source: Li et al., "SnapKV", arXiv:2404.14469, section 4; kvpress 0.5.5
    snapkv_press.py, which window 64 and kernel 5 reproduce. The defaults here differ
    (window 8, kernel 31): pooling has to be as wide as what must survive, and a number
    spans many tokens where the tokenizer splits digits. Query-aware.

    Attributes:
        window: W, the last prompt queries that score.
        pool_kernel: odd width of the pooling, in positions.
        pooling: "avg" (zero padding, constant divisor), "max" or "none".
        group: "mean" or "max" over the query heads of a KV head.

    Raises:
        ConfigError: an option is out of range.
    """

    window: int = 8
    pool_kernel: int = 31
    pooling: str = "avg"
    group: str = "mean"

    name: ClassVar[str] = "snapkv"
    needs: ClassVar[frozenset[Need]] = frozenset({"queries", "keys"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = True
    summary: ClassVar[str] = "attention of the last W queries per KV head, pooled over positions"
    source: ClassVar[str] = "SnapKV, arXiv:2404.14469"

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32; window rows hold the layer's maximum + 1."""
        kv_heads, length, _ = view.keys.shape
        mass = window_mass(view)
        width = view.queries.shape[1]  # type: ignore[union-attr]  # window_mass refused None

        def mean(first: int, stop: int) -> mx.array:
            return mass[first:stop, : length - width] / width

        pool = self.pool_kernel, self.pooling, self.group
        return grouped(mean, len(mass), kv_heads, length, width, *pool)
