"""ChunkKV: neighbouring rows stay or go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.base import Need, Scope, WindowPolicy
from kvkeep.policies.snapkv import SnapKV
from kvkeep.spec import LayerView


@dataclass(frozen=True)
class ChunkKV(WindowPolicy):
    """SnapKV's scores summed over KV heads; each position gets the mean of its chunk.

    Chunks are `chunk_size` positions from the start on; the remainder is a chunk of its own.
    All heads get the same scores.

    A budget is met exactly, unlike in the paper and in kvpress, which keep whole chunks only
    and so fewer rows than asked for (`max(1, int(chunks * share))` of them). Here positions of
    a chunk tie and ties go to the later one: the best chunks are kept whole, and of the next
    one as many of its last rows as there is room for. At a budget that whole chunks fill, both
    keep the same. Rows that are protected count inside the budget and may split a chunk, too.

    Source: Liu et al., "ChunkKV", arXiv:2502.00299, section 3; kvpress 0.5.5
    chunkkv_press.py over snapkv_press.py, which window 64 and kernel 5 reproduce. Query-aware.

    Attributes:
        chunk_size: positions per chunk.
        window, pool_kernel, pooling: of the SnapKV scores. The kernel is narrower than there:
            the chunk is what spans a fact.

    Raises:
        ConfigError: an option is out of range.
    """

    chunk_size: int = 20
    window: int = 8
    pool_kernel: int = 5
    pooling: str = "avg"

    name: ClassVar[str] = "chunkkv"
    needs: ClassVar[frozenset[Need]] = frozenset({"queries", "keys"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = True
    summary: ClassVar[str] = "mean of SnapKV's scores in chunks of neighbouring positions"
    source: ClassVar[str] = "ChunkKV, arXiv:2502.00299"

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32, the same for every head and inside a chunk."""
        kv_heads, length, _ = view.keys.shape
        inner = SnapKV(self.window, self.pool_kernel, self.pooling).score(view).sum(axis=0)
        whole = length // self.chunk_size * self.chunk_size
        means = inner[:whole].reshape(-1, self.chunk_size).mean(axis=1)
        parts = [mx.repeat(means, self.chunk_size)]
        if whole < length:
            parts.append(mx.broadcast_to(inner[whole:].mean(), (length - whole,)))
        return mx.broadcast_to(mx.concatenate(parts), (kv_heads, length))
