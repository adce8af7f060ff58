"""What a policy looks at, put together from a layer's rows and what the prefill saw."""

from __future__ import annotations

import mlx.core as mx

from kvkeep.attention import LayerParts, Observation, latent_group, query_heads
from kvkeep.caches import RowGroup
from kvkeep.spec import LayerView, OutputWeights


def layer_view(
    group: RowGroup,
    layer: int,
    seen: Observation,
    *,
    n_layers: int,
    score_chunk_size: int = 8,
    keep: int | None = None,
) -> LayerView:
    """One layer's view for the heads of a group.

    Args:
        group: heads that hold equally many rows; most layers are one group.
        layer: index in the cache list.
        seen: what the prefill saw of the layer's queries, and what else the policy asked for.
        n_layers: L, evictable layers.
        score_chunk_size: window queries to score at once, at most.
        keep: rows per KV head that the budget allows, where known.
    """
    if seen.facts.of(layer).latent:
        group = latent_group(group)
    observer = seen.observers.get(layer)
    queries = sinks = None
    if observer is not None and observer.queries is not None:
        queries = query_heads(observer.queries[0], group)
    if observer is not None and observer.sinks is not None:
        sinks = query_heads(observer.sinks, group)
    parts = seen.parts.get(layer, LayerParts())
    gathering = seen.gatherings.get(layer)
    return LayerView(
        keys=group.keys,
        values=group.values,
        queries=queries,
        scale=1.0 if observer is None else observer.scale,
        layer=layer,
        n_layers=n_layers,
        sinks=sinks,
        score_chunk_size=score_chunk_size,
        positions=group.positions,
        keep=keep,
        seen={} if gathering is None else gathering.of(group),
        rope=parts.rope,
        output_weights=_output_weights(parts, group, queries),
        draft=seen.drafts[layer].of(group) if layer in seen.drafts else None,
    )


def _output_weights(
    parts: LayerParts, group: RowGroup, queries: mx.array | None
) -> OutputWeights | None:
    """Output weights by index among the group's query heads; the queries tell how many."""
    if parts.output is None or queries is None:
        return None
    size = len(queries) // len(group.heads)  # query heads per KV head
    of_head = parts.output(size * group.layer_heads, group.values.shape[-1])
    return lambda head: of_head(int(group.heads[head // size]) * size + head % size)
