"""The ragged store: KV heads of one layer keep unequal numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

from kvkeep.caches.base import CompactCache
from kvkeep.caches.handed import RowsForAttentionOnly, require_handed
from kvkeep.caches.held import HeldRows, rows_of_buffers
from kvkeep.caches.layout import RaggedLayout, placed
from kvkeep.caches.ledger import PositionLedger
from kvkeep.caches.protocol import AttentionFunction, request_seam
from kvkeep.caches.rows import STEP, require_single, row_nbytes
from kvkeep.errors import CacheError
from kvkeep.spec import LayerSelection


class RaggedKVCache(CompactCache):
    """Rows in groups of heads that keep equally many, so evicted rows leave memory.

    Attention runs group by group, without a mask for one token and "causal" for several.
    The cache always owns it: `update_and_fetch` returns a stand-in that only `attend` reads.

    `keys` [rows, D] and `values` [rows, D_v] are flat: one region [heads, kept + room, D]
    per group. One flat buffer beats one buffer per group: a token's rows go to all heads in
    one scatter for K and one for V (in place, whatever the buffer's size), where the other
    takes two updates and two splits per group, and building the step in Python took half as
    long again (4 groups on a CPU).

    `size()` counts the rows of the longest head; `live_head_rows` counts each head's.
    """

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self._ledger = PositionLedger.exact(0)
        self._layout = RaggedLayout((), 0)
        self._protected = 0
        self._speculation_rows = None
        self._handed: RowsForAttentionOnly | None = None
        request_seam()

    @classmethod
    def from_selection(
        cls, keys: mx.array, values: mx.array, kept: LayerSelection, offset: int
    ) -> RaggedKVCache:
        """Gather the kept rows of an exact layer (buffers [1, H_kv, >= offset, D]).

        Heads may keep any numbers of rows, none included.

        Raises:
            CacheError: the selection has another number of heads, or K/V hold a batch.
            SelectionError: a position is not below `offset`.
        """
        require_single(keys)
        return cls.from_held(rows_of_buffers(keys, values, offset), kept, offset)

    @classmethod
    def from_held(cls, held: HeldRows, kept: LayerSelection, offset: int) -> RaggedKVCache:
        """Copy kept rows of a layer that any store holds.

        Raises:
            SelectionError, CacheError: see `HeldRows.of`.
        """
        cache = cls()
        rows = held.of(kept)
        cache._ledger = PositionLedger(kept.heads, offset)
        cache._layout = RaggedLayout([len(head) for head in rows], 0)
        cache.keys = placed(held.keys, rows, cache._layout)
        cache.values = placed(held.values, rows, cache._layout)
        cache._protected = cache._ledger.rows
        return cache

    # -- what a forward asks for -------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append n tokens' rows ([1, H_kv, n, D]); returns stand-ins for `attend`.

        Raises:
            CacheError: the rows do not fit the cache; it is unchanged.
        """
        shape = keys.shape
        _, heads, n, dim = shape
        if self.keys is None:
            self._begin(keys, values)
        elif (
            shape[0] != 1
            or heads != self.heads
            or dim != self.keys.shape[1]
            or values.shape != (1, heads, n, self.values.shape[1])
        ):
            raise CacheError(
                "new rows do not fit the cache",
                expected=f"[1, {self.heads}, n, {self.keys.shape[1]}]"
                f" and [..., {self.values.shape[1]}]",
                received=f"{shape} and {values.shape}",
            )
        ledger = self._ledger
        if ledger.appended + n > self._layout.room:
            self._grow(n)
        slots = self._layout.slots(ledger.appended, n)
        buffers: Any = (self.keys, self.values)
        buffers[0][slots] = keys.reshape(heads * n, dim)
        buffers[1][slots] = values.reshape(heads * n, values.shape[3])
        ledger.appended += n
        self._handed = handed = RowsForAttentionOnly("RaggedKVCache")
        return handed, handed

    def _begin(self, keys: mx.array, values: mx.array) -> None:
        require_single(keys)
        if keys.shape[:3] != values.shape[:3]:
            raise CacheError(
                "keys and values do not fit each other",
                expected="[1, H_kv, n, D] and [1, H_kv, n, D_v]",
                received=f"{keys.shape} and {values.shape}",
            )
        self._layout = RaggedLayout((self._ledger.kept_rows,) * keys.shape[1], 0)
        self.keys = mx.zeros((0, keys.shape[3]), keys.dtype)
        self.values = mx.zeros((0, values.shape[3]), values.dtype)

    def _grow(self, n: int) -> None:
        """Room for `n` more tokens in every group, in mlx-lm's steps."""
        appended = self._ledger.appended
        layout = RaggedLayout(self._layout.counts, appended + -(-n // STEP) * STEP)
        self._move(self._layout.live_rows(appended), layout)

    def _move(self, rows: Sequence[np.ndarray], layout: RaggedLayout) -> None:
        keys, values = placed(self.keys, rows, layout), placed(self.values, rows, layout)
        self.keys, self.values, self._layout = keys, values, layout

    @property
    def owns_attention(self) -> bool:
        """Always: heads hold unequal numbers of rows."""
        return True

    def attend(
        self,
        attention: AttentionFunction,
        queries: mx.array,
        keys: Any,
        values: Any,
        *,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention group by group (see `OwnsAttention`).

        Raises:
            UnsupportedModelError: keys and values are not what `update_and_fetch` returned.
        """
        require_handed(self._handed, keys, values, "RaggedKVCache")
        return self.attend_live(attention, queries, scale=scale, sinks=sinks)

    def attend_live(
        self,
        attention: AttentionFunction,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """`attend` over the rows that are there now, for a batch that holds this cache."""
        mask = None if queries.shape[2] == 1 else "causal"
        layout, appended = self._layout, self._ledger.appended
        group_keys = layout.views(self.keys, appended)
        group_values = layout.views(self.values, appended)
        more = {"cache": self, "scale": scale, "mask": mask}
        if len(group_keys) == 1:
            return attention(queries, group_keys[0], group_values[0], sinks=sinks, **more)
        order = layout.query_order(queries.shape[1])
        if order.order is not None:
            queries = mx.take(queries, order.order, axis=1)
            sinks = None if sinks is None else mx.take(sinks, order.order)
        parts = mx.split(queries, order.cuts, axis=1)
        group_sinks = [None] * len(parts) if sinks is None else mx.split(sinks, order.cuts)
        out = mx.concatenate(
            [
                attention(q, k, v, sinks=s, **more)
                for q, k, v, s in zip(parts, group_keys, group_values, group_sinks, strict=True)
            ],
            axis=1,
        )
        return out if order.inverse is None else mx.take(out, order.inverse, axis=1)

    def make_mask(
        self, n: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """As `CompactCache.make_mask`; the cache itself reads none of it.

        Raises:
            CacheError: `n` < 1, or a sliding window is asked for.
        """
        if window_size is not None:
            refuse_window("RaggedKVCache", window_size)
        return super().make_mask(n, None, return_array)

    # -- rows --------------------------------------------------------------------------

    def head_groups(self) -> list[tuple[tuple[int, ...], mx.array, mx.array]]:
        """Live rows by group: (KV heads, keys [n, R, D], values [n, R, D_v]), as views."""
        if self.keys is None:
            return []
        appended = self._ledger.appended
        views = self._layout.views(self.keys, appended), self._layout.views(self.values, appended)
        return [
            (group.heads, keys[0], values[0])
            for group, keys, values in zip(self._layout.groups, *views, strict=True)
        ]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Live rows [1, H_kv, R, D], as views, where all heads hold equally many.

        Raises:
            CacheError: they do not, or the cache is empty.
        """
        groups = self.head_groups()
        if len(groups) != 1:
            raise CacheError(
                "no rectangular rows in this cache",
                expected="heads that hold equally many rows",
                received=f"{len(groups)} groups, {self.live_head_rows} rows",
                remedy="Read them with head_groups().",
            )
        _, keys, values = groups[0]
        return keys[None], values[None]

    def held(self) -> HeldRows:
        """The live rows, each head's at its positions."""
        rows = self._layout.live_rows(self._ledger.appended)
        positions = self._ledger.head_arrays()
        positions *= len(rows) if len(positions) == 1 else 1
        return HeldRows(self.keys, self.values, positions, rows)

    def _kept_changed(self, gather: np.ndarray | None) -> None:
        """Regroup after a logical trim: what is left of each head is a prefix of its rows."""
        if self.keys is not None:
            kept = self._ledger.kept
            counts = [len(head) for head in kept] * (self.heads if len(kept) == 1 else 1)
            rows = [
                start + np.arange(c) for start, c in zip(self._layout.starts, counts, strict=True)
            ]
            self._move(rows, RaggedLayout(counts, 0))

    @property
    def heads(self) -> int:
        """H_kv; 0 as long as nothing is stored."""
        return len(self._layout.counts)

    # -- the rest of the contract ------------------------------------------------------

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        """One batch cache of several requests' caches, compact or stock `KVCache`."""
        from kvkeep.caches.mixed import BatchMixedKVCache

        return BatchMixedKVCache.merge(caches)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> NoReturn:
        """Refused: mlx-lm's quantised attention takes rectangular rows.

        Raises:
            CacheError: always.
        """
        refuse_quantisation("RaggedKVCache")

    @property
    def nbytes(self) -> int:
        """Bytes of the live K/V rows."""
        if self.keys is None:
            return 0
        rows = sum(self._layout.counts) + self.heads * self._ledger.appended
        return rows * row_nbytes(self.keys, self.values)

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of the whole buffers, room for appended rows included."""
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    @property
    def state(self) -> tuple[Any, ...]:
        """(keys, values, counts, positions, start, appended, protected): keys and values by
        group ([n, R, D] each), counts int32 [H_kv], positions as in the ledger."""
        ledger = self._ledger
        groups = self.head_groups()
        keys = [k for _, k, _ in groups] or None
        values = [v for _, _, v in groups] or None
        counts = mx.array(self._layout.counts, mx.int32) if groups else None
        return keys, values, counts, ledger.table(), ledger.start, ledger.appended, self._protected

    @state.setter
    def state(self, v: Sequence[Any]) -> None:
        if len(v) != 7:
            raise CacheError("unreadable cache state", expected="7 parts", received=len(v))
        keys, values, counts, table, start, appended, protected = v
        ledger = PositionLedger.from_table(table, start, appended)
        if keys is None or values is None or counts is None:
            layout, heads, flat = RaggedLayout((), 0), None, (None, None)
        else:
            layout = _layout_of(np.asarray(counts).tolist(), ledger, keys, values)
            heads, flat = len(layout.counts), (_joined(keys), _joined(values))
        self._set_ledger_state(ledger, protected, ledger.rows, heads)
        self._handed, self._layout = None, layout
        self.keys, self.values = flat


def _layout_of(
    counts: list[int], ledger: PositionLedger, keys: Sequence[mx.array], values: Sequence[mx.array]
) -> RaggedLayout:
    """The layout without spare room, after checking that the arrays fit it."""
    named = [len(head) for head in ledger.kept]
    layout = RaggedLayout(counts, ledger.appended)
    shapes = [(len(group.heads), group.kept + ledger.appended) for group in layout.groups]
    held = [[tuple(part.shape[:2]) for part in side] for side in (keys, values)]
    named *= len(counts) if len(named) == 1 else 1
    if counts != named or held != [shapes, shapes]:
        raise CacheError(
            "inconsistent cache state",
            expected=f"kept rows {named} in groups {shapes}",
            received=f"{counts} in groups {held}",
        )
    return layout


def _joined(parts: Sequence[mx.array]) -> mx.array:
    """Groups [n, R, D] as one flat buffer of its own."""
    flat = [part.reshape(part.shape[0] * part.shape[1], part.shape[2]) for part in parts]
    # `[...]`: MLX writes rows into the array object itself, which the caller may hold.
    return mx.concatenate(flat) if len(flat) > 1 else mx.contiguous(flat[0])[...]


def refuse_window(store: str, window_size: int) -> NoReturn:
    """Raise for a sliding window over rows of a cache that owns its attention."""
    raise CacheError(
        f"sliding window over a {store}",
        expected="a layer with full attention, or store='shared'",
        received=f"window_size={window_size}",
    )


def refuse_quantisation(store: str) -> NoReturn:
    """Raise for a store that mlx-lm's quantised attention cannot read."""
    raise CacheError(
        f"a {store} cannot be quantised",
        expected="a PositionPreservingKVCache (store 'shared' or 'per-head') or a KVCache",
        received=store,
        remedy="Leave --kv-bits off, or choose store='per-head'.",
    )
