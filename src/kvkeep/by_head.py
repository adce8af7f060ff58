"""Evicting by head: the caller says which positions each KV head keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import mlx.core as mx
import numpy as np

from kvkeep.caches import HeadPartitionedKVCache, leaves_of, require_evictable
from kvkeep.compaction import evict_selection
from kvkeep.errors import SelectionError
from kvkeep.evictable import layers_to_evict
from kvkeep.spec import (
    HeadPartitionedEvictionResult,
    LayerSelection,
    Selection,
    SnapKVEvictionResult,
    checked_positions,
)

HeadKeepIndices = Sequence[Sequence[int] | np.ndarray | mx.array] | np.ndarray


def evict_prompt_cache_by_head(
    prompt_cache: list[Any],
    head_keep_indices: HeadKeepIndices | Sequence[HeadKeepIndices],
    *,
    true_offset: int,
    query_heads: int | None = None,
    model: Any | None = None,
) -> HeadPartitionedEvictionResult:
    """Evict every full-attention layer to the positions that each of its KV heads keeps.

    Each layer stores the union of its heads' positions once and a mask of who sees what
    (retrieval heads beside streaming heads: DuoAttention, arXiv:2410.10819, section 2).
    Rows that no head keeps leave memory; for unequal heads without the union's rows, see
    `evict_selection(..., store="ragged")`.

    Args:
        prompt_cache: mlx-lm's cache list; stays untouched. Layers other than a filled
            `KVCache` are passed through; with none of them evictable this is a no-op.
        head_keep_indices: ascending, unique positions, one list per KV head, for all layers;
            or one such list per filled `KVCache` layer, in their order.
        true_offset: the next position; must be each evicted layer's offset.
        query_heads: H_q, a multiple of H_kv, noted for the caches' `make_mask`.
        model: as in `evict_prompt_cache`.

    Raises:
        SelectionError: indices are unsorted, repeated, negative or too large, or there are
            not as many lists as KV heads or layers.
        CacheError: a layer is quantised, compact or a batch, has another offset, or
            `query_heads` is no multiple of its KV heads.
        UnsupportedModelError: `model` can do without rows in none of its layers.
    """
    leaves = leaves_of(prompt_cache)
    require_evictable(leaves)
    layers = layers_to_evict(prompt_cache, model)
    by_layer = _by_layer(head_keep_indices, len(layers))
    selected = {}
    for index, heads in zip(layers, by_layer, strict=True):
        kv_heads = leaves[index].keys.shape[1]
        if len(heads) != kv_heads:
            raise SelectionError(
                f"positions for another number of heads than layer {index} has",
                expected=f"{kv_heads} lists, one per KV head",
                received=len(heads),
            )
        selected[index] = LayerSelection(heads)
    selection = Selection(true_offset, selected)
    done = evict_selection(prompt_cache, selection, "union", query_heads=query_heads)
    return _with_counts(done, layers)


def _by_layer(indices: Any, layers: int) -> list[tuple[np.ndarray, ...]]:
    """One array of positions per head for each of the layers."""
    if len(indices) == 0:
        raise SelectionError(
            "no positions to keep", expected="one list of positions per KV head", received="none"
        )
    nested = any(_depth(head) > 1 for head in indices)
    if not nested:
        return [tuple(checked_positions(head) for head in indices)] * layers
    if len(indices) != layers:
        raise SelectionError(
            "positions for another number of layers than there are",
            expected=f"{layers} lists, one per filled KVCache layer, or one list per KV head",
            received=len(indices),
        )
    return [tuple(checked_positions(head) for head in layer) for layer in indices]


def _depth(part: Any) -> int:
    """2 where a part is itself a list of lists (a layer), 1 for a list of numbers (a head)."""
    if isinstance(part, np.ndarray | mx.array):
        return part.ndim
    first = next(iter(part), None)
    return 1 if first is None or isinstance(first, int | np.integer) else 2


def _with_counts(done: SnapKVEvictionResult, layers: list[int]) -> HeadPartitionedEvictionResult:
    union, by_head, stored = {}, {}, leaves_of(done.cache)
    for index in layers:
        layer: HeadPartitionedKVCache = stored[index]
        counts = layer.live_head_rows
        union[index] = layer.size()
        by_head[index] = counts * (layer.keys.shape[1] if len(counts) == 1 else 1)
    same_heads = len({len(counts) for counts in by_head.values()}) == 1
    means = np.mean(list(by_head.values()), axis=0) if same_heads else []
    return HeadPartitionedEvictionResult(
        **{field.name: getattr(done, field.name) for field in fields(done)},
        union_retained_tokens=round(float(np.mean(list(union.values())))) if union else 0,
        per_head_retained_tokens=tuple(round(float(mean)) for mean in means),
        layer_union_tokens=union,
        layer_head_tokens=by_head,
    )
