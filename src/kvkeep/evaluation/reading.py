"""A prompt read once, for every setting that asks for its cache."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvkeep.allocation import allocation_of
from kvkeep.attention import (
    DraftStart,
    Observation,
    RepeatPrompt,
    drafted,
    observed_prefill,
    repeated,
)
from kvkeep.choosing import require_choosable
from kvkeep.compaction import cache_nbytes, choose_observed, store_selection
from kvkeep.evictable import evictable_layers
from kvkeep.policies import Accumulator, Chunk, Policy, policy_of
from kvkeep.spec import EvictionConfig, LayerView, SnapKVEvictionResult
from kvkeep.suite import copy_cache

#: What a policy scored: by policy, layer and, where it matters, rows that the budget allows.
Scores = dict[tuple[Policy, int, int | None], mx.array]


@dataclass(frozen=True)
class Reading:
    """A prefilled prompt.

    Attributes:
        cache: exact; stays as it is.
        layers: indices of its evictable layers.
        length: T, tokens read.
        seen: what the prefill saw, by policy.
        seconds: it took, without second readings and drafts.
        scores: what policies scored so far.
    """

    cache: list[Any]
    layers: list[int]
    length: int
    seen: Mapping[Policy, Observation]
    seconds: float
    scores: Scores = field(default_factory=dict)


def read(
    model: Any,
    tokens: Sequence[int],
    configs: Sequence[EvictionConfig],
    *,
    step: int = 2048,
    repeat: RepeatPrompt | None = None,
    draft: DraftStart | None = None,
) -> Reading:
    """Prefill a prompt once, observed for all the policies that these configs name.

    The cache is bit-equal to the one that a prefill for a single policy leaves, and each
    policy is shown what it would have been shown then.

    Args:
        tokens: T token ids.
        configs: may be empty: then nothing is observed.
        step: tokens per chunk.
        repeat: instructions for policies that read the prompt a second time.
        draft: where policies that draft an answer begin; None: where the tokens end.

    Raises:
        UnsupportedModelError: a policy cannot be carried out on this model.
    """
    policies = list(dict.fromkeys(policy_of(config) for config in configs))
    cache = make_prompt_cache(model)
    layers = evictable_layers(model, cache) if configs else []
    start = time.perf_counter()
    seen = observed_prefill(
        model,
        tokens,
        cache,
        layers,
        window=max((_window(config) for config in configs), default=0),
        policy=", ".join(dict.fromkeys(policy.name for policy in policies)),
        scorer=cast(Policy, _Together(policies)) if policies else None,
        allow_capture=_capturable(policies),
        step=step,
    )
    seconds = time.perf_counter() - start
    by_policy = dict.fromkeys(policies, seen)
    for policy in policies:
        if "replay" in policy.needs:
            again = repeat or RepeatPrompt()
            by_policy[policy] = repeated(model, tokens, cache, layers, policy, seen, again, step)
        if policy.draft_length:
            start_at = draft or DraftStart()
            by_policy[policy] = drafted(model, tokens, cache, layers, policy, seen, start_at)
    return Reading(cache, layers, len(tokens), by_policy, seconds)


def evicted(reading: Reading, config: EvictionConfig | None) -> SnapKVEvictionResult:
    """A compact copy of a prompt's cache, chosen as `compact_prompt_cache` would.

    Args:
        reading: for a list of configs with this one; its cache stays as it is.
        config: None is a plain copy.

    Raises:
        BudgetError, CacheError, ConfigError: as in `compact_prompt_cache`.
    """
    copied = copy_cache(reading.cache)
    if config is None:
        held = cache_nbytes(copied)
        return SnapKVEvictionResult(
            cache=copied,
            evicted=False,
            true_offset=reading.length,
            retained_tokens=reading.length,
            original_tokens=reading.length,
            kv_layers=0,
            compact_cache_nbytes=held,
            exact_cache_nbytes=held,
        )
    policy, allocation = policy_of(config), allocation_of(config)
    require_choosable(reading.cache, reading.layers, config, policy)
    start = time.perf_counter()
    scorer = cast(Policy, _Alone(policy, list(reading.seen).index(policy), reading.scores))
    chosen = choose_observed(
        reading.cache, reading.layers, reading.seen[policy], config, scorer, allocation
    )
    score = time.perf_counter() - start
    result = store_selection(copied, chosen, config.store)
    return replace(result, times=replace(result.times, prefill=reading.seconds, score=score))


def _window(config: EvictionConfig) -> int:
    return max(policy_of(config).observation_window, allocation_of(config).window)


def _capturable(policies: Sequence[Policy]) -> bool:
    """Whether one capture of the whole model's scores would serve all that look at queries."""
    looking = [policy for policy in policies if policy.observation_window]
    windows = {policy.observation_window for policy in looking}
    return len(windows) == 1 and all(policy.scope == "model" for policy in looking)


class _Together:
    """Several policies as one: what an observed prefill asks of a policy."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = list(policies)
        # A second reading is each policy's own.
        self.needs = frozenset().union(*(policy.needs for policy in policies)) - {"replay"}

    def accumulator(self) -> Accumulator:
        """One that feeds those of all policies that gather during the prefill."""
        return _Accumulators(
            {
                at: accumulator
                for at, policy in enumerate(self._policies)
                if "attention" in policy.needs and (accumulator := policy.accumulator()) is not None
            }
        )


class _Accumulators(Accumulator):
    def __init__(self, parts: Mapping[int, Accumulator]) -> None:
        self._parts = parts

    def add(self, chunk: Chunk) -> None:
        """Hand the chunk on to each."""
        for part in self._parts.values():
            part.add(chunk)

    def finish(self) -> Mapping[str, mx.array]:
        """All arrays, each name behind its policy's number."""
        return {
            f"{at} {name}": array
            for at, part in self._parts.items()
            for name, array in part.finish().items()
        }


class _Alone:
    """A policy that sees its own part of what was gathered, and scores a layer once."""

    def __init__(self, policy: Policy, number: int, scores: Scores) -> None:
        self._policy, self._prefix, self._scores = policy, f"{number} ", scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def score(self, view: LayerView) -> mx.array:
        """As the policy does."""
        key = (self._policy, view.layer, view.keep if self._policy.budget_aware else None)
        if key not in self._scores:
            own = self._policy.needs
            if "attention" in own and "replay" not in own:
                cut = len(self._prefix)
                mine = {k[cut:]: v for k, v in view.seen.items() if k.startswith(self._prefix)}
                view = replace(view, seen=mine)
            self._scores[key] = self._policy.score(view)
        return self._scores[key]
