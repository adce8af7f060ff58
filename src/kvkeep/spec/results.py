"""What the operations give back."""

from __future__ import annotations

from dataclasses import dataclass
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
