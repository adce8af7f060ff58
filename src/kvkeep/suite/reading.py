"""Reading caches without touching them: copies, dense rows, which layers are exact."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from kvkeep.caches import (
    CompactCache,
    PositionPreservingQuantizedKVCache,
    is_exact,
    is_plain,
    layer_rows,
    require_evictable,
)
from kvkeep.errors import CacheError


def copy_cache(cache: list[Any]) -> list[Any]:
    """An independent copy of a cache list: what is appended to one is not seen in the other.

    MLX copies on write, so the copy costs no memory until one of the two is written to; that
    first write then copies the layer's whole buffer once.

    Args:
        cache: mlx-lm's cache list; any layer kinds.

    Returns:
        New cache objects over new array objects, in the same order.
    """
    return copy.deepcopy(cache)  # one memo: layers that share a cache still share it


def dense_kv(layer_cache: Any) -> tuple[mx.array, mx.array]:
    """The live rows of one layer's cache as plain arrays, oldest position first.

    Quantised rows are dequantised. A rotating cache gives the rows of its window: the `keep`
    first ones, then the latest, `size()` in all.

    Args:
        layer_cache: `KVCache`, `RotatingKVCache`, `QuantizedKVCache` or a compact cache of
            one request; stays untouched.

    Returns:
        (keys [1, H_kv, R, D], values [1, H_kv, R, D_v]); writes to the cache do not reach
        them.

    Raises:
        CacheError: the layer is empty, of another kind, a batch, or compact with heads that
            hold unequal numbers of rows.
    """
    kinds = (KVCache, RotatingKVCache, QuantizedKVCache)
    if type(layer_cache) not in kinds and not isinstance(layer_cache, CompactCache):
        raise CacheError(
            "no dense rows in this cache",
            expected="a KVCache, RotatingKVCache, QuantizedKVCache or a compact cache",
            received=type(layer_cache).__name__,
            remedy="Of a batch, extract() each request first.",
        )
    if layer_cache.keys is None:
        raise CacheError("empty cache", expected="rows to read", received="none stored yet")
    if isinstance(layer_cache, CompactCache):
        layer_cache.position_table()  # refuses heads of unequal numbers
    keys, values = _rows(layer_cache)
    if keys.shape[0] != 1:
        raise CacheError(
            "a batch where one request is meant",
            expected="keys [1, H_kv, R, D]",
            received=f"batch {keys.shape[0]}",
        )
    # `[...]`: MLX writes rows into the array object itself, which the cache still holds.
    return keys[...], values[...]


def _rows(cache: Any) -> tuple[mx.array, mx.array]:
    kind = type(cache)
    if kind is RotatingKVCache:
        return _latest(cache, cache.keys), _latest(cache, cache.values)
    keys, values = cache.keys_and_values()
    if kind in (QuantizedKVCache, PositionPreservingQuantizedKVCache):
        size = {"group_size": cache.group_size, "bits": cache.bits}
        return mx.dequantize(*keys, **size), mx.dequantize(*values, **size)
    return keys, values


def _latest(cache: Any, buffer: mx.array) -> mx.array:
    ordered = cache._temporal_order(buffer)
    surplus = ordered.shape[2] - cache.size()  # a chunk leaves more rows than the window
    if surplus <= 0:
        return ordered
    first, last = ordered[..., : cache.keep, :], ordered[..., cache.keep + surplus :, :]
    return mx.concatenate([first, last], axis=2)


def exact_layers(cache: list[Any]) -> tuple[list[int], int]:
    """Indices of the full-attention layers, and T, the positions that each of them holds.

    Raises:
        CacheError: there is none, one is quantised, compact or a batch, one is empty, or
            they are at different positions.
    """
    require_evictable(cache)
    layers = [index for index, layer in enumerate(cache) if is_plain(layer)]
    kinds = ", ".join(sorted({type(layer).__name__ for layer in cache})) or "no caches"
    if not layers:
        raise CacheError(
            "no layer to select rows from", expected="at least one KVCache", received=kinds
        )
    for index in layers:
        if not is_exact(cache[index]) or cache[index].offset == 0:
            raise CacheError(
                f"layer {index} is empty",
                expected="the cache of a prefilled prompt",
                received="no rows",
                remedy="Run the prompt through the model first.",
            )
        layer_rows(cache[index])  # refuses a batch
    offsets = sorted({int(cache[index].offset) for index in layers})
    if len(offsets) > 1:
        raise CacheError(
            "layers are at different positions",
            expected="one offset for all layers",
            received=f"offsets {offsets}",
        )
    return layers, offsets[0]
