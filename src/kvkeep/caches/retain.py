"""Storing: a layer's cache and the positions to keep become a compact cache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from kvkeep.caches.base import CompactCache
from kvkeep.caches.compact import PositionPreservingKVCache
from kvkeep.caches.groups import RowGroup, whole_group
from kvkeep.caches.rows import gather_rows
from kvkeep.errors import CacheError, SelectionError
from kvkeep.spec import LayerSelection


def is_plain(layer: Any) -> bool:
    """Whether a layer's cache is mlx-lm's `KVCache`: plain full attention, every row there.

    A subclass may mean anything by its rows, so only the class itself counts.
    """
    return type(layer) is KVCache


def is_exact(layer: Any) -> bool:
    """Whether a layer's cache is a `KVCache` that holds rows."""
    return is_plain(layer) and layer.keys is not None


def is_compact(layer: Any) -> bool:
    """Whether a layer's cache is compact and its rows can be read (not quantised)."""
    return isinstance(layer, PositionPreservingKVCache)


def live_nbytes(layer: Any) -> int:
    """Bytes of a layer's live rows, measured on the arrays (a `KVCache` reports its buffers)."""
    if is_exact(layer):
        return sum(rows.nbytes for rows in layer.keys_and_values())
    return 0 if layer.empty() else int(layer.nbytes)


def bytes_per_row(layer: Any) -> int:
    """Bytes of one row of a layer in all heads, K and V."""
    return sum(rows.shape[0] * rows.shape[-1] * rows.itemsize for rows in layer_rows(layer))


def require_evictable(cache: list[Any]) -> None:
    """Refuse layers that look evictable and are not: quantised, compact or batched ones.

    Sliding-window, state-space and other layers are no fault: they stay as they are.

    Raises:
        CacheError: names the layer and what to do.
    """
    remedies = {
        QuantizedKVCache: "Evict first and quantise afterwards (to_quantized keeps positions).",
        CompactCache: "Evict the exact cache of the prompt.",
    }
    for index, layer in enumerate(cache):
        for kind, remedy in remedies.items():
            if isinstance(layer, kind):
                raise CacheError(
                    f"layer {index} cannot be evicted",
                    expected="KVCache layers (others than full attention stay untouched)",
                    received=type(layer).__name__,
                    remedy=remedy,
                )
        batch = getattr(layer, "left_padding", None)
        if batch is not None and type(layer).__name__.startswith("Batch"):
            raise CacheError(
                f"layer {index} holds a batch",
                expected="the cache of one request",
                received=type(layer).__name__,
                remedy="extract() each request and evict it alone.",
            )


def layer_rows(layer: Any) -> tuple[mx.array, mx.array]:
    """Live rows of an exact or compact layer: keys, values [H_kv, R, D] (views).

    Raises:
        CacheError: the layer holds more than one request.
    """
    if layer.keys.shape[0] != 1:
        raise CacheError(
            "a batch where one request is meant",
            expected="keys [1, H_kv, R, D]",
            received=f"batch {layer.keys.shape[0]}",
        )
    keys, values = layer.keys_and_values()
    return keys[0], values[0]


def layer_positions(layer: Any) -> np.ndarray:
    """True positions of an exact or compact layer's rows: int [1 or H_kv, R]."""
    if is_exact(layer):
        return np.arange(layer.offset)[None]
    return layer.position_table()


def row_groups(layer: Any) -> tuple[RowGroup, ...]:
    """Live rows of an exact or compact layer, by groups of heads that hold equally many.

    Raises:
        CacheError: the layer holds more than one request.
    """
    layer_rows(layer)
    return (whole_group(layer, layer_positions(layer)),)


def retained(layer: Any, kept: LayerSelection) -> PositionPreservingKVCache:
    """A compact cache of the kept positions; `layer` (exact or compact) stays as it is.

    The new rows are evaluated, so nothing of the old buffers is held.

    Raises:
        SelectionError: a position is not among the layer's rows.
        CacheError: heads keep unequal numbers, or the selection has another number of heads.
    """
    if is_exact(layer):
        compact = PositionPreservingKVCache.from_selection(
            layer.keys, layer.values, kept, layer.offset
        )
    else:
        compact = _retained_again(layer, kept)
    mx.eval(compact.keys, compact.values)
    return compact


def _retained_again(layer: Any, kept: LayerSelection) -> PositionPreservingKVCache:
    held = layer_positions(layer)
    heads = max(len(held), len(kept.heads))
    rows = []
    for head in range(heads):
        positions = held[head if len(held) > 1 else 0]
        wanted = kept.of_head(head)
        found = np.searchsorted(positions, wanted)
        inside = found < len(positions)
        if not (inside.all() and (positions[found] == wanted).all()):
            raise SelectionError(
                "a position to keep is already evicted",
                expected="positions that the layer holds",
                received=f"{len(wanted)} positions, not all among its {len(positions)} rows",
            )
        rows.append(found)
    index = np.stack(rows)
    positions = kept.of_head(0) if kept.shared else kept.heads
    return PositionPreservingKVCache(
        gather_rows(layer.keys, index),
        gather_rows(layer.values, index),
        offset=layer.offset,
        positions=positions,
    )
