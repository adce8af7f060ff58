"""Random rows: the control at the same budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np

from kvkeep.policies.base import Need, Policy, Scope
from kvkeep.spec import LayerView


@dataclass(frozen=True)
class Random(Policy):
    """Uniform draws in [0, 1), independent in every layer and KV head.

    The seed and the layer's index determine a layer's draws (NumPy's PCG64), whatever else was
    drawn before. Protections are those of `snapkv-d`, so that the two differ in the scores only.

    Query-agnostic.

    Attributes:
        seed: of the draws, a whole number >= 0.

    Raises:
        ConfigError: the seed is out of range.
    """

    seed: int = 0

    name: ClassVar[str] = "random"
    needs: ClassVar[frozenset[Need]] = frozenset()
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = False
    summary: ClassVar[str] = "random rows, independent per layer and head"
    source: ClassVar[str] = "the control"

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32."""
        kv_heads, length, _ = view.keys.shape
        generator = np.random.default_rng((self.seed, view.layer))
        return mx.array(generator.random((kv_heads, length), dtype=np.float32))
