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

from kvkeep.compaction import compact_prefilled
from kvkeep.errors import KvkeepError
from kvkeep.server import current
from kvkeep.server.reports import exact_report, report_of
from kvkeep.server.settings import KvRequest

_log = logging.getLogger(__name__)


class EvictingPromptBatch(PromptProcessingBatch):
    """Prompts in prefill; each is compacted by its own scores when it begins to answer.

    Attributes:
        asked: what each request asks of its cache, by uid. Requests that are not in it pass
            as in mlx-lm.
    """

    asked: dict[int, KvRequest]

    def _copy(self) -> EvictingPromptBatch:
        batch = super()._copy()
        batch.asked = self.asked
        return batch

    def generate(self, tokens: list[list[int]]) -> GenerationBatch:
        """Compact what asks for it, then go on as mlx-lm does.

        Args:
            tokens: each request's last token, which its cache does not hold yet.
        """
        asked = [self.asked.pop(uid, None) for uid in self.uids]
        if any(kv is not None for kv in asked):
            self._compact(asked)
        return super().generate(tokens)

    def _compact(self, asked: list[KvRequest | None]) -> None:
        if not any(self.tokens):  # prompts of one token: no layer holds a row
            for kv in asked:
                if kv is not None:
                    kv.report = exact_report(0, [])
            return
        caches, changed = [], False
        for i, kv in enumerate(asked):
            cache = self.extract_cache(i)
            if kv is not None and self.tokens[i]:
                changed |= compact_asked(self.model, self.tokens[i], cache, kv)
            elif kv is not None:
                kv.report = exact_report(0, [])
            if kv is not None and kv.failure is not None:
                self.max_tokens[i] = 1  # it ends at once; the handler tells the client why
            caches.append(cache)
        if changed:
            self.prompt_cache.clear()
            self.prompt_cache = _merge_caches(caches)


class EvictingBatchGenerator(BatchGenerator):
    """A `BatchGenerator` whose prompts are compacted; without a plan it is mlx-lm's own."""

    def __init__(self, model: Any, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self._asked: dict[int, KvRequest] = {}
        batch = EvictingPromptBatch.empty(
            self.model, self.sampler, prefill_step_size=self.prefill_step_size
        )
        batch.asked = self._asked
        self._prompt_batch = batch

    def insert_segments(self, *args: Any, **kwargs: Any) -> list[int]:
        """Add requests; this thread's plan goes with the first of them."""
        plan = current.take()
        uids = super().insert_segments(*args, **kwargs)
        if plan is not None and plan.kv.reported:
            self._asked[uids[0]] = plan.kv
        return uids

    def remove(self, uids: list[int], return_prompt_caches: bool = False) -> Any:
        """Remove requests, and what they ask."""
        for uid in uids:
            self._asked.pop(uid, None)
        return super().remove(uids, return_prompt_caches)


def compact_asked(model: Any, tokens: list[int], cache: list[Any], kv: KvRequest) -> bool:
    """Compact one request's cache in place, and note its report or its failure.

    Args:
        tokens: the ids that the cache holds.

    Returns:
        Whether the cache was changed.
    """
    if kv.config is None:
        kv.report = exact_report(len(tokens), cache)
        return False
    start = time.perf_counter()
    try:
        result = compact_prefilled(model, tokens, cache, kv.config)
        mx.eval([layer.state for layer in result.cache])
    except Exception as error:  # one request's fault must not end the others
        if not isinstance(error, KvkeepError):
            _log.exception("A cache of %d tokens could not be compacted", len(tokens))
        kv.failure = error
        return False
    cache[:] = result.cache
    kv.report = report_of(kv.config, result, time.perf_counter() - start)
    return result.evicted
