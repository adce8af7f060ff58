"""Prompts read and compacted, interleaved with the stock prefill alone: time and memory.

Two benchmarks judge these runs (`bench_compaction`, `bench_memory`); they are made once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from workloads import Options, prompt_model, random_prompt

from kvkeep import Budget, EvictionConfig
from kvkeep.bench import Reading, evicted_reading, interleaved, stock_reading

STOCK = "stock prefill"
POLICIES = ("snapkv-d", "snapkv", "span")
BUDGET = 0.25


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
    stock_reading(model, tokens[:64], 64)  # the weights are paged in, the libraries warm
    found: Readings = {}
    for step in steps:
        contenders: dict[str, Callable[[], Reading]] = {
            STOCK: functools.partial(stock_reading, model, tokens, step)
        }
        for policy in POLICIES:
            config = EvictionConfig(policy=policy, budget=Budget(BUDGET, "share"))
            contenders[policy] = functools.partial(evicted_reading, model, tokens, step, config)
        setting = Setting(name, length, step)
        found[setting] = interleaved(contenders, rounds, warmup=0)
    return found
