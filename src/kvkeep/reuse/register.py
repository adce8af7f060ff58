"""Make kvkeep's caches known to mlx-lm's `load_prompt_cache`."""

from __future__ import annotations

import mlx_lm.models.cache as mlx_cache

from kvkeep.caches import (
    BatchPositionPreservingKVCache,
    PositionPreservingKVCache,
    PositionPreservingQuantizedKVCache,
)

SAVED_CACHES = (
    PositionPreservingKVCache,
    PositionPreservingQuantizedKVCache,
    BatchPositionPreservingKVCache,
)


def register_caches() -> None:
    """Set the classes as attributes of `mlx_lm.models.cache`, where it looks names up."""
    for cls in SAVED_CACHES:
        setattr(mlx_cache, cls.__name__, cls)
