"""Storing: a layer's cache and the positions to keep become a compact cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from kvkeep.caches.base import CompactCache
from kvkeep.caches.compact import PositionPreservingKVCache
from kvkeep.caches.groups import RowGroup, gathered_groups, table_of, whole_group
from kvkeep.caches.held import HeldRows, rows_of_buffers, taken_rows
from kvkeep.caches.leaves import leaves_of, places_of
from kvkeep.caches.partitioned import HeadPartitionedKVCache
from kvkeep.caches.ragged import RaggedKVCache
from kvkeep.caches.rows import row_nbytes
from kvkeep.errors import CacheError, ConfigError, SelectionError
from kvkeep.spec import STORES, LayerSelection

Compact = PositionPreservingKVCache | RaggedKVCache | HeadPartitionedKVCache
READABLE = (PositionPreservingKVCache, RaggedKVCache, HeadPartitionedKVCache)


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
    return isinstance(layer, READABLE)


def live_nbytes(layer: Any) -> int:
    """Bytes of a layer's live rows, measured on the arrays (a `KVCache` reports its buffers)."""
    if is_exact(layer):
        return sum(rows.nbytes for rows in layer.keys_and_values())
    return 0 if layer.empty() else int(layer.nbytes)


def allocated_nbytes(cache: list[Any]) -> int:
    """Bytes of all buffers of a cache list, room for more rows included."""
    total = 0
    for layer in leaves_of(cache):
        held = getattr(layer, "allocated_nbytes", None)
        if held is None:  # stock caches report their buffers
            held = 0 if layer.empty() else layer.nbytes
        total += int(held)
    return total


def bytes_per_row(layer: Any) -> int:
    """Bytes of one row of an exact or compact layer in all heads, K and V."""
    require_one_request(layer)
    heads = layer.heads if isinstance(layer, RaggedKVCache) else layer.keys.shape[1]
    return heads * row_nbytes(layer.keys, layer.values)


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


def require_one_request(layer: Any) -> None:
    """Refuse an exact or compact layer that holds more than one request.

    Raises:
        CacheError: it does.
    """
    if not isinstance(layer, RaggedKVCache) and layer.keys.shape[0] != 1:
        raise CacheError(
            "a batch where one request is meant",
            expected="keys [1, H_kv, R, D]",
            received=f"batch {layer.keys.shape[0]}",
        )


def layer_rows(layer: Any) -> tuple[mx.array, mx.array]:
    """Live rows of an exact or compact layer: keys, values [H_kv, R, D] (views).

    Raises:
        CacheError: the layer holds more than one request; it is ragged and its heads hold
            unequal numbers; or it is a union of which some heads do not see every row.
            `row_groups` reads those.
    """
    require_one_request(layer)
    if isinstance(layer, HeadPartitionedKVCache):
        layer.position_table()
    keys, values = layer.keys_and_values()
    return keys[0], values[0]


def layer_positions(layer: Any) -> np.ndarray:
    """True positions of an exact or compact layer's rows: int [1 or H_kv, R].

    Raises:
        CacheError: heads hold (or see) unequal rows; `row_groups` reads those.
    """
    if is_exact(layer):
        return np.arange(layer.offset)[None]
    return layer.position_table()


def row_groups(layer: Any) -> tuple[RowGroup, ...]:
    """Live rows of an exact or compact layer, by groups of heads that hold equally many.

    Views where the store has them so; of a union, or after a logical trim, copies.

    Raises:
        CacheError: the layer holds more than one request, or nothing.
    """
    if layer.keys is None:
        raise CacheError("empty cache", expected="rows to read", received="none stored yet")
    require_one_request(layer)
    if isinstance(layer, RaggedKVCache):
        held = layer.held()
        return tuple(
            RowGroup(np.array(heads), keys, values, table_of(held, heads), held.heads)
            for heads, keys, values in layer.head_groups()
        )
    if len(set(() if is_exact(layer) else layer.live_head_rows)) > 1 or _hides_rows(layer):
        return gathered_groups(layer.held())
    return (whole_group(layer, layer_positions(layer)),)


