"""Which batch cache holds requests of several stores, also where stock ones come first.

mlx-lm merges and extends through the class of the first cache. A stock one would take a
compact cache's row count for its positions: no error, and wrong tokens from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import BatchKVCache, KVCache

from kvkeep.caches.base import CompactCache
from kvkeep.caches.batch import BatchPositionPreservingKVCache, adopted
from kvkeep.caches.mixed import BatchMixedKVCache, mixed_from, needs_own_cache

_stock_merge = KVCache.merge
_stock_extend = BatchKVCache.extend


def accept_compact_in_stock_batches() -> None:
    """Let `KVCache.merge` and `BatchKVCache.extend` hand compact caches over. Idempotent.

    For stock caches alone they call mlx-lm's own methods unchanged.
    """
    KVCache.merge = classmethod(_merge)  # type: ignore[assignment]
    BatchKVCache.extend = _extend


def merged(caches: Sequence[Any]) -> Any:
    """One batch of single-request caches: one buffer, or request by request where a ragged
    or union one is among them.

    Raises:
        CacheError: a cache is of another kind or holds a batch itself.
    """
    if any(needs_own_cache(cache) for cache in caches):
        return BatchMixedKVCache.merge(caches)
    return BatchPositionPreservingKVCache.merge(caches)


def extend_as_mixed(batch: Any, other: Any) -> None:
    """Add a mixed batch's requests to a batch of another class, which becomes a mixed one."""
    joined = mixed_from(batch)
    joined.extend(other)
    _become(batch, joined)


def _merge(cls: type, caches: Sequence[Any]) -> Any:
    if any(isinstance(cache, CompactCache) for cache in caches):
        return merged(caches)
    return _stock_merge(caches)


def _extend(self: Any, other: Any) -> None:
    if isinstance(other, BatchMixedKVCache):
        extend_as_mixed(self, other)
        return
    if not isinstance(other, BatchPositionPreservingKVCache):
        _stock_extend(self, other)
        return
    joined = adopted(self)
    joined.extend(other)
    _become(self, joined)


def _become(batch: Any, joined: Any) -> None:
    """Turn a batch into another: mlx-lm goes on with the object that it extended."""
    batch.__dict__.clear()
    batch.__dict__.update(joined.__dict__)
    batch.__class__ = type(joined)
