"""CAKE's token score: attention that is high, or that changes over the window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.base import Need, Scope, WindowPolicy
from kvkeep.policies.grouping import grouped
from kvkeep.policies.window import window_moments
from kvkeep.spec import LayerView


@dataclass(frozen=True)
class Cake(WindowPolicy):
    """Mean + gamma * variance over the window of softmax attention, pooled, group mean.

    The variance has the divisor W - 1 and is 0 for one query. The softmax runs over all T
    keys; the window's own columns are then cut off and rank above everything (max over the
    layer + 1). Ports of CAKE take the mean or the maximum over the group; here it is the mean,
    as for `snapkv`. This is the score only: CAKE's layer budgets are an allocation.

    Source: Qin et al., "CAKE", arXiv:2503.12491, section 4.3. Query-aware.

    Attributes:
        window: W, the last prompt queries that score.
        gamma: weight of the variance.
        pool_kernel: odd width of the pooling, in positions.
        pooling: "avg" (zero padding, constant divisor), "max" or "none".

    Raises:
        ConfigError: an option is out of range.
    """

    window: int = 32
    gamma: float = 200.0
    pool_kernel: int = 5
    pooling: str = "avg"

    name: ClassVar[str] = "cake"
    needs: ClassVar[frozenset[Need]] = frozenset({"queries", "keys"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = True
    summary: ClassVar[str] = "mean + gamma * variance of the last W queries' attention, pooled"
    source: ClassVar[str] = "CAKE, arXiv:2503.12491"

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32; window rows hold the layer's maximum + 1."""
        kv_heads, length, _ = view.keys.shape
        moments = window_moments(view)
        width = view.queries.shape[1]  # type: ignore[union-attr]  # window_moments refused None

        def mean_and_variance(first: int, stop: int) -> mx.array:
            total, square = moments[:, first:stop, : length - width]
            # Float32 differences of squares: wrong by about 1e-7 * mean^2, which the mean hides.
            spread = mx.maximum(square - total * total / width, 0)
            return total / width + self.gamma * spread / max(width - 1, 1)

        heads = moments.shape[1]
        return grouped(
            mean_and_variance, heads, kv_heads, length, width, self.pool_kernel, self.pooling
        )
