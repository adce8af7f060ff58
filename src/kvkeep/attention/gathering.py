"""Feeding a policy's accumulators with the chunks of a prefill or a replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from kvkeep.attention.latent import latent_group
from kvkeep.caches import RowGroup, row_groups
from kvkeep.policies import Accumulator, Chunk, Replayed
from kvkeep.spec import Rope


class Gathering:
    """The accumulators of one layer of one request: one for each group of its heads.

    Args:
        start: makes an accumulator.
        rope: the layer's rotation, where the policy needs it.
        latent: the layer's rows are latent ones.

    Attributes:
        replayed: the part of the prompt that is being read again, or None in a prefill.
    """

    def __init__(
        self,
        start: Callable[[], Accumulator],
        rope: Rope | None = None,
        *,
        latent: bool = False,
    ) -> None:
        self._start, self._rope, self._latent = start, rope, latent
        self._by_heads: dict[tuple[int, ...], Accumulator] = {}
        self._results: dict[tuple[int, ...], Mapping[str, mx.array]] = {}
        self.replayed: Replayed | None = None

    def add(self, queries: mx.array, cache: Any, scale: float, sinks: mx.array | None) -> None:
        """Take in post-RoPE queries [H_q, n, D], whose rows the cache holds already."""
        for held in row_groups(cache):
            group = latent_group(held) if self._latent else held
            heads = tuple(group.heads.tolist())
            if heads not in self._by_heads:
                self._by_heads[heads] = self._start()
            chunk = Chunk(
                queries=query_heads(queries, group),
                keys=group.keys,
                values=group.values,
                scale=scale,
                first=cache.offset - queries.shape[1],
                sinks=None if sinks is None else query_heads(sinks, group),
                rope=self._rope,
                replayed=self.replayed,
            )
            self._by_heads[heads].add(chunk)

    def of(self, group: RowGroup) -> Mapping[str, mx.array]:
        """What was gathered for a group's heads; nothing where none was."""
        heads = tuple(group.heads.tolist())
        if heads in self._by_heads:
            self._results[heads] = self._by_heads.pop(heads).finish()
        return self._results.get(heads, {})


def query_heads(rows: mx.array, group: RowGroup) -> mx.array:
    """The query heads [H_q, ...] that read the group's KV heads."""
    heads = group.heads
    if len(heads) == group.layer_heads:
        return rows
    by_kv_head = rows.reshape(group.layer_heads, -1, *rows.shape[1:])
    chosen = mx.take(by_kv_head, mx.array(heads.astype(np.int32)), axis=0)
    return chosen.reshape(-1, *rows.shape[1:])
