"""CAKE's layer budgets: more rows where attention is wide and changes over the window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np

from kvkeep.allocation.apportion import rows_by_layer
from kvkeep.allocation.base import Allocation, Demand, Sight
from kvkeep.errors import ConfigError
from kvkeep.policies import window_shape
from kvkeep.spec import LayerView


@dataclass(frozen=True)
class CakeLayers(Allocation):
    """A layer's part of the total is entropy^(1/tau1) * variance^(1/tau2).

    Both are of the softmax attention of the last 32 queries over the keys before them:
    -sum a log a over heads, queries and keys, and the sum over heads and keys of the variance
    over the queries (divisor W - 1). A layer that would get more than it holds hands the
    surplus to the others.

    Source: Qin et al., "CAKE", arXiv:2503.12491, section 4.1 and 4.2. The authors tune tau1
    and tau2 per model and budget (1.6 and 0.4 for Llama-3.1-8B at 1024 rows); 1 and 1 is what
    their code takes for a model without such figures.

    Attributes:
        tau1: how little the entropy counts.
        tau2: how little the variance counts.

    Raises:
        ConfigError: one of them is not a finite number above 0.
    """

    tau1: float = 1.0
    tau2: float = 1.0

    name: ClassVar[str] = "cake"
    sight: ClassVar[Sight] = "model"
    window: ClassVar[int] = 32
    summary: ClassVar[str] = "more rows in layers whose attention is wide and changing"
    source: ClassVar[str] = "CAKE, arXiv:2503.12491"

    def preference(self, view: LayerView) -> float:
        """entropy^(1/tau1) * variance^(1/tau2) of one layer, >= 0.

        Raises:
            ConfigError: the view has no queries.
        """
        _, length, _ = view.keys.shape
        shape = window_shape(view)
        width = view.queries.shape[1]  # type: ignore[union-attr]  # window_shape refused None
        if width == length:
            return 1.0  # no key before the window: layers do not differ
        total, squares, entropy = (part[:, : length - width] for part in shape)
        variance = mx.maximum(squares - total * total / width, 0).sum() / max(width - 1, 1)
        spread, change = float(entropy.sum()), float(variance)
        return max(spread, 0.0) ** (1 / self.tau1) * change ** (1 / self.tau2)

    def counts(self, demand: Demand) -> list[np.ndarray]:
        """[S] counts per layer in proportion to the preferences."""
        if len(demand.preferences) != len(demand.heads):
            raise ConfigError(
                "allocation 'cake' deals out rows by the layers' preferences",
                expected=f"{len(demand.heads)} of them",
                received=f"{len(demand.preferences)}",
            )
        return rows_by_layer(demand.preferences, demand)
