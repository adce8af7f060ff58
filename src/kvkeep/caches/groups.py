"""A layer's rows as groups of heads that hold equally many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvkeep.caches.held import HeldRows


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


def gathered_groups(held: HeldRows) -> tuple[RowGroup, ...]:
    """Heads by the number of rows that they hold, each group's rows copied together."""
    by_count: dict[int, list[int]] = {}
    for head, rows in enumerate(held.rows):
        by_count.setdefault(len(rows), []).append(head)
    groups = []
    for count, heads in by_count.items():
        index = np.concatenate([held.rows[head] for head in heads]).astype(np.uint32)
        keys, values = (
            mx.take(side, mx.array(index), axis=0).reshape(len(heads), count, side.shape[1])
            for side in (held.keys, held.values)
        )
        groups.append(RowGroup(np.array(heads), keys, values, table_of(held, heads), held.heads))
    return tuple(groups)


def table_of(held: HeldRows, heads: Sequence[int]) -> np.ndarray:
    """Positions of heads that hold equally many: [1, R] where they share them, else [n, R]."""
    table = np.stack([held.positions[head] for head in heads])
    return table[:1] if (table == table[0]).all() else table
