"""Layers whose heads keep unequal numbers of rows, in either store that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

import kvkeep
from kvkeep import HeadPartitionedKVCache, LayerSelection, RaggedKVCache, Selection
from kvkeep.caches import retained, row_groups
from oracles import raw

Kept = list[list[list[int]]]  # [layer][head][position]

STORES = pytest.mark.parametrize("store", ["ragged", "union"])
HEADS = ((0, 5, 17, 61, 80), (3, 70), (), (2, 40, 41, 42, 99))  # 5, 2, 0, 5 rows
N_HEADS, DIM, OFFSET = len(HEADS), 8, 100
UNION = tuple(sorted({p for head in HEADS for p in head}))

CLASSES = {"ragged": RaggedKVCache, "union": HeadPartitionedKVCache}


def drawn(length: int, counts: Sequence[Sequence[int]], seed: int = 0) -> Kept:
    """Random positions: counts [layer][head]."""
    random = np.random.default_rng(seed)
    return [
        [sorted(random.choice(length, count, replace=False).tolist()) for count in layer]
        for layer in counts
    ]


def stored(cache: list[Any], kept: Kept, store: str) -> list[Any]:
    """The cache list evicted to these positions."""
    layers = {
        i: LayerSelection(tuple(np.array(head, np.int32) for head in heads))
        for i, heads in enumerate(kept)
    }
    return kvkeep.evict_selection(cache, Selection(cache[0].offset, layers), store).cache


def rows_by_head(cache: Any) -> list[tuple[list[int], bytes, bytes]]:
    """What each head can read: positions, keys and values, byte by byte."""
    if cache.keys is None:
        return []
    found: dict[int, tuple[list[int], bytes, bytes]] = {}
    for group in row_groups(cache):
        for i, head in enumerate(group.heads.tolist()):
            positions = group.positions[i if len(group.positions) > 1 else 0]
            found[head] = (positions.tolist(), raw(group.keys[i]), raw(group.values[i]))
    return [found[head] for head in sorted(found)]


def full_snapshot(cache: Any) -> tuple[Any, ...]:
    """Everything that must survive a refused call, and a round trip."""
    return (
        type(cache),
        cache.offset,
        cache.size(),
        cache.nbytes,
        cache.head_positions,
        cache.live_head_rows,
        cache.protected_stored,
        rows_by_head(cache),
    )


def exact_rows(heads: int, length: int, dim: int = 8, seed: int = 0) -> mx.array:
    """Random rows [1, heads, length, dim]."""
    random = np.random.default_rng(seed)
    return mx.array(random.standard_normal((1, heads, length, dim)).astype(np.float32))


def exact(heads: int, length: int, dim: int = 8) -> Any:
    """One layer's stock cache of random rows."""
    cache: Any = KVCache()
    cache.update_and_fetch(exact_rows(heads, length, dim, 1), exact_rows(heads, length, dim, 2))
    return cache


def made(store: str, heads: Sequence[Sequence[int]], offset: int, dim: int = 8) -> Any:
    """One layer's cache of random rows, `heads` its kept positions."""
    kept = LayerSelection(tuple(np.array(head, np.int32) for head in heads))
    return retained(exact(len(heads), offset, dim), kept, store)


def fed(cache: Any, count: int, heads: int, dim: int = 8, seed: int = 9) -> Any:
    """Append `count` random rows."""
    return cache.update_and_fetch(
        exact_rows(heads, count, dim, seed), exact_rows(heads, count, dim, seed + 1)
    )


def mx_attention(queries: Any, keys: Any, values: Any, *, cache: Any, **options: Any) -> mx.array:
    """What a cache's `attend` is given to call."""
    return mx.fast.scaled_dot_product_attention(queries, keys, values, **options)


def uneven(store: str) -> Any:
    """`HEADS` at `OFFSET`: unequal heads, one of them without rows."""
    return made(store, HEADS, OFFSET)
