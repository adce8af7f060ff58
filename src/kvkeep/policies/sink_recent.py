"""Sinks and recency: the base line that looks at nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.base import Need, Policy, Scope
from kvkeep.spec import LayerView


@dataclass(frozen=True)
class SinkRecent(Policy):
    """The later, the higher: with the sinks that selection forces, first s + most recent.

    Inspired by StreamingLLM (Xiao et al., arXiv:2309.17453). Unlike there, kept keys stay at
    their own positions instead of being rotated to new ones. Query-agnostic.
    """

    name: ClassVar[str] = "sink_recent"
    needs: ClassVar[frozenset[Need]] = frozenset()
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = False
    summary: ClassVar[str] = "the first positions and the most recent"
    source: ClassVar[str] = "after StreamingLLM, arXiv:2309.17453"

    def default_recent(self, budget: int) -> int:
        """None has to be forced: the scores rise to the end."""
        return 0

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32: the row's index (exact up to 2**24 rows)."""
        kv_heads, length, _ = view.keys.shape
        return mx.broadcast_to(mx.arange(length, dtype=mx.float32), (kv_heads, length))
