"""Batches in which stock caches come first and compact ones join.

mlx-lm merges and extends through the class of the first cache. A stock one would take a
compact cache's row count for its positions: no error, and wrong tokens from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import BatchKVCache, KVCache

from kvkeep.caches.base import CompactCache
from kvkeep.caches.batch import BatchPositionPreservingKVCache, adopted

_stock_merge = KVCache.merge
_stock_extend = BatchKVCache.extend


def accept_compact_in_stock_batches() -> None:
    """Let `KVCache.merge` and `BatchKVCache.extend` hand compact caches over. Idempotent.

    For stock caches alone they call mlx-lm's own methods unchanged.
    """
    KVCache.merge = classmethod(_merge)  # type: ignore[assignment]
    BatchKVCache.extend = _extend


def _merge(cls: type, caches: Sequence[Any]) -> Any:
    if any(isinstance(cache, CompactCache) for cache in caches):
        return BatchPositionPreservingKVCache.merge(caches)
    return _stock_merge(caches)


def _extend(self: Any, other: Any) -> None:
    if not isinstance(other, BatchPositionPreservingKVCache):
        _stock_extend(self, other)
        return
    joined = adopted(self)
    joined.extend(other)
    # mlx-lm goes on with the object that it extended, so that one has to change.
    self.__dict__.clear()
    self.__dict__.update(joined.__dict__)
    self.__class__ = BatchPositionPreservingKVCache
