"""The compact cache with quantised rows (mlx-lm's --kv-bits after eviction)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvkeep.caches.base import CompactCache
from kvkeep.caches.ledger import PositionLedger
from kvkeep.caches.rows import gather_rows, require_single, with_room
from kvkeep.errors import CacheError

Quantized = tuple[mx.array, mx.array, mx.array]  # packed uint32, scales, biases


class PositionPreservingQuantizedKVCache(CompactCache):
    """Quantised rows at their true positions.

    `bits` and `group_size` are what mlx-lm's attention looks for to take its quantised
    path; it has no batch form there, so this cache has no `merge` either.
    """

    def __init__(self, group_size: int = 64, bits: int = 8) -> None:
        self.keys: Quantized | None = None
        self.values: Quantized | None = None
        self.group_size, self.bits = group_size, bits
        self._ledger = PositionLedger.exact(0)
        self._protected = 0
        self._speculation_rows = None

    @classmethod
    def quantize(cls, cache: Any, group_size: int, bits: int) -> PositionPreservingQuantizedKVCache:
        """Quantise the live rows of a `PositionPreservingKVCache`, which stays as it is.

        Raises:
            CacheError: the head size is no multiple of the group size.
        """
        quantized = cls(group_size, bits)
        quantized._ledger = cache._ledger.copy()
        quantized._protected = cache._protected
        quantized._speculation_rows = cache._speculation_rows
        if cache.keys is not None:
            keys, values = cache.keys_and_values()
            quantized.keys = quantized._pack(keys)
            quantized.values = quantized._pack(values)
        return quantized

    def _pack(self, rows: mx.array) -> Quantized:
        if rows.shape[-1] % self.group_size:
            raise CacheError(
                "head size does not fit the quantisation group",
                expected=f"a multiple of --kv-group-size {self.group_size}",
                received=f"head size {rows.shape[-1]}",
                remedy="Choose --kv-group-size 32 or 64, or leave --kv-bits off.",
            )
        packed = mx.quantize(rows, group_size=self.group_size, bits=self.bits)
        return packed[0], packed[1], packed[2]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Quantized, Quantized]:
        """Quantise and append n tokens' rows ([1, H_kv, n, D]); return all live rows."""
        require_single(keys)
        used = self._ledger.rows
        self.keys = _append(self.keys, used, self._pack(keys))
        self.values = _append(self.values, used, self._pack(values))
        self._ledger.appended += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Quantized, Quantized]:
        """Live rows, packed."""
        if self.keys is None or self.values is None:
            raise CacheError("empty cache", expected="rows to fetch", received="none stored yet")
        rows = self._ledger.rows
        return _live(self.keys, rows), _live(self.values, rows)

    def _gather(self, rows: np.ndarray) -> None:
        if self.keys is not None and self.values is not None:
            self.keys = _each(self.keys, lambda part: gather_rows(part, rows))
            self.values = _each(self.values, lambda part: gather_rows(part, rows))

    @property
    def nbytes(self) -> int:
        """Bytes of the live packed rows, scales and biases."""
        if self.keys is None or self.values is None:
            return 0
        counts = self._ledger.live_head_rows
        heads = self.keys[0].shape[1]
        rows = sum(counts) * (heads if len(counts) == 1 else 1)
        return sum(part.shape[-1] * part.itemsize * rows for part in (*self.keys, *self.values))

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of the whole buffers, room for appended rows included."""
        if self.keys is None or self.values is None:
            return 0
        return sum(part.nbytes for part in (*self.keys, *self.values))

    @property
    def state(self) -> tuple[Any, ...]:
        """(keys, values, positions, start, appended, protected, group_size, bits)."""
        keys, values = (None, None) if self.keys is None else self.keys_and_values()
        ledger = self._ledger
        counters = (ledger.start, ledger.appended, self._protected)
        return keys, values, ledger.table(), *counters, self.group_size, self.bits

    @state.setter
    def state(self, v: Sequence[Any]) -> None:
        if len(v) != 8:
            raise CacheError("unreadable cache state", expected="8 parts", received=len(v))
        keys, values, table, start, appended, protected, group_size, bits = v
        shapes = [(1, None, 0) if part is None else part[0].shape[:3] for part in (keys, values)]
        if shapes[0] != shapes[1]:
            raise CacheError(
                "keys and values do not fit each other",
                expected="packed rows of the same first three sizes",
                received=f"{shapes[0]} and {shapes[1]}",
            )
        _, heads, rows = shapes[0]
        ledger = PositionLedger.from_table(table, start, appended)
        self._set_ledger_state(ledger, protected, rows, heads)
        # `[...]`: MLX writes rows into the array object itself, which the caller may hold.
        self.keys = None if keys is None else _each(keys, lambda part: part[...])
        self.values = None if values is None else _each(values, lambda part: part[...])
        self.group_size, self.bits = int(group_size), int(bits)


def _each(parts: Quantized, change: Any) -> Quantized:
    packed, scales, biases = (change(part) for part in parts)
    return packed, scales, biases


def _live(parts: Quantized, rows: int) -> Quantized:
    return _each(parts, lambda part: part[..., :rows, :])


def _append(parts: Quantized | None, used: int, new: Quantized) -> Quantized:
    buffers = []
    for i, rows in enumerate(new):
        buffer = with_room(None if parts is None else parts[i], used, rows)
        buffer[..., used : used + rows.shape[2], :] = rows
        buffers.append(buffer)
    return buffers[0], buffers[1], buffers[2]
