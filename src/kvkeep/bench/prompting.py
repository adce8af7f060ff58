"""One length: its exact cache, what every setting makes of it, and what all that takes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from kvkeep.allocation import Allocation, allocation_of
from kvkeep.attention import (
    DraftStart,
    Observation,
    RepeatPrompt,
    drafted,
    find_parts,
    observed_prefill,
    repeated,
    replay_queries,
)
from kvkeep.bench.plan import BenchPlan
from kvkeep.bench.reading import Reading, evicted_reading, stock_reading
from kvkeep.bench.results import Compaction, Prefill, PromptResult, Setting, Stored
from kvkeep.bench.timing import interleaved, rounds_told
from kvkeep.bench.workloads import SyntheticShape, Workload, random_cache
from kvkeep.caches import HeadPartitionedKVCache, RaggedKVCache, allocated_nbytes, is_compact
from kvkeep.compaction import (
    cache_nbytes,
    choose_observed,
    store_selection,
)
from kvkeep.evictable import evictable_layers
from kvkeep.policies import Policy, policy_of
from kvkeep.spec import EvictionConfig, SnapKVEvictionResult

#: Time of one scoring, time of one compaction.
_Times = tuple[float, float]


@dataclass(frozen=True)
class Prompt:
    """A prompt that is in caches, exact and evicted.

    Attributes:
        tokens: T token ids.
        exact: the cache list that a stock prefill leaves (or random rows).
        evicted: what each setting makes of it; those that evict nothing are left out.
    """

    tokens: Sequence[int]
    exact: list[Any]
    evicted: Mapping[EvictionConfig, SnapKVEvictionResult]


@dataclass(frozen=True)
class _Observed:
    """An exact cache and what its prefill saw of the queries, for one policy."""

    cache: list[Any]
    layers: list[int]
    seen: Observation


def read_prompt(
    workload: Workload,
    plan: BenchPlan,
    length: int,
    session: int,
    report: Callable[[str], None],
    *,
    measure: bool = True,
) -> tuple[Prompt, PromptResult | None]:
    """Fill the caches of one length, and measure what that takes.

    Args:
        session: noted in the result.
        report: told what goes on.
        measure: False fills the caches only.

    Raises:
        ConfigError, UnsupportedModelError: a setting cannot be run on this model.
    """
    configs = plan.settings_at(length)
    tokens = workload.prompt(length)
    report("filling the exact cache")
    by_policy = _observations(workload, plan, tokens, configs)
    compacts = {c: functools.partial(_compacted, by_policy[c.policy], c) for c in configs}
    results = {config: compact()[0] for config, compact in compacts.items()}
    evicted = {config: result for config, result in results.items() if result.evicted}
    exact = by_policy[configs[0].policy].cache
    prompt = Prompt(tokens, exact, evicted)
    if not measure or not evicted:
        return prompt, None

    times = interleaved(
        {str(index): _timed(compacts[config]) for index, config in enumerate(evicted)},
        plan.prompt_rounds,
        warmup=0,  # each has run once
        seed=plan.seed,
        report=rounds_told(report, "scoring and compacting"),
    )
    compactions = tuple(
        _compaction(config, result, exact, times[str(index)])
        for index, (config, result) in enumerate(evicted.items())
    )
    del by_policy, compacts, results  # the other policies' exact caches
    stock: list[Reading] = []
    prefills: tuple[Prefill, ...] = ()
    if not workload.synthetic:
        stock, prefills = _prefills(workload, plan, tokens, tuple(evicted), report)
    weights = workload.facts.weights_nbytes
    return prompt, PromptResult(
        length=length,
        step=plan.prefill_step,
        seed=plan.seed,
        session=session,
        stock_seconds=tuple(reading.prefill for reading in stock),
        stock_peak_nbytes=tuple(weights + reading.own_peak for reading in stock),
        prefills=prefills,
        compactions=compactions,
    )


def stored_as(cache: list[Any]) -> Stored:
    """The store that the evicted layers of a cache list are in."""
    layer = next(layer for layer in cache if is_compact(layer))
    if isinstance(layer, RaggedKVCache):
        return "ragged"
    if isinstance(layer, HeadPartitionedKVCache):
        return "union"
    return "shared" if len(layer.live_head_rows) == 1 else "per-head"


def _observations(
    workload: Workload, plan: BenchPlan, tokens: Sequence[int], configs: Sequence[EvictionConfig]
) -> dict[str, _Observed]:
    """An exact cache per policy, with what the policy's prefill saw; random rows are shared."""
    widest: dict[str, EvictionConfig] = {}
    for config in configs:  # the allocations of a policy may look through another window
        known = widest.setdefault(config.policy, config)
        if _window(config) > _window(known):
            widest[config.policy] = config
    if not workload.synthetic:
        return {
            policy: _prefilled(workload.model, tokens, plan.prefill_step, config)
            for policy, config in widest.items()
        }
    facts = workload.facts
    shape = SyntheticShape.parse(facts.synthetic)
    cache = random_cache(shape, len(tokens), facts.dtype, plan.seed)
    return {
        policy: _replayed(workload.model, tokens, cache, config)
        for policy, config in widest.items()
    }


