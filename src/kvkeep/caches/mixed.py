"""Requests of any store in one batch, each with its own cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from kvkeep.caches.base import CompactCache
from kvkeep.caches.batch import BatchPositionPreservingKVCache, adopted
from kvkeep.caches.compact import PositionPreservingKVCache
from kvkeep.caches.contract import MlxCache
from kvkeep.caches.handed import RowsForAttentionOnly, require_handed
from kvkeep.caches.ledger import check_trim
from kvkeep.caches.masks import padded_causal_mask
from kvkeep.caches.partitioned import HeadPartitionedKVCache
from kvkeep.caches.protocol import AttentionFunction, request_seam
from kvkeep.caches.ragged import RaggedKVCache
from kvkeep.errors import CacheError

MEMBERS = (
    KVCache,
    PositionPreservingKVCache,
    RaggedKVCache,
    HeadPartitionedKVCache,
)
_MEMBER_NAMES = ", ".join(kind.__name__ for kind in MEMBERS)


class BatchMixedKVCache(MlxCache):
    """A batch that holds one single-request cache per request.

    Attention runs request by request, as each would alone: no padding, and no more memory
    than the live rows of the requests. It is what a batch becomes that a `RaggedKVCache` or
    a `HeadPartitionedKVCache` is in, whose rows do not fit a common buffer.
    """

    def __init__(self, caches: Sequence[Any]) -> None:
        self._caches = list(caches)
        self._skips = [0] * len(self._caches)  # left padding still to come, per request
        self._right_padding: list[int] | None = None
        self._handed: RowsForAttentionOnly | None = None
        self._fed: list[int] = []  # rows that each request got in the last update
        self._renew_offset()
        request_seam()

    def _renew_offset(self) -> None:
        offsets = [c.offset - s for c, s in zip(self._caches, self._skips, strict=True)]
        self._offset = mx.array(offsets, mx.int32)

    # -- what a forward asks for -------------------------------------------------------

    @property
    def offset(self) -> mx.array:
        """Next true position of each request: int32 [B]."""
        return self._offset

    @property
    def left_padding(self) -> mx.array:
        """0 for each request, int32 [B]: there are no dead rows in this batch."""
        return mx.zeros((len(self._caches),), mx.int32)

    @property
    def keys(self) -> Any:
        """The first filled request's keys, or None: models that tie `keys` to other work
        (pipelines) set them."""
        return None if (cache := self._first_filled()) is None else cache.keys

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        if (cache := self._first_filled()) is not None:
            cache.keys = keys

    def _first_filled(self) -> Any:
        return next((cache for cache in self._caches if cache.keys is not None), None)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append n tokens' rows ([B, H_kv, n, D]) to every request; returns stand-ins.

        Raises:
            CacheError: the rows do not fit the batch; it is unchanged.
        """
        batch, _, n, _ = keys.shape
        self._require_fit(keys, values)
        self._fed = [n] * batch
        for i, cache in enumerate(self._caches):
            skip = min(self._skips[i], n)
            if skip:
                self._skips[i] -= skip
                self._fed[i] = n - skip
            if skip < n:
                cache.update_and_fetch(keys[i : i + 1, :, skip:], values[i : i + 1, :, skip:])
        self._offset = self._offset + n
        self._handed = handed = RowsForAttentionOnly("BatchMixedKVCache")
        return handed, handed

    def _require_fit(self, keys: mx.array, values: mx.array) -> None:
        """Before any request takes its rows: one that refused would leave the others ahead."""
        expected = (len(self._caches), *keys.shape[1:3])
        sizes = [keys.shape[1], keys.shape[3], values.shape[3]]
        held = next((sizes_of(c) for c in self._caches if c.keys is not None), sizes)
        if keys.shape[:3] != expected or values.shape[:3] != expected or held != sizes:
            raise CacheError(
                "new rows do not fit the batch",
                expected=f"{expected[0]} requests, {held[0]} heads, sizes {held[1]}, {held[2]}",
                received=f"{keys.shape} and {values.shape}",
            )

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Mask [B, 1, n, rows + n] as a right-justified batch has it; this one reads none.

        Raises:
            CacheError: a sliding window is asked for.
        """
        if window_size is not None:
            raise CacheError(
                "sliding window over a compact batch",
                expected="a layer with full attention",
                received=f"window_size={window_size}",
            )
        rows = self.size()
        return padded_causal_mask(tuple((rows - c.size(),) for c in self._caches), rows + n, n)

    @property
    def owns_attention(self) -> bool:
        """Always: see the class."""
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
        """Attention request by request (see `OwnsAttention`).

        Raises:
            UnsupportedModelError: keys and values are not what `update_and_fetch` returned.
        """
        require_handed(self._handed, keys, values, "BatchMixedKVCache")
        outs: list[mx.array | None] = []
        for i, (cache, fed) in enumerate(zip(self._caches, self._fed, strict=True)):
            if fed == 0:
                outs.append(None)
                continue
            asked = queries[i : i + 1, :, queries.shape[2] - fed :]
            outs.append(_attended(cache, attention, asked, scale, sinks))
        return _stacked(outs, queries)

    # -- joining and leaving -----------------------------------------------------------

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchMixedKVCache:
        """One batch of single-request caches of any store; they stay as they are.

        Raises:
            CacheError: a cache is of another kind, or holds a batch itself.
        """
        for cache in caches:
            require_member(cache)
        sizes = {tuple(sizes_of(cache)) for cache in caches if cache.keys is not None}
        if len(sizes) > 1:
            raise CacheError(
                "requests of different models in one batch",
                expected="the same KV heads and head sizes",
                received=str(sorted(sizes)),
            )
        # A copy shares memory until one of the two is written to.
        return cls([copy.deepcopy(cache) for cache in caches])

    def extract(self, index: int) -> Any:
        """Request `index` as a cache of its own store; a stock `KVCache` where no row is gone."""
        return exact_if_complete(copy.deepcopy(self._caches[index]))

    def filter(self, batch_indices: Any) -> None:
        """Keep only these requests, in this order."""
        indices = [int(i) for i in batch_indices]
        twice = len(set(indices)) < len(indices)
        caches = [self._caches[i] for i in indices]
        self._caches = [copy.deepcopy(cache) for cache in caches] if twice else caches
        self._skips = [self._skips[i] for i in indices]
        self._renew_offset()

    def extend(self, other: Any) -> None:
        """Add the requests of another batch cache, of any kind.

        Raises:
            CacheError: `other` is no batch of full-attention caches.
        """
        joining = mixed_from(other)
        both = BatchMixedKVCache.merge([*self._caches, *joining._caches])
        self._caches += both._caches[len(self._caches) :]
        self._skips += joining._skips
        self._renew_offset()

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce that the next tokens carry padding, in front (empty cache) or behind.

        Raises:
            CacheError: left padding for a request that holds rows.
        """
        if left_padding is not None and any(left_padding):
            if self.size():
                raise CacheError(
                    "left padding behind rows",
                    expected="an empty cache, or right_padding",
                    received=f"{self.size()} rows and left_padding={list(left_padding)}",
                )
            pairs = zip(self._skips, left_padding, strict=True)
            self._skips = [skip + int(count) for skip, count in pairs]
            self._renew_offset()
        if right_padding is not None and max(right_padding) > 0:
            self._right_padding = [int(count) for count in right_padding]

    def finalize(self) -> None:
        """Forget the announced right padding, the last rows of each request."""
        padding, self._right_padding = self._right_padding, None
        if padding is None:
            return
        for cache, count in zip(self._caches, padding, strict=True):
            cache.trim(count)
        self._renew_offset()

    # -- the rest of the contract ------------------------------------------------------

    def size(self) -> int:
        """Physical rows of the longest request (its longest head)."""
        return max((cache.size() for cache in self._caches), default=0)

    def empty(self) -> bool:
        """Whether nothing was ever stored."""
        return self._first_filled() is None

    def is_trimmable(self) -> bool:
        """True, as for each request alone."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens of every request (see `CompactCache.trim`).

        Raises:
            TrimError: `n` is negative or more than the shortest request has.
        """
        shortest = min(cache.offset for cache in self._caches)
        check_trim(n, shortest, "tokens in the shortest request")
        for cache in self._caches:
            cache.trim(int(n))
        self._renew_offset()
        return int(n)

    @property
    def nbytes(self) -> int:
        """Bytes of the live K/V rows of all requests."""
        return sum(_live_nbytes(cache) for cache in self._caches)

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of the whole buffers, room for appended rows included."""
        filled = [cache for cache in self._caches if cache.keys is not None]
        return sum(cache.keys.nbytes + cache.values.nbytes for cache in filled)

    @property
    def state(self) -> tuple[Any, ...]:
        """(kind, skip, state) of each request."""
        return tuple(
            (type(cache).__name__, skip, cache.state)
            for cache, skip in zip(self._caches, self._skips, strict=True)
        )

    @state.setter
    def state(self, v: Sequence[Any]) -> None:
        kinds = {kind.__name__: kind for kind in MEMBERS}
        caches = []
        for entry in v:
            if len(entry) != 3 or entry[0] not in kinds:
                raise CacheError(
                    "unreadable cache state",
                    expected=f"(kind, skip, state) with one of {_MEMBER_NAMES}",
                    received=str(entry[0])[:40],
                )
            cache: Any = kinds[entry[0]].from_state(entry[2])
            if entry[0] == KVCache.__name__ and cache.keys is not None:
                # `[...]`: MLX writes rows into the array object itself, which others may hold.
                cache.keys, cache.values = cache.keys[...], cache.values[...]
            require_member(cache)
            caches.append(cache)
        self.__init__(caches)
        self._skips = [int(skip) for _, skip, _ in v]
        self._renew_offset()


def needs_own_cache(cache: Any) -> bool:
    """Whether a request's rows fit no common buffer (ragged, or a union under a mask)."""
    return isinstance(cache, RaggedKVCache | HeadPartitionedKVCache)


