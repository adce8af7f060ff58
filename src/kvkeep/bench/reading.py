"""Prompts read, stock and for eviction: time and memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvkeep.compaction import compact_prompt_cache
from kvkeep.errors import ConfigError
from kvkeep.spec import EvictionConfig


@dataclass(frozen=True)
class Reading:
    """One prompt read.

    Attributes:
        prefill, score, compact: seconds; the last two are 0 for the stock prefill.
        peak: bytes in use at most.
        resting: bytes in use before it (the weights, and whatever else is held).
        kept: bytes of the cache that is left.
    """

    prefill: float
    score: float
    compact: float
    peak: int
    resting: int
    kept: int

    @property
    def own_peak(self) -> int:
        """Peak without what was there before: what reading the prompt took."""
        return self.peak - self.resting


def stock_prefill(model: Any, tokens: Sequence[int], step: int) -> list[Any]:
    """A cache list of a prompt, read as mlx-lm's `generate_step` does: in chunks, each one
    evaluated."""
    cache = make_prompt_cache(model)
    for first in range(0, len(tokens), step):
        model(mx.array(list(tokens[first : first + step]))[None], cache=cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()
    return cache


def stock_reading(model: Any, tokens: Sequence[int], step: int) -> Reading:
    """Time and memory of a stock prefill."""
    resting = _rested()
    start = time.perf_counter()
    cache = stock_prefill(model, tokens, step)
    elapsed = time.perf_counter() - start
    kept = mx.get_active_memory() - resting
    del cache
    return Reading(elapsed, 0.0, 0.0, mx.get_peak_memory(), resting, kept)


def evicted_reading(
    model: Any, tokens: Sequence[int], step: int, config: EvictionConfig
) -> Reading:
    """The same with eviction after it, through `compact_prompt_cache`.

    Raises:
        ConfigError: nothing was evicted.
    """
    resting = _rested()
    result = compact_prompt_cache(model, tokens, config=config, prefill_step_size=step)
    if not result.evicted:
        raise ConfigError(
            f"nothing is evicted of {len(tokens)} tokens",
            expected="a budget below the length",
            received=str(config.limit),
        )
    times, kept = result.times, mx.get_active_memory() - resting
    return Reading(times.prefill, times.score, times.compact, mx.get_peak_memory(), resting, kept)


def _rested() -> int:
    """Bytes in use once everything that can go has gone; the peak counts from here."""
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()
