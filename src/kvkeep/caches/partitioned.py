"""The union store: every head stores what any head keeps, a mask says which head sees what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

from kvkeep.caches.compact import Positions, RectangularCache
from kvkeep.caches.held import HeldRows, flattened, taken_rows
from kvkeep.caches.masks import noted_own_mask
from kvkeep.caches.protocol import AttentionFunction, request_seam
from kvkeep.caches.ragged import refuse_quantisation, refuse_window
from kvkeep.caches.rows import STEP, row_nbytes
from kvkeep.errors import CacheError
from kvkeep.spec import LayerSelection, checked_positions


class HeadPartitionedKVCache(RectangularCache):
    """Rows at the union of the heads' positions; each head attends to its own ones.

    Evicted rows stay in memory where another head keeps their position. The cache always
    owns its attention, whatever mask a model passes. Appended rows are seen by all heads.

    `size()` and `nbytes` count stored rows, `live_head_rows` those that a head sees.

    Args:
        keys: [1, H_kv, R, D] post-RoPE, R the union's rows, or None for an empty cache.
        values: [1, H_kv, R, D_v].
        offset: the next true position.
        protected_stored: leading rows that a speculative roll-back never removes.
        positions: the union, ascending [R]; None means 0 … R-1 (`offset` must be R).
        head_positions: [H_kv][R_h], those that each head sees; None lets all see all.
        query_heads: H_q, for `make_mask`; attention takes it from the queries.

    Raises:
        CacheError: the parts do not fit each other.
        SelectionError: positions are not sorted, unique, or not among the union's.
    """

    def __init__(
        self,
        keys: mx.array | None = None,
        values: mx.array | None = None,
        *,
        offset: int = 0,
        protected_stored: int | None = None,
        positions: Positions | None = None,
        head_positions: Sequence[Sequence[int]] | Sequence[np.ndarray] | None = None,
        query_heads: int | None = None,
    ) -> None:
        if positions is not None and len(positions) and np.ndim(positions[0]) > 0:
            raise CacheError(
                "positions per head where the union is meant",
                expected="positions [R], and head_positions per KV head",
                received=f"{len(positions)} lists",
            )
        super().__init__(
            keys, values, offset=offset, protected_stored=protected_stored, positions=positions
        )
        heads = None if keys is None else keys.shape[1]
        self._see(_visible(self._ledger.kept[0], head_positions, heads))
        self.query_heads = _checked_query_heads(query_heads, heads)
        request_seam()

    def _see(self, visible: np.ndarray | None) -> None:
        """Take which head sees which kept row: bool [H_kv, R], None where all see all."""
        self._visible = None if visible is None or visible.all() else visible
        self._kept_masks: dict[int, mx.array] = {}  # by number of query heads

    @classmethod
    def from_held(
        cls,
        held: HeldRows,
        kept: LayerSelection,
        offset: int,
        query_heads: int | None = None,
    ) -> HeadPartitionedKVCache:
        """Copy kept rows of a layer that any store holds.

        Raises:
            SelectionError, CacheError: see `HeldRows.of`.
        """
        rows = held.of(kept)
        union = np.unique(np.concatenate(kept.heads))
        # A position that a head does not keep gets some finite row, which it never sees.
        filler = next((int(head[0]) for head in rows if len(head)), 0)
        index = np.full((held.heads, len(union)), filler, np.uint32)
        for head, flat in enumerate(rows):
            index[head, np.searchsorted(union, kept.of_head(head))] = flat
        keys, values = (taken_rows(side, index) for side in (held.keys, held.values))
        head_positions = None if kept.shared else kept.heads
        return cls(
            keys,
            values,
            offset=offset,
            positions=union,
            head_positions=head_positions,
            query_heads=query_heads,
        )

    # -- positions ---------------------------------------------------------------------

    @property
    def head_positions(self) -> tuple[tuple[int, ...], ...]:
        """True positions that each KV head sees; one tuple when all see all."""
        return tuple(tuple(head.tolist()) for head in self.head_position_arrays())

    def head_position_arrays(self) -> list[np.ndarray]:
        """`head_positions` as int arrays."""
        (union,) = self._ledger.head_arrays()
        if self._visible is None:
            return [union]
        kept = self._ledger.kept_rows
        return [np.concatenate([union[:kept][seen], union[kept:]]) for seen in self._visible]

    def position_table(self) -> np.ndarray:
        """True positions as int [1, R], where every head sees every row.

        Raises:
            CacheError: a row is hidden from a head.
        """
        if self._visible is not None:
            raise CacheError(
                "rows that some heads do not see",
                expected="every head to see every row",
                received=f"{self.live_head_rows} of {self.size()} rows",
                remedy="Read each head's positions with head_positions.",
            )
        return super().position_table()

    @property
    def hides_rows(self) -> bool:
        """Whether some head does not see some row."""
        return self._visible is not None

    @property
    def complete(self) -> bool:
        """Whether every head sees a row at every position below the offset."""
        return self._visible is None and self._ledger.complete

    @property
    def live_head_rows(self) -> tuple[int, ...]:
        """Rows that each head sees (one entry when all see all)."""
        if self._visible is None:
            return self._ledger.live_head_rows
        seen = np.count_nonzero(self._visible, axis=1) + self._ledger.appended
        return tuple(seen.tolist())

    def held(self) -> HeldRows:
        """The rows that each head sees, at their positions."""
        heads, capacity, appended = self.keys.shape[1], self.keys.shape[2], self._ledger.appended
        positions = self.head_position_arrays()
        if self._visible is None:
            seen = [np.arange(self._ledger.rows)] * heads
            positions *= heads
        else:
            tail = self._ledger.kept_rows + np.arange(appended)
            seen = [np.concatenate([np.flatnonzero(row), tail]) for row in self._visible]
        rows = [head * capacity + row for head, row in enumerate(seen)]
        return HeldRows(flattened(self.keys), flattened(self.values), positions, rows)

    def _kept_changed(self, gather: np.ndarray | None) -> None:
        super()._kept_changed(gather)
        if self._visible is not None:
            self._see(self._visible[:, : self._ledger.kept_rows])

    # -- masks and attention -----------------------------------------------------------

    def make_mask(
        self,
        n: int,
        window_size: int | None = None,
        return_array: bool = False,
        query_heads: int | None = None,
    ) -> mx.array:
        """Which rows the next `n` tokens may read, by head.

        Args:
            n: tokens about to be appended, at least 1.
            query_heads: H; None takes the cache's own, or else H_kv.

        Returns:
            bool [1, H, n, R + n].

        Raises:
            CacheError: `n` < 1, a sliding window is asked for, or H is no multiple of H_kv.
        """
        if n < 1:
            raise CacheError("mask for no tokens", expected="n >= 1", received=n)
        if window_size is not None:
            refuse_window("HeadPartitionedKVCache", window_size)
        keys: Any = self.keys
        kv_heads = None if keys is None else keys.shape[1]
        heads = _checked_query_heads(query_heads, kv_heads) or self.query_heads or kv_heads or 1
        # A model hands it to all its layers, which may hold others; the seam knows it again.
        return noted_own_mask(self._mask(heads, n, self._ledger.rows + n))

    def _mask(self, query_heads: int, n: int, rows: int) -> mx.array:
        """Bool [1, H, n, rows] for the last `n` of `rows` rows."""
        kept = self._kept_masks.get(query_heads)
        if kept is None:
            kept = self._kept_masks[query_heads] = self._built(query_heads, rows)
        elif rows > kept.shape[3]:
            more = mx.ones((1, query_heads, 1, rows + STEP - kept.shape[3]), mx.bool_)
            kept = self._kept_masks[query_heads] = mx.concatenate([kept, more], axis=3)
        mask = kept[..., :rows]
        if n > 1:
            mask = mask & (mx.arange(rows)[None] <= mx.arange(rows - n, rows)[:, None])
        return mask

    def _built(self, query_heads: int, rows: int) -> mx.array:
        """The mask of one token, with spare columns: appended rows are seen by all heads."""
        table = np.ones((query_heads, rows + STEP), np.bool_)
        if self._visible is not None:
            share = query_heads // len(self._visible)
            table[:, : self._ledger.kept_rows] = np.repeat(self._visible, share, axis=0)
        return mx.array(table[None, :, None])  # type: ignore[arg-type]

    @property
    def owns_attention(self) -> bool:
        """Always: heads see other rows, which no mask of a model says."""
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
        """Attention under the heads' own mask (see `OwnsAttention`)."""
        n = queries.shape[2]
        mask: mx.array | str | None = None if n == 1 else "causal"
        if self._visible is not None:  # else the fused path needs no mask
            mask = self._mask(queries.shape[1], n, self._ledger.rows)
        return attention(queries, keys, values, cache=self, scale=scale, mask=mask, sinks=sinks)

    # -- the rest of the contract ------------------------------------------------------

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        """One batch cache of several requests' caches, compact or stock `KVCache`."""
        from kvkeep.caches.mixed import BatchMixedKVCache

        return BatchMixedKVCache.merge(caches)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> NoReturn:
        """Refused: mlx-lm's quantised attention takes no mask per query head.

        Raises:
            CacheError: always.
        """
        refuse_quantisation("HeadPartitionedKVCache")

    @property
    def nbytes(self) -> int:
        """Bytes of the stored K/V rows, those included that some heads do not see."""
        return (
            0
            if self.keys is None
            else self.size() * self.keys.shape[1] * row_nbytes(self.keys, self.values)
        )

    @property
    def state(self) -> tuple[Any, ...]:
        """(keys, values, union, start, appended, protected, visible, query_heads); visible is
        bool [H_kv, kept rows], or None where all heads see all."""
        visible = None if self._visible is None else mx.array(self._visible)
        return *RectangularCache.state.fget(self), visible, self.query_heads  # type: ignore[attr-defined]

    @state.setter
    def state(self, v: Sequence[Any]) -> None:
        if len(v) != 8:
            raise CacheError("unreadable cache state", expected="8 parts", received=len(v))
        kv_heads = None if v[0] is None else v[0].shape[1]
        visible = _visible_of_state(v[6], kv_heads, v[2])
        heads = _checked_query_heads(v[7], kv_heads)
        RectangularCache.state.fset(self, v[:6])  # type: ignore[attr-defined]
        self._see(visible)
        self.query_heads = heads
        request_seam()


