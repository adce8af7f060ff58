"""The same number of rows in each layer and head."""

from __future__ import annotations

import numpy as np

from kvkeep.errors import BudgetError
from kvkeep.spec import checked_count


def uniform_counts(total_per_head: int, n_layers: int, n_heads: int) -> np.ndarray:
    """Rows to keep per layer and KV head: `total_per_head` everywhere.

    Returns:
        [L, H_kv] int64; the sum is total_per_head * n_layers * n_heads.

    Raises:
        BudgetError: `total_per_head` is not a whole number >= 1.
        ConfigError: `n_layers` or `n_heads` is not a whole number >= 1.
    """
    rows = checked_count("total_per_head", total_per_head, 1, BudgetError)
    layers = checked_count("n_layers", n_layers, 1)
    heads = checked_count("n_heads", n_heads, 1)
    return np.full((layers, heads), rows, dtype=np.int64)