def _window(config: EvictionConfig) -> int:
    policy, allocation = _choice(config)
    return max(policy.observation_window, allocation.window)


def _choice(config: EvictionConfig) -> tuple[Policy, Allocation]:
    return policy_of(config), allocation_of(config)


def _prefilled(model: Any, tokens: Sequence[int], step: int, config: EvictionConfig) -> _Observed:
    """As `prefill_and_compact` does up to scoring."""
    policy, _ = _choice(config)
    cache = make_prompt_cache(model)
    layers = evictable_layers(model, cache)
    seen = observed_prefill(
        model,
        tokens,
        cache,
        layers,
        window=_window(config),
        policy=policy.name,
        scorer=policy,
        allow_capture=policy.scope == "model",
        score_chunk_size=config.score_chunk_size,
        step=step,
    )
    if "replay" in policy.needs:
        seen = repeated(model, tokens, cache, layers, policy, seen, RepeatPrompt(), step)
    if policy.draft_length:
        seen = drafted(model, tokens, cache, layers, policy, seen, DraftStart())
    return _Observed(cache, layers, seen)


def _replayed(
    model: Any, tokens: Sequence[int], cache: list[Any], config: EvictionConfig
) -> _Observed:
    """As `compact_prefilled` does up to scoring."""
    policy, _ = _choice(config)
    layers = evictable_layers(model, cache)
    window = _window(config)
    parts = find_parts(model, cache, layers, policy.needs, policy.name)
    last = tokens[-max(window, 1) :]
    observers = replay_queries(model, cache, last, layers, policy=policy.name, needed=window > 0)
    seen = Observation(observers, parts=parts)
    if policy.draft_length:
        seen = drafted(model, tokens, cache, layers, policy, seen, DraftStart())
    return _Observed(cache, layers, seen)


def _compacted(observed: _Observed, config: EvictionConfig) -> tuple[SnapKVEvictionResult, float]:
    """A compact cache, and the seconds that scoring took; the exact one stays."""
    cache = list(observed.cache)
    start = time.perf_counter()
    selection = choose_observed(cache, observed.layers, observed.seen, config, *_choice(config))
    score = time.perf_counter() - start
    return store_selection(cache, selection, config.store), score


def _timed(compact: Callable[[], tuple[SnapKVEvictionResult, float]]) -> Callable[[], _Times]:
    def timed() -> _Times:
        result, score = compact()
        return score, result.times.compact

    return timed


def _compaction(
    config: EvictionConfig,
    result: SnapKVEvictionResult,
    exact: list[Any],
    times: Sequence[_Times],
) -> Compaction:
    return Compaction(
        setting=Setting.of(config),
        stored=stored_as(result.cache),
        rows=result.retained_tokens,
        score_seconds=tuple(score for score, _ in times),
        compact_seconds=tuple(compact for _, compact in times),
        exact_nbytes=cache_nbytes(exact),
        compact_nbytes=cache_nbytes(result.cache),
        exact_allocated=allocated_nbytes(exact),
        compact_allocated=allocated_nbytes(result.cache),
    )


def _prefills(
    workload: Workload,
    plan: BenchPlan,
    tokens: Sequence[int],
    configs: Sequence[EvictionConfig],
    report: Callable[[str], None],
) -> tuple[list[Reading], tuple[Prefill, ...]]:
    """Stock prefills and, in the same rounds, one per policy with eviction after it."""
    first: dict[str, EvictionConfig] = {}
    for config in configs:
        first.setdefault(config.policy, config)
    model, step = workload.model, plan.prefill_step
    contenders: dict[str, Callable[[], Reading]] = {
        "": functools.partial(stock_reading, model, tokens, step)
    }
    for policy, config in first.items():
        contenders[policy] = functools.partial(evicted_reading, model, tokens, step, config)
    # The prefill that filled the caches has warmed everything up.
    found = interleaved(
        contenders,
        plan.prompt_rounds,
        warmup=0,
        seed=plan.seed,
        report=rounds_told(report, "reading the prompt"),
    )
    weights = workload.facts.weights_nbytes
    prefills = tuple(
        Prefill(
            setting=Setting.of(config),
            seconds=tuple(reading.prefill for reading in found[policy]),
            score_seconds=tuple(reading.score for reading in found[policy]),
            compact_seconds=tuple(reading.compact for reading in found[policy]),
            peak_nbytes=tuple(weights + reading.own_peak for reading in found[policy]),
        )
        for policy, config in first.items()
    )
    return found[""], prefills
