"""A layer's rows as groups of heads that hold equally many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class RowGroup:
    """Heads of one layer that hold equally many rows.

    Attributes:
        heads: int [n], the KV heads, ascending.
        keys: [n, R, D].
        values: [n, R, D_v].
        positions: int [1, R] where the heads share them, else [n, R]; ascending.
        layer_heads: H_kv, all KV heads of the layer.
    """

    heads: np.ndarray
    keys: mx.array
    values: mx.array
    positions: np.ndarray
    layer_heads: int


def whole_group(layer: Any, positions: np.ndarray) -> RowGroup:
    """All heads of a layer whose buffer is rectangular, as one group."""
    keys, values = layer.keys_and_values()
    return RowGroup(np.arange(keys.shape[1]), keys[0], values[0], positions, keys.shape[1])
