"""Compact caches of several requests in one batch: mlx-lm's BatchGenerator contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache, KVCache

from kvkeep.caches.compact import PositionPreservingKVCache
from kvkeep.caches.contract import MlxCache
from kvkeep.caches.ledger import PositionLedger, check_trim
from kvkeep.caches.masks import for_query_heads, made_last, padded_causal_mask
from kvkeep.caches.protocol import AttentionFunction, request_seam
from kvkeep.caches.rows import shift_right, with_room
from kvkeep.errors import CacheError


class BatchPositionPreservingKVCache(MlxCache):
    """Requests with unequal rows and offsets, right-justified in one buffer.

    Each request keeps its own positions. The cache owns its attention: row counts may
    differ by layer, so a mask that the model built from another layer would be wrong.
    """

    def __init__(
        self,
        keys: mx.array | None,
        values: mx.array | None,
        ledgers: Sequence[PositionLedger],
        end: int,
    ) -> None:
        self.keys: Any = keys
        self.values: Any = values
        self._ledgers = list(ledgers)
        self._idx = end  # physical end of every row; mlx-lm's own name for it
        self._pending = 0  # tokens that every request appended since the ledgers were settled
        self._right_padding: np.ndarray | None = None
        self._relayout()
        request_seam()

    def _relayout(self) -> None:
        """Renew what follows from the ledgers; called when the set of rows changes."""
        self._offset = mx.array([ledger.offset for ledger in self._ledgers], mx.int32)
        front = [self._idx - ledger.rows for ledger in self._ledgers]
        self._pads = tuple(
            (pad,) if ledger.even else tuple(pad + dead for dead in ledger.pads)
            for pad, ledger in zip(front, self._ledgers, strict=True)
        )

    def _settle(self) -> None:
        """Write the pending tokens into each request's ledger."""
        if self._pending:
            for ledger in self._ledgers:
                ledger.appended += self._pending
            self._pending = 0

    # -- what a forward asks for -------------------------------------------------------

    @property
    def offset(self) -> mx.array:
        """Next true position of each request: int32 [B]."""
        return self._offset

    @property
    def left_padding(self) -> mx.array:
        """Dead rows in front of each request's rows: int32 [B]."""
        return mx.array([min(pads) for pads in self._pads], mx.int32)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append n tokens' rows ([B, H_kv, n, D]) to every request; return all rows."""
        used, count = self._idx, keys.shape[2]
        self.keys = with_room(self.keys, used, keys)
        self.values = with_room(self.values, used, values)
        self._idx += count
        self._pending += count
        self._offset = self._offset + count
        self.keys[..., used : self._idx, :] = keys
        self.values[..., used : self._idx, :] = values
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All rows [B, H_kv, rows, D], dead ones included."""
        return self.keys[..., : self._idx, :], self.values[..., : self._idx, :]

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Mask [B, H_kv or 1, n, rows + n]: causal, dead rows excluded; bool.

        Raises:
            CacheError: a sliding window is asked for.
        """
        if window_size is not None:
            raise CacheError(
                "sliding window over a compact batch",
                expected="a layer with full attention",
                received=f"window_size={window_size}",
            )
        return padded_causal_mask(self._pads, self._idx + n, n)

    @property
    def owns_attention(self) -> bool:
        """Always: see the class."""
        return True

    def made_last_mask(self, n: int) -> bool:
        """Whether the last mask that was made for a model in this thread, for the `n` tokens
        just appended, is right for these rows too."""
        return made_last(self._pads, self._idx, n)

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
        """Attention with each request's own mask (see `OwnsAttention`)."""
        n = queries.shape[2]
        mask: mx.array | str | None = None if n == 1 else "causal"
        if any(map(any, self._pads)):  # without dead rows the fused path needs no mask
            mask = padded_causal_mask(self._pads, self._idx, n)
            mask = for_query_heads(mask, queries.shape[1])
        return attention(queries, keys, values, cache=self, scale=scale, mask=mask, sinks=sinks)

    # -- joining and leaving -----------------------------------------------------------

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchPositionPreservingKVCache:
        """One batch of single-request caches, compact or stock `KVCache`.

        Raises:
            CacheError: a cache is of another kind or holds a batch itself.
        """
        ledgers = [_ledger_of(cache) for cache in caches]
        end = max((ledger.rows for ledger in ledgers), default=0)
        filled = [cache for cache in caches if cache.keys is not None]
        if not filled:
            return cls(None, None, ledgers, 0)
        keys = mx.concatenate(
            [
                _padded(c.keys, ld.rows, end, filled[0].keys)
                for c, ld in zip(caches, ledgers, strict=True)
            ]
        )
        values = mx.concatenate(
            [
                _padded(c.values, ld.rows, end, filled[0].values)
                for c, ld in zip(caches, ledgers, strict=True)
            ]
        )
        return cls(keys, values, ledgers, end)

    def extract(self, index: int) -> PositionPreservingKVCache | KVCache:
        """Request `index` as a cache of its own, with its positions and true offset.

        A request that lost no row comes back as a stock `KVCache`: it is an exact cache,
        whatever it shared a batch with.
        """
        self._settle()
        index = range(len(self._ledgers))[index]
        ledger = self._ledgers[index].copy()
        if ledger.complete:
            cache = KVCache()
            cache.offset = ledger.offset
        else:
            cache = PositionPreservingKVCache()
            cache._ledger, cache._protected = ledger, ledger.kept_rows
        if self.keys is not None:
            rows = slice(self._idx - ledger.rows, self._idx)
            cache.keys = mx.contiguous(self.keys[index : index + 1, :, rows])
            cache.values = mx.contiguous(self.values[index : index + 1, :, rows])
        return cache

    def filter(self, batch_indices: Any) -> None:
        """Keep only these requests, in this order; common dead rows go."""
        indices = [int(i) for i in batch_indices]
        self._settle()
        self._ledgers = [self._ledgers[i].copy() for i in indices]
        rows = max((ledger.rows for ledger in self._ledgers), default=0)
        spare, self._idx = self._idx - rows, rows
        if self.keys is not None:
            self.keys = self.keys[indices, :, spare:]
            self.values = self.values[indices, :, spare:]
        self._relayout()

    def extend(self, other: Any) -> None:
        """Add the requests of another batch cache (compact or stock `BatchKVCache`).

        By a `BatchMixedKVCache` this batch becomes one itself.
        """
        from kvkeep.caches.mixed import BatchMixedKVCache
        from kvkeep.caches.mixing import extend_as_mixed

        if isinstance(other, BatchMixedKVCache):
            extend_as_mixed(self, other)
            return
        other = other if isinstance(other, BatchPositionPreservingKVCache) else adopted(other)
        self._settle()
        other._settle()
        end = max(self._idx, other._idx)
        filled = next((c for c in (self, other) if c.keys is not None), None)
        if filled is not None:
            pairs = [(c.keys, c.values, c._idx, len(c._ledgers)) for c in (self, other)]
            self.keys = mx.concatenate(
                [_padded(k, used, end, filled.keys, batch) for k, _, used, batch in pairs]
            )
            self.values = mx.concatenate(
                [_padded(v, used, end, filled.values, batch) for _, v, used, batch in pairs]
            )
        self._ledgers += [ledger.copy() for ledger in other._ledgers]
        self._idx = end
        self._relayout()

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce that the next tokens carry padding, in front (empty cache) or behind.

        Raises:
            CacheError: left padding for a cache that holds rows.
        """
        if left_padding is not None and any(left_padding):
            if self._idx:
                raise CacheError(
                    "left padding behind rows",
                    expected="an empty cache, or right_padding",
                    received=f"{self._idx} rows and left_padding={list(left_padding)}",
                )
            for ledger, count in zip(self._ledgers, left_padding, strict=True):
                ledger.appended -= int(count)  # the next rows start with this many dead ones
            self._relayout()
        if right_padding is not None and max(right_padding) > 0:
            self._right_padding = np.asarray(right_padding)

    def finalize(self) -> None:
        """Turn the announced right padding into dead rows in front."""
        padding, self._right_padding = self._right_padding, None
        if padding is None:
            return
        self._settle()
        self.keys = shift_right(self.keys[..., : self._idx, :], padding)
        self.values = shift_right(self.values[..., : self._idx, :], padding)
        for ledger, count in zip(self._ledgers, padding.tolist(), strict=True):
            ledger.appended -= count
        self._relayout()

    # -- the rest of the contract ------------------------------------------------------

    def size(self) -> int:
        """Physical rows of the longest request."""
        return self._idx

    def empty(self) -> bool:
        """Whether nothing was ever stored."""
        return self.keys is None

    def is_trimmable(self) -> bool:
        """True, as for each request alone."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens of every request (see `CompactCache.trim`).

        Raises:
            TrimError: `n` is negative or more than the shortest request has.
        """
        self._settle()
        check_trim(n, min(ld.offset for ld in self._ledgers), "tokens in the shortest request")
        if n <= min(ledger.appended for ledger in self._ledgers):
            self._idx -= n
            for ledger in self._ledgers:
                ledger.trim(n)
            self._relayout()
            return int(n)
        singles = [self.extract(i) for i in range(len(self._ledgers))]
        for cache in singles:
            cache.trim(n)
        self.__dict__.update(self.merge(singles).__dict__)
        return int(n)

    @property
    def nbytes(self) -> int:
        """Bytes of the live K/V rows of all requests."""
        if self.keys is None:
            return 0
        heads = self.keys.shape[1]
        rows = sum(
            sum(counts) * (heads if len(counts) == 1 else 1)
            for counts in (ledger.live_head_rows for ledger in self._ledgers)
        ) + self._pending * heads * len(self._ledgers)
        return sum(a.shape[-1] * a.itemsize for a in (self.keys, self.values)) * rows

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of the whole buffers: dead rows and room for appended ones included."""
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    @property
    def state(self) -> tuple[Any, ...]:
        """(keys, values, end, [(positions, start, appended), ... per request])."""
        keys, values = (None, None) if self.keys is None else self.keys_and_values()
        tables = [(ld.table(), ld.start, ld.appended + self._pending) for ld in self._ledgers]
        return keys, values, self._idx, tables

    @state.setter
    def state(self, v: Sequence[Any]) -> None:
        keys, values, end, tables = v
        ledgers = [PositionLedger.from_table(*entry) for entry in tables]
        held = (len(ledgers), 0) if keys is None else (keys.shape[0], keys.shape[2])
        if held != (len(ledgers), end) or any(ledger.rows > end for ledger in ledgers):
            raise CacheError(
                "inconsistent cache state",
                expected=f"{len(ledgers)} requests in {end} rows",
                received=f"{held[0]} in {held[1]}, of {[ledger.rows for ledger in ledgers]}",
            )
        # `[...]`: MLX writes rows into the array object itself, which the caller may hold.
        keys, values = (None, None) if keys is None else (keys[...], values[...])
        self.__init__(keys, values, ledgers, int(end))