def require_member(cache: Any) -> None:
    """Refuse what a mixed batch cannot hold.

    Raises:
        CacheError: it is of another kind or holds a batch itself.
    """
    if type(cache) not in MEMBERS:
        raise CacheError(
            "cannot batch this cache with compact ones",
            expected=_MEMBER_NAMES,
            received=type(cache).__name__,
        )
    if not isinstance(cache, CompactCache) and _batch_of(cache) != 1:
        raise CacheError(
            "a batch where one request is meant",
            expected="caches of one request each",
            received=f"batch {_batch_of(cache)}",
        )


def _batch_of(cache: Any) -> int:
    return 1 if cache.keys is None else cache.keys.shape[0]


def mixed_from(batch: Any) -> BatchMixedKVCache:
    """Any batch of full-attention caches, request by request.

    Raises:
        CacheError: it is of another kind.
    """
    if isinstance(batch, BatchMixedKVCache):
        return batch
    if type(batch) is BatchKVCache:
        batch = adopted(batch)
    if not isinstance(batch, BatchPositionPreservingKVCache):
        raise CacheError(
            "cannot extend a compact batch with this cache",
            expected="a BatchKVCache or one of kvkeep's batch caches",
            received=type(batch).__name__,
        )
    return BatchMixedKVCache([batch.extract(i) for i in range(batch.offset.shape[0])])


