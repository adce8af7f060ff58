"""Any single-request layer, read as flat rows that each head holds at its positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from kvkeep.errors import CacheError, SelectionError
from kvkeep.spec import LayerSelection


@dataclass(frozen=True)
class HeldRows:
    """Rows of a layer, whatever stores them.

    Attributes:
        keys: [N, D], flat; rows that no head holds may be among them.
        values: [N, D_v], at the same rows.
        positions: true positions of each KV head, ascending int [R_h].
        rows: flat row of each of them, int [R_h].
    """

    keys: mx.array
    values: mx.array
    positions: Sequence[np.ndarray]
    rows: Sequence[np.ndarray]

    @property
    def heads(self) -> int:
        """H_kv."""
        return len(self.positions)

    def of(self, kept: LayerSelection) -> list[np.ndarray]:
        """Flat rows of the kept positions, per KV head.

        Raises:
            SelectionError: a head does not hold one of its positions.
            CacheError: the selection has another number of heads.
        """
        if len(kept.heads) not in (1, self.heads):
            raise CacheError(
                "selection does not fit the layer",
                expected=f"one set of positions, or {self.heads} (KV heads)",
                received=len(kept.heads),
            )
        return [self._of_head(head, kept.of_head(head)) for head in range(self.heads)]

    def _of_head(self, head: int, wanted: np.ndarray) -> np.ndarray:
        held = self.positions[head]
        found = np.searchsorted(held, wanted)
        inside = found < len(held)
        if not (inside.all() and (held[found] == wanted).all()):
            raise SelectionError(
                "a position to keep is already evicted",
                expected="positions that the layer holds",
                received=f"{len(wanted)} positions, not all among its {len(held)} rows",
            )
        return self.rows[head][found]


def rows_of_buffers(keys: mx.array, values: mx.array, length: int) -> HeldRows:
    """An exact layer's first `length` rows (buffers [1, H_kv, >= length, D])."""
    heads, capacity = keys.shape[1], keys.shape[2]
    positions = np.arange(length)
    rows = [positions + head * capacity for head in range(heads)]
    return HeldRows(flattened(keys), flattened(values), [positions] * heads, rows)


def rows_of_rectangle(
    keys: mx.array, values: mx.array, positions: Sequence[np.ndarray], used: int
) -> HeldRows:
    """Rows of buffers [1, H_kv, >= used, D], right-justified where heads hold unequal numbers.

    Args:
        positions: of each head, or one array where all heads share them.
    """
    heads, capacity = keys.shape[1], keys.shape[2]
    held = list(positions) * (heads if len(positions) == 1 else 1)
    rows = [head * capacity + used - len(p) + np.arange(len(p)) for head, p in enumerate(held)]
    return HeldRows(flattened(keys), flattened(values), held, rows)


def flattened(buffer: mx.array) -> mx.array:
    """[1, H_kv, rows, D] as [H_kv * rows, D]."""
    return buffer.reshape(buffer.shape[1] * buffer.shape[2], buffer.shape[3])


def taken_rows(flat: mx.array, index: np.ndarray) -> mx.array:
    """Rows index [H_kv, R] of a flat buffer as [1, H_kv, R, D]."""
    heads, rows = index.shape
    if rows == 0:
        return mx.zeros((1, heads, 0, flat.shape[1]), flat.dtype)
    taken = mx.take(flat, mx.array(index.reshape(-1)), axis=0)
    return taken.reshape(1, heads, rows, flat.shape[1])