def _ledger_of(cache: Any) -> PositionLedger:
    if isinstance(cache, PositionPreservingKVCache):
        return cache._ledger.copy()
    if type(cache) is KVCache:
        if cache.keys is not None and cache.keys.shape[0] != 1:
            raise CacheError(
                "a batch where one request is meant",
                expected="caches of one request each",
                received=f"batch {cache.keys.shape[0]}",
            )
        return PositionLedger.exact(cache.offset)
    raise CacheError(
        "cannot batch this cache with compact ones",
        expected="PositionPreservingKVCache or KVCache",
        received=type(cache).__name__,
    )


def adopted(other: Any) -> BatchPositionPreservingKVCache:
    """A stock `BatchKVCache` as a compact batch: its rows are contiguous positions.

    Raises:
        CacheError: it is of another kind, or its rows are not its positions.
    """
    if type(other) is not BatchKVCache:
        raise CacheError(
            "cannot extend a compact batch with this cache",
            expected="BatchPositionPreservingKVCache or BatchKVCache",
            received=type(other).__name__,
        )
    ledgers = []
    paddings, offsets = np.asarray(other.left_padding), np.asarray(other.offset)
    for padding, offset in zip(paddings.tolist(), offsets.tolist(), strict=True):
        rows = max(other._idx - padding, 0)
        if rows != max(offset, 0):
            raise CacheError(
                "a stock batch cache whose rows are not its positions",
                expected=f"{offset} rows",
                received=f"{rows} rows",
            )
        ledgers.append(PositionLedger.exact(rows))
    return BatchPositionPreservingKVCache(other.keys, other.values, ledgers, other._idx)


def _padded(
    buffer: mx.array | None, used: int, end: int, like: mx.array, batch: int = 1
) -> mx.array:
    """The first `used` rows of a buffer, right-justified in `end` rows."""
    if buffer is None:
        return mx.zeros((batch, like.shape[1], end, like.shape[3]), like.dtype)
    return mx.pad(buffer[..., :used, :], [(0, 0), (0, 0), (end - used, 0), (0, 0)])
