"""Span: the window's sharpest attention, averaged over as many positions as a fact has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.base import Need, Scope, WindowPolicy
from kvkeep.policies.grouping import grouped
from kvkeep.policies.window import window_cubes
from kvkeep.spec import LayerView


@dataclass(frozen=True)
class Span(WindowPolicy):
    """Cubed attention of the window's queries, pooled, the group's maximum.

        s(h, t) = pool(sum over i of c_i a(h, i, t)^3),  score = max of s over the group

    where a(h, i, t) is the attention of the window's i-th query and c_i = (i + 1) / (1 + … + W).
    SnapKV with four parts replaced, each for a reason that docs/results shows with figures:

    - Cubes instead of the attention itself: few of the last 32 tokens are the question, and a
      mean drowns the one query that asks. Powers are pooled, no root is taken: one look that is
      sharp lifts everything around it.
    - Later queries weigh more: the question tends to be the last thing said.
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
    summary: ClassVar[str] = "cubed attention of the last W queries, over a fact's width"
    source: ClassVar[str] = "kvkeep, after SnapKV, arXiv:2404.14469"

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32; window rows hold the layer's maximum + 1."""
        kv_heads, length, _ = view.keys.shape
        cubes = window_cubes(view)
        width = view.queries.shape[1]  # type: ignore[union-attr]  # window_cubes refused None

        def prefix(first: int, stop: int) -> mx.array:
            return cubes[first:stop, : length - width]

        pool = self.pool_kernel, self.pooling, self.group
        return grouped(prefix, len(cubes), kv_heads, length, width, *pool)
