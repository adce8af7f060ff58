"""The same number of rows in each layer and head."""

from __future__ import annotations

import operator
from typing import SupportsIndex

import numpy as np

from kvkeep.errors import BudgetError, ConfigError, KvkeepError


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


def checked_count(
    name: str,
    value: SupportsIndex,
    least: int,
    error: type[KvkeepError] = ConfigError,
) -> int:
    """`value` as a Python int; NumPy's whole numbers count, bool and float do not.

    Raises:
        KvkeepError: of class `error`, when it is no whole number or less than `least`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise error(
            f"bad value for {name}",
            expected=f"a whole number >= {least}",
            received=repr(value),
        )
    return number
