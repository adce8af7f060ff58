"""How many rows each layer and head gets: one file per rule, pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import numpy as np

from kvkeep.allocation.pyramid import pyramid_budgets
from kvkeep.allocation.uniform import uniform_counts
from kvkeep.errors import ConfigError

#: (rows per KV head, layers, KV heads) -> rows [L, H_kv]; the sum is their product.
Allocation = Callable[[int, int, int], np.ndarray]

ALLOCATIONS: dict[str, Allocation] = {"uniform": uniform_counts}


def get_allocation(name: str) -> Allocation:
    """The registered allocation of that name.

    Raises:
        ConfigError: there is none; the message names the nearest one.
    """
    if isinstance(name, str) and name in ALLOCATIONS:
        return ALLOCATIONS[name]
    near = difflib.get_close_matches(str(name), ALLOCATIONS, n=1)
    raise ConfigError(
        "unknown allocation",
        expected=f"one of {', '.join(sorted(ALLOCATIONS))}",
        received=repr(name),
        remedy=f"Did you mean {near[0]!r}?" if near else None,
    )


__all__ = ["ALLOCATIONS", "Allocation", "get_allocation", "pyramid_budgets", "uniform_counts"]
