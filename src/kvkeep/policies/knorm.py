"""Knorm: keys of small length stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.base import Need, Policy, Scope
from kvkeep.policies.pieces import by_position, squares
from kvkeep.spec import LayerView


@dataclass(frozen=True)
class Knorm(Policy):
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

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32."""
        return by_position(view.keys, lambda keys: -mx.sqrt(squares(keys)))
