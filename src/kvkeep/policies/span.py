"""Span: the window's sharpest attention, averaged over as many positions as a fact has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.base import Need, Scope, WindowPolicy
from kvkeep.policies.grouping import grouped
from kvkeep.policies.window import window_moments
from kvkeep.spec import LayerView


@dataclass(frozen=True)
class Span(WindowPolicy):
    """Mean square over the window of softmax attention, pooled, the group's maximum.

        s(h, t) = pool(mean over w of a(h, w, t)^2),  score = max of s over the group

    SnapKV with three parts replaced, each for a reason that docs/results shows with figures:

    - The mean square over the window instead of the mean: few of the last 32 tokens are the
      question, and a mean drowns the one query that asks.
    - Pooling as wide as a fact: a number spans many tokens where digits are tokens, and only
      the words before it match the question.
    - The maximum over the query heads of a group: one head that retrieves is enough.

    The window's own columns are cut off and rank above everything (max over the layer + 1).

    Source: kvkeep, after Li et al., "SnapKV", arXiv:2404.14469. Query-aware.

    Attributes:
        window: W, the last prompt queries that score.
        pool_kernel: odd width of the pooling, in positions.
        pooling: "avg" (zero padding, constant divisor), "max" or "none".
        group: "max" or "mean" over the query heads of a KV head.

    Raises:
        ConfigError: an option is out of range.
    """

    window: int = 32
    pool_kernel: int = 25
    pooling: str = "avg"
    group: str = "max"

    name: ClassVar[str] = "span"
    needs: ClassVar[frozenset[Need]] = frozenset({"queries", "keys"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = True
    summary: ClassVar[str] = "squared attention of the last W queries, over a fact's width"
    source: ClassVar[str] = "kvkeep, after SnapKV, arXiv:2404.14469"

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32; window rows hold the layer's maximum + 1."""
        kv_heads, length, _ = view.keys.shape
        squares = window_moments(view)[1]
        width = view.queries.shape[1]  # type: ignore[union-attr]  # window_moments refused None

        def mean_square(first: int, stop: int) -> mx.array:
            return squares[first:stop, : length - width] / width

        pool = self.pool_kernel, self.pooling, self.group
        return grouped(mean_square, len(squares), kv_heads, length, width, *pool)
