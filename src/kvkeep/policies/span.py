"""Span: the window's sharpest attention, averaged over as many positions as a fact has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.base import Need, Policy, Scope
from kvkeep.policies.grouping import grouped
from kvkeep.policies.window import window_cubes
from kvkeep.spec import LayerView

GAP = 16  # positions: nearer rows are read whatever they say
_RECENT = 32  # rows: a question and the template's end


@dataclass(frozen=True)
class Span(Policy):
    """Cubed attention of the window's queries, pooled, the group's maximum.

        s(h, t) = pool(sum over i of c_i a(h, i, t)^3),  score = max of s over the group

    where a(h, i, t) is the attention of the window's i-th query, 0 for a row t fewer than 16
    positions before it, and c_i = (i + 1) / (1 + ... + W). Measured against SnapKV, whose parts
    it replaces one by one (docs/results has the figures):

    - Cubes instead of the attention itself: few of the last 64 tokens are the question, and a
      mean drowns the one query that asks. Powers are pooled, no root is taken: one look that is
      sharp lifts everything around it.
    - Later queries weigh more: the question tends to be among the last things said.
    - Rows of the window compete like all others, so that a window long enough to hold the
      question and an instruction after it takes no room from the rest. The last 32 rows are
      the recent ones that stay.
    - Pooling as wide as a fact: a number spans many tokens where digits are tokens, and only
      the words before it match the question.
    - The maximum over the query heads of a group: one head that retrieves is enough.

    Rows that no query attends to from far enough, the last 16 among them, score near 0.

    Source: kvkeep, after Li et al., "SnapKV", arXiv:2404.14469. Query-aware.

    Attributes:
        window: W, the last prompt queries that score. A question further from the end is not
            seen.
        pool_kernel: odd width of the pooling, in positions.
        pooling: "avg" (zero padding, constant divisor), "max" or "none".
        group: "max" or "mean" over the query heads of a KV head.

    Raises:
        ConfigError: an option is out of range.
    """

    window: int = 64
    pool_kernel: int = 25
    pooling: str = "avg"
    group: str = "max"

    name: ClassVar[str] = "span"
    needs: ClassVar[frozenset[Need]] = frozenset({"queries", "keys"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = True
    summary: ClassVar[str] = "cubed attention of the last W queries, over a fact's width"
    source: ClassVar[str] = "kvkeep, after SnapKV, arXiv:2404.14469"

    @property
    def observation_window(self) -> int:
        """W."""
        return self.window

    def default_recent(self, budget: int) -> int:
        """32: less than the window, which need not stay."""
        return _RECENT

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32."""
        kv_heads, length, _ = view.keys.shape
        cubes = self._cubes(view)
        pool = self.pool_kernel, self.pooling, self.group
        return grouped(lambda a, b: cubes[a:b], len(cubes), kv_heads, length, 0, *pool)

    def _cubes(self, view: LayerView) -> mx.array:
        """[H_q, T] float32: s(h, t) before pooling."""
        return window_cubes(view, GAP)
