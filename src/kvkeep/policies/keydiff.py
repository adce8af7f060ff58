"""KeyDiff: keys that differ from the mean direction stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.base import Need, Policy, Scope
from kvkeep.policies.pieces import by_position, mean_direction, unit
from kvkeep.spec import LayerView


@dataclass(frozen=True)
class KeyDiff(Policy):
    """-cos(k, mean over positions of k / ||k||), per KV head, in float32.

    A key of length 0, or a mean of length 0, has cosine 0.

    Source: Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction", arXiv:2504.15364,
    section 3; kvpress 0.5.5 keydiff_press.py. Query-agnostic.
    """

    name: ClassVar[str] = "keydiff"
    needs: ClassVar[frozenset[Need]] = frozenset({"keys"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = False
    summary: ClassVar[str] = "keys far from the mean direction"
    source: ClassVar[str] = "KeyDiff, arXiv:2504.15364"

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32, between -1 and 1."""
        direction = unit(mean_direction(view.keys))
        return by_position(view.keys, lambda keys: -(unit(keys) * direction).sum(axis=-1))
