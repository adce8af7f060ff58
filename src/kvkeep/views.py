"""What a policy looks at, put together from a layer's rows and what the prefill saw."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kvkeep.attention import Observation
from kvkeep.caches import RowGroup
from kvkeep.spec import LayerView


def layer_view(
    group: RowGroup, layer: int, seen: Observation, *, n_layers: int, score_chunk_size: int
) -> LayerView:
    """One layer's view for the heads of a group.

    Args:
        group: heads that hold equally many rows; most layers are one group.
        layer: index in the cache list.
        seen: what the prefill saw of the layer's queries.
        n_layers: L, evictable layers.
        score_chunk_size: window queries to score at once, at most.
    """
    observer = seen.observers.get(layer)
    queries = sinks = None
    if observer is not None and observer.queries is not None:
        queries = _of_heads(observer.queries[0], group)
    if observer is not None and observer.sinks is not None:
        sinks = _of_heads(observer.sinks, group)
    return LayerView(
        keys=group.keys,
        values=group.values,
        queries=queries,
        scale=1.0 if observer is None else observer.scale,
        layer=layer,
        n_layers=n_layers,
        sinks=sinks,
        score_chunk_size=score_chunk_size,
    )


def _of_heads(rows: mx.array, group: RowGroup) -> mx.array:
    """The query heads [H_q, ...] that read the group's KV heads."""
    heads = group.heads
    if len(heads) == group.layer_heads:
        return rows
    by_kv_head = rows.reshape(group.layer_heads, -1, *rows.shape[1:])
    chosen = mx.take(by_kv_head, mx.array(heads.astype(np.int32)), axis=0)
    return chosen.reshape(-1, *rows.shape[1:])
