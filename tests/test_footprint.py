"""What a model's caches cost, against the bytes of caches that were filled."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, make_prompt_cache

from kvkeep.caches import allocated_nbytes
from kvkeep.compaction import cache_nbytes
from kvkeep.footprint import STEP, _bytes_of, measure_footprint
from tiny_models import tiny_llama


def filled(model: Any, count: int) -> list[Any]:
    cache = make_prompt_cache(model)
    for first in range(0, count, 50):
        tokens = [i % 50 for i in range(first, min(first + 50, count))]
        model(mx.array(tokens)[None], cache=cache)
        mx.eval([layer.state for layer in cache])
    return cache


def test_bytes_are_those_of_filled_caches() -> None:
    model = tiny_llama()
    footprint = measure_footprint(model)
    for count in (1, 5, 120, 300):
        cache = filled(model, count)
        assert footprint.nbytes(count) == cache_nbytes(cache)
        assert footprint.allocated_nbytes(count) >= allocated_nbytes(cache)
    assert footprint.nbytes(120) - footprint.nbytes(120, kept=20) == 100 * (
        footprint.evictable_row_bytes
    )


def test_sliding_layers_are_bounded_and_stay() -> None:
    model = tiny_llama(layers=3, sliding_layers=[0, 2])
    footprint = measure_footprint(model)
    assert [layer.evictable for layer in footprint.layers] == [False, True, False]
    assert [layer.most_rows for layer in footprint.layers] == [16, None, 16]
    row = footprint.evictable_row_bytes
    assert footprint.nbytes(100) == (100 + 2 * 16) * row
    assert footprint.nbytes(100, kept=10) == (10 + 2 * 16) * row
    cache = filled(model, 100)
    assert footprint.nbytes(100, chunk=50) == cache_nbytes(cache)
    model(mx.array([[1]]), cache=cache)
    assert footprint.nbytes(101) == cache_nbytes(cache)


def test_states_and_lists_of_caches() -> None:
    state = ArraysCache(2)
    state[0], state[1] = mx.zeros((1, 3, 8)), mx.zeros((1, 4))
    rows = KVCache()
    rows.update_and_fetch(mx.zeros((1, 2, 2, 8)), mx.zeros((1, 2, 2, 4)))
    both = CacheList(state, rows)
    assert _bytes_of(both) == (2 * (8 + 4) * 4, (24 + 4) * 4, None)
    assert _bytes_of(ArraysCache(1)) == _bytes_of(KVCache()) == (0, 0, None)


def test_buffers_grow_in_steps() -> None:
    footprint = measure_footprint(tiny_llama())
    row = footprint.evictable_row_bytes
    assert footprint.allocated_nbytes(1) == 2 * STEP * row
    assert footprint.allocated_nbytes(STEP + 1, kept=STEP) == 2 * STEP * row
