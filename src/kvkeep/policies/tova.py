"""TOVA: what the last token attends to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.base import Need, Policy, Scope
from kvkeep.policies.window import window_mass
from kvkeep.spec import LayerView


@dataclass(frozen=True)
class Tova(Policy):
    """Softmax attention of the last query, mean over all query heads; the last row on top.

    All KV heads get the same scores. The last position holds the maximum + 1.

    Source: Oren et al., "Transformers are Multi-State RNNs", arXiv:2401.06104, section 4,
    applied once after the prompt as in kvpress 0.5.5 tova_press.py. Query-aware.
    """

    name: ClassVar[str] = "tova"
    needs: ClassVar[frozenset[Need]] = frozenset({"queries", "keys"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = True
    summary: ClassVar[str] = "attention of the last query, mean over all heads"
    source: ClassVar[str] = "TOVA, arXiv:2401.06104"

    @property
    def observation_window(self) -> int:
        """One query."""
        return 1

    def default_recent(self, budget: int) -> int:
        """The last row."""
        return 1

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32, the same for every head.

        Raises:
            ConfigError: the view has no queries.
        """
        kv_heads, length, _ = view.keys.shape
        if length == 1:
            return mx.ones((kv_heads, 1))
        if view.queries is not None:
            view = replace(view, queries=view.queries[:, -1:])
        attention = window_mass(view).mean(axis=0)[:-1]
        scores = mx.concatenate([attention, attention.max(keepdims=True) + 1])
        return mx.broadcast_to(scores, (kv_heads, length))
