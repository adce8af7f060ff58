"""The same number of rows in each layer and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvkeep.allocation.apportion import rows_by_layer
from kvkeep.allocation.base import Allocation, Demand


@dataclass(frozen=True)
class Uniform(Allocation):
    """`keep` rows in each layer and head. Source: SnapKV and most others."""

    name: ClassVar[str] = "uniform"
    summary: ClassVar[str] = "the same number of rows in each layer and head"
    source: ClassVar[str] = "SnapKV, arXiv:2404.14469"

    def counts(self, demand: Demand) -> list[np.ndarray]:
        """[S] counts per layer, all equal to `keep` or to what is held."""
        return rows_by_layer(np.ones(len(demand.heads)), demand)
