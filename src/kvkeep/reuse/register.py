"""Make kvkeep's caches known to mlx-lm: to `load_prompt_cache` and to stock batches."""

from __future__ import annotations

import mlx_lm.models.cache as mlx_cache

from kvkeep.caches import (
    BatchMixedKVCache,
    BatchPositionPreservingKVCache,
    HeadPartitionedKVCache,
    PositionPreservingKVCache,
    PositionPreservingQuantizedKVCache,
    RaggedKVCache,
    accept_compact_in_stock_batches,
)

SAVED_CACHES = (
    PositionPreservingKVCache,
    PositionPreservingQuantizedKVCache,
    RaggedKVCache,
    HeadPartitionedKVCache,
    BatchPositionPreservingKVCache,
    BatchMixedKVCache,
)


def register_caches() -> None:
    """Set the classes as attributes of `mlx_lm.models.cache`, where it looks names up.

    Stock batches that a compact cache joins are taken care of as well. Idempotent.
    """
    for cls in SAVED_CACHES:
        setattr(mlx_cache, cls.__name__, cls)
    accept_compact_in_stock_batches()
