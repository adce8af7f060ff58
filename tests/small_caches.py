"""Small compact caches with known rows, and a snapshot that forgives nothing."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvkeep import PositionPreservingKVCache
from oracles import raw

HEADS, DIM = 2, 4
SHARED = (0, 40, 99)
PER_HEAD = ((0, 40, 99), (7, 50, 60))
STORES = pytest.mark.parametrize("positions", [SHARED, PER_HEAD], ids=["shared", "per-head"])


def rows(count: int, heads: int = HEADS, dim: int = DIM, seed: int = 0) -> mx.array:
    """Random rows [1, heads, count, dim]."""
    random = np.random.default_rng(seed)
    return mx.array(random.standard_normal((1, heads, count, dim)).astype(np.float32))


def compact(
    positions: Any = SHARED, offset: int = 100, **options: Any
) -> PositionPreservingKVCache:
    count = len(positions[0]) if np.ndim(positions[0]) else len(positions)
    return PositionPreservingKVCache(
        rows(count, seed=1), rows(count, seed=2), offset=offset, positions=positions, **options
    )


def append(cache: Any, count: int, seed: int = 9) -> tuple[mx.array, mx.array]:
    return cache.update_and_fetch(rows(count, seed=seed), rows(count, seed=seed + 1))


def snapshot(cache: Any) -> tuple[Any, ...]:
    """Everything that must survive a refused call, the rows byte by byte."""
    keys, values = cache.keys_and_values()
    return (
        cache.offset,
        cache.positions,
        cache.protected_stored,
        cache.size(),
        cache.nbytes,
        raw(keys),
        raw(values),
    )
