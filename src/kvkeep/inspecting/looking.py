"""Looking at one prompt: its prefill, its scores, and what stays at a ladder of budgets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvkeep.allocation import Allocation, allocation_of
from kvkeep.attention import (
    Observation,
    ProgressCallback,
    model_name,
    observed_reading,
    require_profile_of,
)
from kvkeep.caches import leaves_of, live_nbytes
from kvkeep.choosing import Ranking, require_compatible
from kvkeep.compaction import (
    cache_nbytes,
    checked_prompt,
    chooser_of,
    require_room,
)
from kvkeep.errors import BudgetError, PromptError
from kvkeep.evictable import evictable_layers
from kvkeep.generation import RECOMMENDED, draft_start, encode_prompt, repeat_prompt
from kvkeep.inspecting.inspection import InspectedLayer, Inspection, Rung
from kvkeep.inspecting.layers import require_shown
from kvkeep.inspecting.units import text_units
from kvkeep.policies import Policy, policy_of
from kvkeep.spec import Budget, EvictionConfig, Selection

#: Shares of the prompt that the ladder has, beside the asked budget.
BUDGETS = (0.02, *(percent / 100 for percent in range(5, 100, 5)))


def inspect_prompt(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    config: EvictionConfig = RECOMMENDED,
    *,
    budgets: Sequence[Budget | int | float | str] = BUDGETS,
    layers: Sequence[int] | None = None,
    name: str | None = None,
    prefill_step_size: int = 2048,
    progress: ProgressCallback | None = None,
) -> Inspection:
    """Prefill a prompt as `kvkeep.generate` does, and see what would be kept of it.

    All but the last token are prefilled, scored and chosen from, once for the config's budget
    and once for each of the ladder. Nothing is generated. A prompt that is kept whole is
    scored all the same.

    Args:
        model: an mlx-lm model.
        tokenizer: its tokenizer.
        prompt: text or at least 2 token ids.
        config: what to evict.
        budgets: the ladder. Budgets that do not hold what is protected are left out.
        layers: indices that will be asked for, to refuse at once those that are not there; the
            inspection is of all layers whatever is said here.
        name: what to call the model.
        prefill_step_size: tokens per chunk.
        progress: called with (done, total) tokens.

    Raises:
        PromptError: fewer than 2 tokens.
        ConfigError, HeadProfileError, UnsupportedModelError: as `kvkeep.generate`.
    """
    ladder = [Budget.parse(budget) for budget in budgets]
    wrapped = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    tokens = checked_prompt(encode_prompt(wrapped, prompt))
    if len(tokens) < 2:
        raise PromptError("nothing to evict", expected="at least 2 tokens", received="1 token")
    policy, allocation = policy_of(config), allocation_of(config)
    require_compatible(config, policy, allocation)
    if allocation.head_profile is not None:
        require_profile_of(allocation.head_profile, model)
    cache = make_prompt_cache(model)
    evictable = evictable_layers(model, cache)
    require_shown(layers or (), evictable)
    if len(tokens) - 1 > config.min_tokens:
        require_room(config, len(tokens) - 1)
    stream: Any = generation_stream  # where `kvkeep.generate` reads prompts
    with wired_limit(model, [stream]), mx.stream(stream):
        seen, prefill = observed_reading(
            model,
            tokens[:-1],
            cache,
            evictable,
            policy,
            window=max(policy.observation_window, allocation.window),
            repeat_prompt=repeat_prompt(wrapped, config),
            draft_start=draft_start(wrapped, config, tokens[-1]),
            score_chunk_size=config.score_chunk_size,
            step=prefill_step_size,
            progress=progress,
        )
        start = time.perf_counter()
        leaves = leaves_of(cache)
        chosen = _Prefilled(leaves, evictable, seen, config, policy, allocation)
        ranking = chosen.ranking()
        score = time.perf_counter() - start
        rungs, asked = chosen.rungs(ladder, ranking)
    return Inspection(
        name=name or model_name(model),
        config=config,
        tokens=np.array(tokens, np.int64),
        units=text_units(wrapped, tokens),
        layers=tuple(_inspected(leaves[index], index, ranking) for index in evictable),
        rungs=rungs,
        asked=asked,
        exact_nbytes=cache_nbytes(cache),
        other_layers=len(leaves) - len(evictable),
        prefill_seconds=prefill,
        score_seconds=score,
    )


class _Prefilled:
    """A prefilled exact cache, to choose from at any budget."""

    def __init__(
        self,
        cache: list[Any],
        layers: list[int],
        seen: Observation,
        config: EvictionConfig,
        policy: Policy,
        allocation: Allocation,
    ) -> None:
        self.cache, self.layers, self.seen = cache, layers, seen
        self.config, self.policy, self.allocation = config, policy, allocation

    def ranking(self) -> Ranking:
        """The scores at the asked budget."""
        return self._chooser(self.config.limit).rank(self.cache, self.layers)

    def rungs(self, ladder: list[Budget], ranking: Ranking) -> tuple[tuple[Rung, ...], int]:
        """What stays at each budget that can be met, and which of them is the asked one."""
        asked = self._rung(self.config.limit, ranking)
        others = []
        for budget in dict.fromkeys(ladder):
            if budget == asked.budget:
                continue
            try:
                others.append(self._rung(budget, None if self.policy.budget_aware else ranking))
            except BudgetError:  # less than what is protected
                continue
        rungs = sorted([asked, *others], key=lambda rung: rung.rows)
        return tuple(rungs), next(i for i, rung in enumerate(rungs) if rung is asked)

    def _chooser(self, budget: Budget) -> Any:
        config = replace(self.config, budget=budget)
        return chooser_of(self.cache, self.layers, self.seen, config, self.policy, self.allocation)

    def _rung(self, budget: Budget, ranking: Ranking | None) -> Rung:
        chooser = self._chooser(budget)
        length, exact = self.cache[self.layers[0]].offset, cache_nbytes(self.cache)
        if chooser.keeps_all(self.cache, self.layers):
            return Rung(budget, Selection(length, {}), float(length), exact)
        chosen = chooser.choose(self.cache, self.layers, ranking)
        fixed = exact - sum(live_nbytes(self.cache[index]) for index in self.layers)
        heads = {index: self.cache[index].keys.shape[1] for index in self.layers}
        rows = sum(
            sum(kept.counts) * (heads[index] if kept.shared else 1)
            for index, kept in chosen.items()
        )
        return Rung(
            budget,
            Selection(length, chosen),
            rows / sum(heads.values()),
            fixed + chooser.stored_nbytes(self.cache, chosen),
        )


def _inspected(cache: Any, index: int, ranking: Ranking) -> InspectedLayer:
    ranked = ranking[index]
    scores = np.zeros((sum(len(rows.sets) for rows in ranked), cache.offset), np.float32)
    for rows in ranked:
        scores[np.ix_(rows.sets, rows.positions)] = rows.scores
    return InspectedLayer(index, cache.keys.shape[1], scores)
