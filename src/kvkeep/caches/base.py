"""What every single-request compact cache shares: positions, trim, speculation, masks."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from kvkeep.caches.contract import MlxCache
from kvkeep.caches.ledger import PositionLedger, check_trim
from kvkeep.caches.masks import for_query_heads, noted_window_mask, padded_causal_mask
from kvkeep.caches.protocol import AttentionFunction, request_seam
from kvkeep.errors import CacheError


class CompactCache(MlxCache):
    """Rows at their true positions; subclasses say how the rows are stored.

    Subclasses hold `keys` and `values` and implement `_gather` (or `_kept_changed`),
    `nbytes`, `allocated_nbytes` and `state`.
    """

    _ledger: PositionLedger
    _protected: int
    _speculation_rows: int | None

    # -- positions ---------------------------------------------------------------------

    @property
    def offset(self) -> int:
        """The next true position: what RoPE rotates by."""
        ledger = self._ledger
        return ledger.start + ledger.appended  # models ask several times per layer and token

    @property
    def positions(self) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
        """True position of every row: (p, ...) when all heads share them, else one tuple
        per KV head. Built on demand, O(rows)."""
        heads = self._ledger.head_positions()
        return heads[0] if len(heads) == 1 else heads

    @property
    def head_positions(self) -> tuple[tuple[int, ...], ...]:
        """True positions per KV head; one tuple when all heads share them."""
        return self._ledger.head_positions()

    def head_position_arrays(self) -> list[np.ndarray]:
        """`head_positions` as int arrays."""
        return self._ledger.head_arrays()

    def position_table(self) -> np.ndarray:
        """True positions as int [H_kv or 1, R].

        Raises:
            CacheError: heads hold unequal rows.
        """
        return self._ledger.position_table()

    @property
    def live_head_rows(self) -> tuple[int, ...]:
        """Live rows of each head (one entry when all heads share their positions)."""
        return self._ledger.live_head_rows

    @property
    def complete(self) -> bool:
        """Whether every position below the offset has its row, in every head."""
        return self._ledger.complete

    @property
    def protected_stored(self) -> int:
        """Leading rows that a speculative roll-back never removes."""
        return self._protected

    def size(self) -> int:
        """Physical rows R (not positions)."""
        return self._ledger.rows

    def empty(self) -> bool:
        """Whether nothing was ever stored."""
        return self.keys is None

    # -- trim and speculation ----------------------------------------------------------

    def is_trimmable(self) -> bool:
        """True: every row's position is known, so any logical prefix can be restored."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens.

        Appended rows go first; beyond them the logical prefix is cut, that is, rows at
        positions >= the new offset go and evicted ones stay evicted.

        Returns:
            `n`.

        Raises:
            TrimError: `n` is negative, more than `offset`, or, while speculating, more
                than was appended since `start_speculation`. The cache is unchanged.
        """
        if self._speculation_rows is not None:
            floor = max(self._speculation_rows, self._protected)
            what = "tokens appended since start_speculation()"
            check_trim(n, max(self._ledger.rows - floor, 0), what)
        kept = self._ledger.kept
        gather = self._ledger.trim(n)
        if self._ledger.kept is not kept:
            self._kept_changed(gather)
        if self.owns_attention:
            request_seam()
        self._protected = min(self._protected, self._ledger.rows)
        return int(n)

    def start_speculation(self) -> None:
        """From now on only rows appended after this call can be trimmed."""
        self._speculation_rows = self._ledger.rows

    def stop_speculation(self) -> None:
        """Accept the speculated rows; `trim` is free again."""
        self._speculation_rows = None

    def _kept_changed(self, gather: np.ndarray | None) -> None:
        """A logical trim took kept rows; `gather` as from `PositionLedger.trim`."""
        if gather is not None:
            self._gather(gather)

    def _gather(self, rows: np.ndarray) -> None:
        raise NotImplementedError

    # -- masks -------------------------------------------------------------------------

    @property
    def owns_attention(self) -> bool:
        """True once a logical trim left heads with unequal rows: they need their own mask."""
        return not self._ledger.even

    def make_mask(
        self, n: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """The mask of the next `n` tokens over the present rows and themselves.

        None and "causal" (aligned bottom right, which is exact for sparse rows) keep
        Metal's and CUDA's fused attention.

        Args:
            n: tokens about to be appended, at least 1.
            window_size: a sliding window in positions; exact for shared positions.
            return_array: force a bool array [n, R + n] where n > 1, as mlx-lm's caches do.

        Raises:
            CacheError: `n` < 1, or a window over positions that differ by head.
        """
        if n < 1:
            raise CacheError("mask for no tokens", expected="n >= 1", received=n)
        rows = self._ledger.rows + n
        if window_size is not None:
            return self._window_mask(n, window_size)
        if return_array and n > 1:
            request_seam()  # the model hands this to all layers, whose rows may be others
            return padded_causal_mask(((0,),), rows, n)[0, 0]
        return None if n == 1 else "causal"

    def _window_mask(self, n: int, window_size: int) -> mx.array:
        if len(self._ledger.kept) > 1:
            raise CacheError(
                "sliding window over per-head positions",
                expected="a layer with full attention, or store='shared'",
                received=f"window_size={window_size}",
            )
        start, offset = self._ledger.start, self._ledger.offset
        rows = mx.concatenate([self._ledger.table()[0], mx.arange(start, offset + n)])
        tokens = mx.arange(offset, offset + n)[:, None]
        request_seam()
        return noted_window_mask((rows <= tokens) & (tokens < rows + window_size))

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
        """Attention with this cache's own mask (see `OwnsAttention`)."""
        n = queries.shape[2]
        mask: mx.array | str | None = None if n == 1 else "causal"
        if not self._ledger.even:
            mask = padded_causal_mask((self._ledger.pads,), self._ledger.rows, n)
            if not hasattr(self, "bits"):  # mlx-lm's quantised attention wants KV heads
                mask = for_query_heads(mask, queries.shape[1])
        return attention(queries, keys, values, cache=self, scale=scale, mask=mask, sinks=sinks)

    # -- bytes and state ---------------------------------------------------------------

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that makes the cache, as mlx-lm saves it."""
        raise NotImplementedError

    @state.setter
    def state(self, v: Any) -> None:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of the live K/V rows."""
        raise NotImplementedError

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of the whole buffers, room for appended rows included."""
        raise NotImplementedError

    @property
    def meta_state(self) -> tuple[str, str, str]:
        """(offset, rows, protected rows) as text. `state` is complete without it; it is
        what the seeds' `from_state(state, meta_state)` takes."""
        return str(self.offset), str(self.size()), str(self._protected)

    @classmethod
    def from_state(cls, state: Any, meta_state: tuple[str, ...] | None = None) -> Any:
        """A cache from `state`; `meta_state`, where given, must agree with it.

        Raises:
            CacheError: the parts do not describe one cache.
        """
        cache = cls.__new__(cls)
        cache.state = state
        if meta_state is not None and tuple(map(str, meta_state)) != cache.meta_state:
            raise CacheError(
                "state and meta_state disagree",
                expected=f"(offset, rows, protected) = {cache.meta_state}",
                received=repr(tuple(meta_state)),
            )
        return cache

    def _set_ledger_state(
        self, ledger: PositionLedger, protected: int, rows: int, heads: int | None
    ) -> None:
        faults = (
            (ledger.rows == rows, f"{ledger.rows} rows, as the positions say", f"{rows} rows"),
            (
                heads is None or len(ledger.kept) in (1, heads),
                f"positions for 1 or {heads} heads",
                f"{len(ledger.kept)} heads",
            ),
            (0 <= protected <= rows, f"0 to {rows} protected rows", str(protected)),
        )
        for good, expected, received in faults:
            if not good:
                raise CacheError("inconsistent cache state", expected=expected, received=received)
        self._ledger, self._protected = ledger, int(protected)
        self._speculation_rows = None
        if self.owns_attention:
            request_seam()
