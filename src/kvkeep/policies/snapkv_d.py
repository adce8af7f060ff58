"""SnapKV-D: one keep set for the whole model, from the window's summed attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.base import Need, Scope, WindowPolicy
from kvkeep.policies.window import window_mass
from kvkeep.spec import LayerView


@dataclass(frozen=True)
class SnapKVD(WindowPolicy):
    """Sum over window queries, heads and layers of softmax attention; no pooling.

    Source: mlx-lm pull request 1518. Query-aware.

    Attributes:
        window: W, the last prompt queries that score.

    Raises:
        ConfigError: the window is below 1.
    """

    window: int = 24

    name: ClassVar[str] = "snapkv-d"
    needs: ClassVar[frozenset[Need]] = frozenset({"queries", "keys"})
    scope: ClassVar[Scope] = "model"
    query_aware: ClassVar[bool] = True
    summary: ClassVar[str] = "attention of the last W queries, summed over heads and layers"
    source: ClassVar[str] = "mlx-lm pull request 1518"

    def default_recent(self, budget: int) -> int:
        """An eighth of the budget, as in the seed."""
        return max(1, budget // 8)

    def score(self, view: LayerView) -> mx.array:
        """This layer's share of the score: [H_kv, T] float32, summed over window and group."""
        kv_heads, length, _ = view.keys.shape
        return window_mass(view).reshape(kv_heads, -1, length).sum(axis=1)