def _hides_rows(layer: Any) -> bool:
    return isinstance(layer, HeadPartitionedKVCache) and layer.hides_rows


def held_rows(layer: Any) -> HeldRows:
    """The rows that each head of an exact or compact layer holds, whatever stores them."""
    require_one_request(layer)
    if is_exact(layer):
        return rows_of_buffers(layer.keys, layer.values, layer.offset)
    return layer.held()


def retained(
    layer: Any, kept: LayerSelection, store: str = "auto", *, query_heads: int | None = None
) -> Compact:
    """A compact cache of the kept positions; `layer` (exact or compact) stays as it is.

    The new rows are evaluated, so nothing of the old buffers is held.

    Args:
        layer: any exact or compact layer of one request.
        kept: positions that each head still holds.
        store: "shared" or "per-head" (a `PositionPreservingKVCache`, equal counts),
            "ragged", "union", or "auto": ragged where heads keep unequal numbers.
        query_heads: H_q, which a union notes for its `make_mask`.

    Raises:
        SelectionError: a position is not among the rows that the head holds.
        CacheError: the selection does not fit the heads, or keeps unequal numbers in a store
            of equal ones.
        ConfigError: there is no such store.
    """
    if store not in STORES:
        raise ConfigError("unknown store", expected=f"one of {', '.join(STORES)}", received=store)
    compact: Compact
    if store == "ragged" or (store == "auto" and not kept.equal_counts):
        compact = RaggedKVCache.from_held(held_rows(layer), kept, layer.offset)
    elif store == "union":
        held = held_rows(layer)
        compact = HeadPartitionedKVCache.from_held(held, kept, layer.offset, query_heads)
    elif not kept.equal_counts:
        raise CacheError(
            f"heads keep unequal numbers of rows in store {store!r}",
            expected="equal counts per head",
            received=str(kept.counts),
            remedy="Choose store='ragged' (or 'union'), or leave it at 'auto'.",
        )
    elif is_exact(layer):
        compact = PositionPreservingKVCache.from_selection(
            layer.keys, layer.values, kept, layer.offset
        )
    else:
        compact = _retained_again(layer, kept)
    mx.eval(compact.keys, compact.values)
    return compact


def _retained_again(layer: Any, kept: LayerSelection) -> PositionPreservingKVCache:
    held = held_rows(layer)
    index = np.stack(held.of(kept)).astype(np.uint32)
    return PositionPreservingKVCache(
        taken_rows(held.keys, index),
        taken_rows(held.values, index),
        offset=layer.offset,
        positions=kept.of_head(0) if kept.shared else kept.heads,
    )


def with_siblings(
    cache: Sequence[Any], selected: Mapping[int, LayerSelection]
) -> dict[int, LayerSelection]:
    """A selection, and the same rows of what stands beside a selected cache in its layer.

    Two full-attention caches of one layer hold rows for the same tokens: an indexer's keys
    name rows of the cache beside them, and one mask serves both.

    Args:
        cache: a cache list.
        selected: kept positions by index among its leaves.

    Raises:
        SelectionError: it names different rows for the caches of one layer.
    """
    leaves, chosen = leaves_of(cache), dict(selected)
    for indices in places_of(cache):
        named = [chosen[i] for i in indices if i in chosen]
        if not named or len(indices) == 1:
            continue
        if any(not _same_rows(one, named[0]) for one in named[1:]):
            raise SelectionError(
                "caches of one layer that keep different rows",
                expected=f"one set of positions for caches {indices.start} to {indices.stop - 1}",
                received="several",
            )
        chosen |= {i: named[0] for i in indices if is_exact(leaves[i]) or is_compact(leaves[i])}
    return dict(sorted(chosen.items()))


def _same_rows(one: LayerSelection, other: LayerSelection) -> bool:
    same = len(one.heads) == len(other.heads)
    return same and all(map(np.array_equal, one.heads, other.heads))
