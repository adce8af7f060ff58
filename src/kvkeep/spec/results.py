"""What the operations give back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CompactionTimes:
    """Wall-clock seconds of one compaction, each measured up to an evaluated result."""

    prefill: float = 0.0
    score: float = 0.0
    compact: float = 0.0


@dataclass(frozen=True)
class SnapKVEvictionResult:
    """A compacted prompt cache and what became of it.

    Attributes:
        cache: the new cache list, ready to decode from.
        evicted: whether any row is gone.
        true_offset: the next position, as RoPE sees it.
        retained_tokens: rows kept per KV head (the mean, rounded, where they differ).
        original_tokens: positions before eviction.
        kv_layers: layers that were compacted.
        compact_cache_nbytes: bytes of the live K/V rows of `cache`.
        exact_cache_nbytes: bytes of the live K/V rows before eviction.
        times: seconds spent, where kvkeep ran the step.
    """

    cache: list[Any]
    evicted: bool
    true_offset: int
    retained_tokens: int
    original_tokens: int
    kv_layers: int
    compact_cache_nbytes: int
    exact_cache_nbytes: int = 0
    times: CompactionTimes = CompactionTimes()


@dataclass(frozen=True)
class HeadPartitionedEvictionResult(SnapKVEvictionResult):
    """What became of a cache whose KV heads keep positions of their own, stored as a union.

    Attributes:
        union_retained_tokens: rows stored per KV head in a layer (the mean over the evicted
            layers, rounded, where they differ).
        per_head_retained_tokens: positions that each KV head keeps, where all layers keep
            the same; else the mean over the layers, rounded.
        layer_union_tokens: rows stored per KV head, by index in the cache list.
        layer_head_tokens: positions that each KV head keeps, by index in the cache list.
    """

    union_retained_tokens: int = 0
    per_head_retained_tokens: tuple[int, ...] = ()
    layer_union_tokens: Mapping[int, int] = field(default_factory=dict)
    layer_head_tokens: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
