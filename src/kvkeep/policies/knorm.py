"""Knorm: keys of small length stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.base import Need, Scope
from kvkeep.policies.pieces import by_position, squares
from kvkeep.spec import LayerView


@dataclass(frozen=True)
class Knorm:
    """The negative Euclidean length of the key, in float32: -||k||.

    In bfloat16 most lengths would tie.

    Source: Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache
    Compression", arXiv:2406.11430; kvpress 0.5.5 knorm_press.py. Query-agnostic.
    """

    name: ClassVar[str] = "knorm"
    needs: ClassVar[frozenset[Need]] = frozenset({"keys"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = False
    summary: ClassVar[str] = "keys of small length"
    source: ClassVar[str] = "L2 norm, arXiv:2406.11430"

    @property
    def observation_window(self) -> int:
        """No query is needed."""
        return 0

    def default_recent(self, budget: int) -> int:
        """An eighth of the budget: lengths alone would evict the end of the question."""
        return max(1, budget // 8)

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32."""
        return by_position(view.keys, lambda keys: -mx.sqrt(squares(keys)))