def _visible_of_state(
    saved: mx.array | None, heads: int | None, table: mx.array
) -> np.ndarray | None:
    """Who sees which kept row, as a state has it, after checking that it fits."""
    seen = None if saved is None else np.asarray(saved)
    expected = (heads, table.shape[-1])
    one_set = table.ndim == 2 and table.shape[0] == 1
    if not one_set or (seen is not None and (seen.dtype != np.bool_ or seen.shape != expected)):
        raise CacheError(
            "inconsistent cache state",
            expected=f"positions [1, kept], and who sees them: bool {list(expected)} or None",
            received=f"positions {table.shape}, {None if seen is None else seen.shape}",
        )
    return seen


def _visible(
    union: np.ndarray,
    head_positions: Sequence[Sequence[int]] | Sequence[np.ndarray] | None,
    heads: int | None,
) -> np.ndarray | None:
    """Bool [H_kv, R], which head sees which row of the union."""
    if head_positions is None:
        return None
    if heads is None or len(head_positions) != heads:
        raise CacheError(
            "head_positions do not fit the heads",
            expected=f"{heads or 'no'} lists, one per KV head",
            received=len(head_positions),
        )
    table = np.zeros((heads, len(union)), np.bool_)
    for row, head in zip(table, head_positions, strict=True):
        positions = checked_positions(head)
        row[:] = np.isin(union, positions, assume_unique=True)
        if np.count_nonzero(row) != len(positions):
            raise CacheError(
                "head_positions beyond the union",
                expected="positions of each head among `positions`",
                received=str(np.setdiff1d(positions, union).tolist()[:8]),
            )
    return table


def _checked_query_heads(query_heads: int | None, kv_heads: int | None) -> int | None:
    if query_heads is not None and (query_heads < 1 or query_heads % (kv_heads or 1)):
        raise CacheError(
            "query heads do not fit the KV heads",
            expected=f"a multiple of {kv_heads or 1}",
            received=query_heads,
        )
    return None if query_heads is None else int(query_heads)
