"""The compact cache: kept rows at their true positions, appended rows after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvkeep.caches.base import CompactCache
from kvkeep.caches.held import HeldRows, rows_of_rectangle
from kvkeep.caches.ledger import PositionLedger
from kvkeep.caches.rows import gather_rows, require_single, with_room
from kvkeep.errors import CacheError
from kvkeep.spec import LayerSelection

#: [R] for all heads, or [H_kv][R].
Positions = Sequence[int] | Sequence[Sequence[int]] | Sequence[np.ndarray] | np.ndarray


class RectangularCache(CompactCache):
    """K/V rows in one buffer each, the same number for every head.

    Args:
        keys: [1, H_kv, R, D] post-RoPE, or None for an empty cache.
        values: [1, H_kv, R, D_v].
        offset: the next true position.
        protected_stored: leading rows that a speculative roll-back never removes;
            None protects all R.
        positions: [R] for all heads, or [H_kv][R]; ascending, unique, below `offset`.
            None means 0 … R-1, which is refused unless `offset` is R.

    Raises:
        CacheError: shapes, offset and positions do not fit each other.
        SelectionError: positions are not sorted, unique and non-negative.
    """

    def __init__(
        self,
        keys: mx.array | None = None,
        values: mx.array | None = None,
        *,
        offset: int = 0,
        protected_stored: int | None = None,
        positions: Positions | None = None,
    ) -> None:
        rows = _checked_rows(keys, values)
        self._own(keys, values)
        self._ledger = _ledger_of(positions, int(offset), rows, keys)
        protected = rows if protected_stored is None else int(protected_stored)
        if not 0 <= protected <= rows:
            raise CacheError(
                "protected_stored out of range",
                expected=f"between 0 and the {rows} stored rows",
                received=protected,
            )
        self._protected = protected
        self._speculation_rows = None

    def _own(self, keys: mx.array | None, values: mx.array | None) -> None:
        """Take arrays without sharing them: MLX writes rows into the array object itself."""
        self.keys: Any = None if keys is None else keys[...]
        self.values: Any = None if values is None else values[...]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append n tokens' rows ([1, H_kv, n, D]) and return all live rows."""
        if self.keys is None:
            require_single(keys)
        ledger, count = self._ledger, keys.shape[2]
        used = ledger.rows
        end = used + count
        self.keys = with_room(self.keys, used, keys)
        self.values = with_room(self.values, used, values)
        self.keys[..., used:end, :] = keys
        self.values[..., used:end, :] = values
        ledger.appended += count
        return self.keys[..., :end, :], self.values[..., :end, :]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Live rows [1, H_kv, R, D] (views of the buffers)."""
        rows = self._ledger.rows
        return self.keys[..., :rows, :], self.values[..., :rows, :]

    def _gather(self, rows: np.ndarray) -> None:
        self.keys, self.values = gather_rows(self.keys, rows), gather_rows(self.values, rows)

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of the whole buffers, room for appended rows included."""
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    @property
    def state(self) -> tuple[Any, ...]:
        """(keys, values, positions [H_kv or 1, kept], start, appended, protected)."""
        keys, values = (None, None) if self.keys is None else self.keys_and_values()
        ledger = self._ledger
        return keys, values, ledger.table(), ledger.start, ledger.appended, self._protected

    @state.setter
    def state(self, v: Sequence[Any]) -> None:
        if len(v) != 6:
            raise CacheError("unreadable cache state", expected="6 parts", received=len(v))
        keys, values, table, start, appended, protected = v
        rows = _checked_rows(keys, values)
        ledger = PositionLedger.from_table(table, start, appended)
        self._set_ledger_state(ledger, protected, rows, None if keys is None else keys.shape[1])
        self._own(keys, values)


class PositionPreservingKVCache(RectangularCache):
    """K/V rows whose physical index and true position differ.

    Attention needs no mask of its own: kept rows all lie before the next token, so
    mlx-lm's "causal" (aligned bottom right) is exact, also where each head keeps other
    positions. Keys keep the rotation they were stored with. For the arguments see
    `RectangularCache`.
    """

    @classmethod
    def from_selection(
        cls, keys: mx.array, values: mx.array, kept: LayerSelection, offset: int
    ) -> PositionPreservingKVCache:
        """Gather the kept rows of an exact layer (buffers [1, H_kv, >= offset, D]).

        Raises:
            CacheError: the heads keep unequal numbers of rows, or their number is wrong.
        """
        heads = kept.heads
        if not kept.equal_counts:
            raise CacheError(
                "heads keep unequal numbers of rows",
                expected="equal counts per head in this store",
                received=str(kept.counts),
            )
        if len(heads) not in (1, keys.shape[1]):
            raise CacheError(
                "selection does not fit the layer",
                expected=f"one set of positions, or {keys.shape[1]} (KV heads)",
                received=len(heads),
            )
        rows = heads[0] if kept.shared else np.stack(heads)
        kept_keys, kept_values = gather_rows(keys, rows), gather_rows(values, rows)
        return cls(kept_keys, kept_values, offset=offset, positions=rows)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """A compact quantised cache with the same positions (see `caches.quantized`)."""
        from kvkeep.caches.quantized import PositionPreservingQuantizedKVCache

        return PositionPreservingQuantizedKVCache.quantize(self, group_size, bits)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        """One batch cache of several requests' caches (compact or stock `KVCache`)."""
        from kvkeep.caches.mixing import merged

        return merged(caches)

    def held(self) -> HeldRows:
        """The live rows, each head's at its positions."""
        return rows_of_rectangle(self.keys, self.values, self._ledger.head_arrays(), self.size())

    @property
    def nbytes(self) -> int:
        """Bytes of the live K/V rows."""
        if self.keys is None:
            return 0
        per_row = sum(a.shape[0] * a.shape[-1] * a.itemsize for a in (self.keys, self.values))
        counts = self._ledger.live_head_rows
        shared = self.keys.shape[1] if len(counts) == 1 else 1
        return per_row * sum(counts) * shared


def _checked_rows(keys: mx.array | None, values: mx.array | None) -> int:
    """R, after checking that keys and values are [B, H_kv, R, D] of the same rows."""
    if keys is None and values is None:
        return 0
    fit = keys is not None and values is not None and keys.ndim == values.ndim == 4
    if keys is None or values is None or not fit or keys.shape[:3] != values.shape[:3]:
        raise CacheError(
            "keys and values do not fit each other",
            expected="two arrays [1, H_kv, R, D] with the same first three sizes",
            received=f"{getattr(keys, 'shape', None)} and {getattr(values, 'shape', None)}",
        )
    require_single(keys)
    return keys.shape[2]


def _ledger_of(positions: Any, offset: int, rows: int, keys: mx.array | None) -> PositionLedger:
    if positions is None:
        if offset != rows:
            raise CacheError(
                "sparse rows without positions",
                expected=f"positions, or offset == {rows} (the stored rows)",
                received=f"offset {offset}",
            )
        return PositionLedger.exact(rows)
    nested = len(positions) > 0 and np.ndim(positions[0]) == 1
    heads = [np.asarray(head) for head in positions] if nested else [np.asarray(positions)]
    if any(len(head) != rows for head in heads):
        raise CacheError(
            "positions do not fit the rows",
            expected=f"{rows} positions" + (" per head" if nested else ""),
            received=str([len(head) for head in heads]),
        )
    if nested and keys is not None and len(heads) != keys.shape[1]:
        raise CacheError(
            "positions do not fit the heads",
            expected=f"{keys.shape[1]} lists, one per KV head",
            received=len(heads),
        )
    return PositionLedger(heads, offset)