def exact_if_complete(cache: Any) -> Any:
    """A stock `KVCache` where every position's row is there in every head, else the cache."""
    if type(cache) is KVCache or not cache.complete:
        return cache
    exact = KVCache()
    exact.offset = cache.offset
    if cache.keys is not None:
        exact.keys, exact.values = (mx.contiguous(side) for side in cache.keys_and_values())
    return exact


def sizes_of(cache: Any) -> list[int]:
    """[H_kv, D, D_v] of a filled single-request cache."""
    if isinstance(cache, RaggedKVCache):
        return [cache.heads, cache.keys.shape[1], cache.values.shape[1]]
    return [cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3]]


def _live_nbytes(cache: Any) -> int:
    if cache.keys is None:
        return 0
    if not isinstance(cache, CompactCache):  # its own nbytes are those of the buffers
        return sum(side.nbytes for side in cache.keys_and_values())
    return cache.nbytes


def _attended(
    cache: Any,
    attention: AttentionFunction,
    queries: mx.array,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """One request's attention, as it would be alone. Its rows are fetched here and not held:
    a view that outlives the step would make the next append copy the buffer."""
    if isinstance(cache, RaggedKVCache):
        return cache.attend_live(attention, queries, scale=scale, sinks=sinks)
    keys, values = cache.keys_and_values()
    if type(cache) is not KVCache:
        return cache.attend(attention, queries, keys, values, scale=scale, sinks=sinks)
    mask = None if queries.shape[2] == 1 else "causal"
    return attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def _stacked(outs: Sequence[mx.array | None], queries: mx.array) -> mx.array:
    """Outputs of all requests [B, H_q, n, D_v], zeros for tokens of left padding."""
    first = next((out for out in outs if out is not None), None)
    if first is None:
        return mx.zeros_like(queries)
    n = queries.shape[2]
    whole = []
    for out in outs:
        if out is None:
            whole.append(mx.zeros((1, first.shape[1], n, first.shape[3]), first.dtype))
        else:
            missing = n - out.shape[2]
            pads = [(0, 0), (0, 0), (missing, 0), (0, 0)]
            whole.append(mx.pad(out, pads) if missing else out)
    return mx.concatenate(whole)
