"""Copies and dense rows: independent of the cache they come from, whatever its kind."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from bare_models import cache_bytes, tiny_model
from kvkeep import copy_cache, dense_kv
from kvkeep.errors import CacheError
from oracles import logits_of, prefilled, raw
from refusals import compact_cache
from small_caches import PER_HEAD, SHARED, append, compact, rows, snapshot
from tiny_models import random_tokens, tiny_llama

PROMPT = random_tokens(60)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba", "compact", "quantised"])
def test_what_is_written_to_one_is_not_seen_in_the_other(kind: str) -> None:
    if kind in ("llama", "compact", "quantised"):
        model: Any = tiny_llama(head_dim=16)
    else:
        model = tiny_model(kind)
    cache = compact_cache() if kind == "compact" else prefilled(model, PROMPT)
    if kind == "quantised":
        model = tiny_llama(head_dim=32)
        cache = [layer.to_quantized(32, 8) for layer in prefilled(model, PROMPT)]
    before = flat(cache)
    twin = copy_cache(cache)
    assert flat(twin) == before
    first = logits_of(model, twin, PROMPT[:5])
    assert flat(cache) == before
    second = logits_of(model, cache, PROMPT[:5])
    np.testing.assert_array_equal(first, second)
    after = flat(twin)
    logits_of(model, cache, PROMPT[5:9])
    assert flat(twin) == after


def flat(cache: list[Any]) -> str:
    """All that a cache list holds; quantised and nested states as well."""
    parts: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, mx.array):
            parts.append(f"{value.shape}{raw(value.astype(mx.float32)).hex()}")
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)
        else:
            parts.append(repr(value))

    for layer in cache:
        if type(layer) is KVCache:  # its buffer has room behind the rows
            walk([layer.keys_and_values(), layer.offset])
        elif type(layer) is QuantizedKVCache:
            walk([layer.keys_and_values(), layer.offset, layer.bits])
        else:
            walk(layer.state)
    return "|".join(parts)


def test_a_copy_takes_no_memory_until_it_is_written_to() -> None:
    cache = KVCache()
    cache.update_and_fetch(rows(4096, dim=64), rows(4096, dim=64))
    mx.eval(cache.state)
    held, size = mx.get_active_memory(), cache.nbytes
    (twin,) = copy_cache([cache])
    mx.eval(twin.state)
    assert mx.get_active_memory() - held < size // 100
    twin.trim(1)
    twin.update_and_fetch(rows(1, dim=64), rows(1, dim=64))
    mx.eval(twin.state)
    assert mx.get_active_memory() - held >= size


def test_layers_that_share_a_cache_go_on_sharing_it() -> None:
    cache = KVCache()
    append(cache, 3)
    first, second = copy_cache([cache, cache])
    assert first is second
    assert first is not cache


# -- dense rows -----------------------------------------------------------------------


def test_exact_rows() -> None:
    cache = KVCache()
    keys, values = rows(300, seed=1), rows(300, seed=2)
    cache.update_and_fetch(keys, values)
    cache.trim(20)
    ours = dense_kv(cache)
    assert raw(ours[0]) == raw(keys[:, :, :280])
    assert raw(ours[1]) == raw(values[:, :, :280])


@pytest.mark.parametrize("positions", [SHARED, PER_HEAD], ids=["shared", "per-head"])
def test_compact_rows(positions: Any) -> None:
    cache = compact(positions)
    new = append(cache, 2)[0][:, :, -2:]
    before = snapshot(cache)
    keys, values = dense_kv(cache)
    assert keys.shape == values.shape == (1, 2, 5, 4)
    assert raw(keys) == raw(mx.concatenate([rows(3, seed=1), new], axis=2))
    assert snapshot(cache) == before


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "compact"])
def test_quantised_rows(stock: bool) -> None:
    keys, values = rows(7, dim=32, seed=1), rows(7, dim=32, seed=2)
    if stock:
        source: Any = KVCache()
        source.update_and_fetch(keys, values)
        cache = source.to_quantized(group_size=32, bits=8)
    else:
        from kvkeep import PositionPreservingKVCache

        source = PositionPreservingKVCache(keys, values, offset=50, positions=range(10, 17))
        cache = source.to_quantized(group_size=32, bits=8)
    for ours, right in zip(dense_kv(cache), (keys, values), strict=True):
        assert ours.shape == right.shape
        np.testing.assert_allclose(np.asarray(ours), np.asarray(right), atol=0.02)


def numbered(first: int, count: int) -> mx.array:
    """Rows [1, 2, count, 4] that hold their own position."""
    return mx.broadcast_to(mx.arange(first, first + count)[None, None, :, None], (1, 2, count, 4))


@pytest.mark.parametrize("keep", [0, 3])
@pytest.mark.parametrize(
    "chunks",
    [(5,), (8,), (20,), (1,) * 5, (1,) * 8, (1,) * 21, (6, 1, 1, 1), (20, 1, 1), (3, 9, 4)],
)
def test_rotating_rows_come_in_temporal_order(keep: int, chunks: tuple[int, ...]) -> None:
    cache, done = RotatingKVCache(max_size=8, keep=keep), 0
    for count in chunks:
        cache.update_and_fetch(numbered(done, count), -numbered(done, count))
        done += count
    first = list(range(min(keep, done)))
    left = min(done, 8) - len(first)
    right = [*first, *range(done - left, done)]
    keys, values = (np.asarray(part) for part in dense_kv(cache))
    assert keys.shape == (1, 2, len(right), 4)
    np.testing.assert_array_equal(keys[0, 1, :, 0], right)
    np.testing.assert_array_equal(values[0, 0, :, 2], [-p for p in right])


def test_rotating_rows_after_a_trim() -> None:
    cache = RotatingKVCache(max_size=8)
    cache.update_and_fetch(numbered(0, 6), numbered(0, 6))
    cache.trim(2)
    np.testing.assert_array_equal(np.asarray(dense_kv(cache)[0])[0, 0, :, 0], [0, 1, 2, 3])


@pytest.mark.parametrize("make", [KVCache, compact, lambda: RotatingKVCache(512)])
def test_later_writes_do_not_reach_the_dense_rows(make: Any) -> None:
    cache = make()
    append(cache, 256)  # fills a stock buffer to its end: the live rows are the buffer itself
    ours = dense_kv(cache)
    before = [raw(part) for part in ours]
    cache.trim(5)
    append(cache, 5, seed=30)
    mx.eval(cache.keys, cache.values)
    assert [raw(part) for part in ours] == before
    assert [raw(part) for part in dense_kv(cache)] != before


def uneven() -> Any:
    cache = compact(PER_HEAD)
    cache.trim(52)
    return cache


def batch_of_two() -> Any:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((2, 2, 3, 4)), mx.zeros((2, 2, 3, 4)))
    return cache


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (KVCache, "empty cache"),
        (lambda: RotatingKVCache(8), "empty cache"),
        (QuantizedKVCache, "empty cache"),
        (batch_of_two, "a batch where one request is meant.*batch 2"),
        (lambda: KVCache.merge([compact(), compact()]), "no dense rows in this cache.*Batch"),
        (lambda: BatchKVCache([0, 1]), "no dense rows in this cache.*BatchKVCache.*extract"),
        (lambda: ArraysCache(2), "no dense rows in this cache.*ArraysCache"),
        (lambda: ChunkedKVCache(8), "no dense rows in this cache.*ChunkedKVCache"),
        (uneven, "unequal numbers of rows"),
        (lambda: None, "no dense rows in this cache.*NoneType"),
    ],
)
def test_what_has_no_dense_rows(make: Any, message: str) -> None:
    with pytest.raises(CacheError, match=message):
        dense_kv(make())


def test_the_layers_of_a_model() -> None:
    cache = prefilled(tiny_model("gemma3_text"), PROMPT)
    before = cache_bytes(cache)
    shapes = [dense_kv(layer)[0].shape for layer in cache]
    assert set(shapes) == {(1, 1, 16, 16), (1, 1, 60, 16)}
    assert cache_bytes(cache) == before
