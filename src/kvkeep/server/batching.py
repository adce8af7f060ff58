"""mlx-lm's batch generator, compacting each request between its prompt and its answer."""

from __future__ import annotations

import logging
import time
from typing import Any

import mlx.core as mx
from mlx_lm.generate import (
    BatchGenerator,
    GenerationBatch,
    PromptProcessingBatch,
    _merge_caches,
)

from kvkeep.compaction import compact_prefilled, kept_as_it_is
from kvkeep.errors import KvkeepError
from kvkeep.server import current
from kvkeep.server.current import HeldLayers, Plan
from kvkeep.server.reports import exact_report, report_of

_log = logging.getLogger(__name__)


class EvictingPromptBatch(PromptProcessingBatch):
    """Prompts in prefill; each is compacted by its own scores when it begins to answer.

    Attributes:
        plans: the requests by uid. Those that are not in it pass as in mlx-lm.
    """

    plans: dict[int, Plan]

    def _copy(self) -> EvictingPromptBatch:
        batch = super()._copy()
        batch.plans = self.plans
        return batch

    def generate(self, tokens: list[list[int]]) -> GenerationBatch:
        """Compact what asks for it, then go on as mlx-lm does.

        Args:
            tokens: each request's last token, which its cache does not hold yet.
        """
        plans = [self.plans.get(uid) for uid in self.uids]
        if any(plan is not None and plan.kv.reported for plan in plans):
            self._compact(plans)
        return super().generate(tokens)

    def _compact(self, plans: list[Plan | None]) -> None:
        if not any(self.tokens):  # prompts of one token: no layer holds a row
            for plan in plans:
                if plan is not None and plan.kv.reported:
                    plan.kv.report = exact_report(0, [], plan)
            return
        changes = any(plan is not None and plan.kv.config is not None for plan in plans)
        caches = self._taken_apart() if changes else self._slices()
        for i, (plan, cache) in enumerate(zip(plans, caches, strict=True)):
            if plan is None or not plan.kv.reported:
                continue
            if not self.tokens[i]:
                plan.kv.report = exact_report(0, [], plan)
            else:
                compact_asked(self.model, self.tokens[i], cache, plan)
            if plan.kv.failure is not None:
                self.max_tokens[i] = 1  # it ends at once; the handler tells the client why
        if changes:
            self.prompt_cache = _merge_caches(caches)

    def _slices(self) -> list[list[Any]]:
        """Each request's layers, lazily: nothing is computed unless they are read."""
        return [self.extract_cache(i) for i in range(len(self.uids))]

    def _taken_apart(self) -> list[list[Any]]:
        """Each request's layers; the batch's go one by one, so that no two of them, and not
        the whole batch, exist twice."""
        caches: list[list[Any]] = [[] for _ in self.uids]
        while self.prompt_cache:
            layer = self.prompt_cache.pop(0)
            parts = [layer.extract(i) for i in range(len(self.uids))]
            del layer
            mx.eval([part.state for part in parts if not part.empty()])
            for cache, part in zip(caches, parts, strict=True):
                cache.append(part)
        return caches


class EvictingBatchGenerator(BatchGenerator):
    """A `BatchGenerator` whose prompts are compacted; without a plan it is mlx-lm's own."""

    def __init__(self, model: Any, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.plans: dict[int, Plan] = {}
        self._prompt_batch = self._no_prompts()

    def insert_segments(self, *args: Any, **kwargs: Any) -> list[int]:
        """Add requests; this thread's plan goes with the first of them."""
        plan = current.take()
        uids = super().insert_segments(*args, **kwargs)
        if plan is not None:
            self.plans[uids[0]] = plan
        return uids

    def remove(self, uids: list[int], return_prompt_caches: bool = False) -> Any:
        """Remove requests, and what they ask."""
        removed = super().remove(uids, return_prompt_caches)
        for uid in uids:
            self.plans.pop(uid, None)
        return removed

    def extract_cache(self, uids: list[int]) -> dict[int, Any]:
        """Checkpoints of requests in prefill, as mlx-lm's server asks for them: an empty list
        of layers where the prompt cache would not keep them."""
        kept, dropped = [], {}
        for uid, (stage, index) in self._find_uids(uids).items():
            tokens = self._prompt_batch.tokens[index] if stage == 1 else None
            if tokens is None or self._is_offered(self.plans.get(uid), tokens):
                kept.append(uid)
            else:
                dropped[uid] = ([], tokens)
        return {**super().extract_cache(kept), **dropped}

    def _is_offered(self, plan: Plan | None, tokens: list[int]) -> bool:
        if plan is None:
            return True
        compact = plan.hit is not None and plan.hit.entry.compacted_at > 0
        return len(tokens) <= plan.checkpoint and not compact

    def _no_prompts(self) -> EvictingPromptBatch:
        batch = EvictingPromptBatch.empty(
            self.model, self.sampler, prefill_step_size=self.prefill_step_size
        )
        batch.plans = self.plans
        return batch

    def _next(self) -> Any:
        prompted, generated = super()._next()
        for response in generated:
            if response.finish_reason is None:
                continue
            plan = self.plans.pop(response.uid, None)
            if plan is not None:
                response.prompt_cache = HeldLayers(response.prompt_cache or [], plan)
        return prompted, generated


def compact_asked(model: Any, tokens: list[int], cache: list[Any], plan: Plan) -> None:
    """Compact one request's cache in place, and note its report or its failure.

    Rows that the prompt cache gave compact stay as they are until so many tokens have come
    that a policy's window is full: a window must not reach back over evicted rows.

    Args:
        tokens: the ids that the cache holds.
    """
    kv, before = plan.kv, 0
    if kv.config is None:
        kv.report = exact_report(len(tokens), cache, plan)
        return
    if plan.hit is not None:
        before = plan.hit.entry.compacted_at
    if before and len(tokens) - before < max(kv.observed_tokens - 1, 1):
        plan.compacted_at = before
        kv.report = report_of(kv.config, kept_as_it_is(cache, len(tokens)), 0.0, plan)
        return
    start = time.perf_counter()
    try:
        result = compact_prefilled(model, tokens, cache, kv.config)
        mx.eval([layer.state for layer in result.cache])
    except Exception as error:  # one request's fault must not end the others
        if not isinstance(error, KvkeepError):
            _log.exception("A cache of %d tokens could not be compacted", len(tokens))
        kv.failure = error
        return
    cache[:] = result.cache
    plan.compacted_at = len(tokens) if result.kv_layers else before
    kv.report = report_of(kv.config, result, time.perf_counter() - start, plan)
