"""Prompts read and compacted, interleaved with the stock prefill alone: time and memory.

Two benchmarks judge these runs (`bench_compaction`, `bench_memory`); they are made once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from timing import interleaved
from workloads import Options, prompt_model, random_prompt

from kvkeep import Budget, EvictionConfig, compact_prompt_cache

STOCK = "stock prefill"
POLICIES = ("snapkv-d", "snapkv", "span")
BUDGET = 0.25


@dataclass(frozen=True)
class Reading:
    """One prompt read.

    Attributes:
        prefill, score, compact: seconds; the last two are 0 for the stock prefill.
        peak: bytes allocated at most, the model's weights included.
        resting: bytes in use before it (the weights).
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
        """Peak without the weights: what reading the prompt took."""
        return self.peak - self.resting


@dataclass(frozen=True)
class Setting:
    """What was read: model's name, T tokens, chunk size."""

    model: str
    length: int
    step: int

    def __str__(self) -> str:
        return f"{self.model}, T {self.length}, prefill step {self.step}"


Readings = dict[Setting, dict[str, list[Reading]]]


@functools.lru_cache(maxsize=1)
def readings(options: Options) -> Readings:
    """All runs: per setting and contender, one reading per round."""
    name, model = prompt_model(options)
    length, steps, rounds = (2048, (512, 2048), 3)
    if options.quick:
        length, steps, rounds = 256, (64, 256), 2
    tokens = random_prompt(model, length)
    stock_prefill(model, tokens[:64], 64)  # the weights are paged in, the libraries warm
    found: Readings = {}
    for step in steps:
        contenders: dict[str, Callable[[], Reading]] = {
            STOCK: functools.partial(stock_prefill, model, tokens, step)
        }
        for policy in POLICIES:
            contenders[policy] = functools.partial(compacted, model, tokens, step, policy)
        setting = Setting(name, length, step)
        found[setting] = interleaved(contenders, rounds, warmup=0)
    return found


def stock_prefill(model: Any, tokens: list[int], step: int) -> Reading:
    """Read a prompt as mlx-lm's `generate_step` does: in chunks, each one evaluated."""
    mx.clear_cache()
    mx.reset_peak_memory()
    resting = mx.get_active_memory()
    start = time.perf_counter()
    cache = make_prompt_cache(model)
    for first in range(0, len(tokens), step):
        model(mx.array(tokens[first : first + step])[None], cache=cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()
    elapsed = time.perf_counter() - start
    kept = mx.get_active_memory() - resting
    return Reading(elapsed, 0.0, 0.0, mx.get_peak_memory(), resting, kept)


def compacted(model: Any, tokens: list[int], step: int, policy: str) -> Reading:
    """The same with eviction after it, in the policy's default settings."""
    mx.clear_cache()
    mx.reset_peak_memory()
    resting = mx.get_active_memory()
    config = EvictionConfig(policy=policy, budget=Budget(BUDGET, "share"))
    result = compact_prompt_cache(model, tokens, config=config, prefill_step_size=step)
    if not result.evicted:
        raise RuntimeError(f"{policy}: nothing was evicted, so there is nothing to measure")
    times, kept = result.times, mx.get_active_memory() - resting
    return Reading(times.prefill, times.score, times.compact, mx.get_peak_memory(), resting, kept)
