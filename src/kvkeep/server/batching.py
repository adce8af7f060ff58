"""mlx-lm's batch generator, compacting each request between its prompt and its answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import (
    BatchGenerator,
    GenerationBatch,
    PromptProcessingBatch,
    _merge_caches,
)
from mlx_lm.models.cache import make_prompt_cache

from kvkeep.attention import DraftStart
from kvkeep.caches import allocated_nbytes
from kvkeep.compaction import compact_prefilled, kept_as_it_is
from kvkeep.errors import KvkeepError
from kvkeep.server import current
from kvkeep.server.current import HeldLayers, Plan, Watcher
from kvkeep.server.faults import is_out_of_memory, no_memory
from kvkeep.server.reports import exact_report, report_of

_LOOK = 16  # steps between two looks at what the caches take, where no request comes or goes
_LOGPROBS = 64  # of a response that ends a failed request; mlx-lm's server reads a few
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
        if any(plan is not None and (plan.kv.reported or plan.answered) for plan in plans):
            self._compact(plans, tokens)
        batch = super().generate(tokens)
        for plan in plans:
            if plan is not None and plan.governor is not None:
                plan.governor.answering(plan)
        return batch

    def _compact(self, plans: list[Plan | None], tokens: list[list[int]]) -> None:
        if not any(self.tokens):  # prompts of one token: no layer holds a row
            for plan in plans:
                if plan is not None and plan.kv.reported:
                    plan.kv.report = exact_report(0, [], plan)
            return
        asked = [plan for plan in plans if plan is not None]
        changes = any(plan.kv.config is not None or plan.answered for plan in asked)
        caches = self._taken_apart() if changes else self._slices()
        for i, (plan, cache) in enumerate(zip(plans, caches, strict=True)):
            if plan is None:
                continue
            if plan.kv.reported and self.tokens[i]:
                compact_asked(self.model, self.tokens[i], cache, plan)
            elif plan.kv.reported:
                plan.kv.report = exact_report(0, [], plan)
            if plan.kv.failure is not None:
                self.max_tokens[i] = 1  # it ends at once; the handler tells the client why
            elif plan.answered:
                self._read_again(i, plan, cache, tokens)
        if changes:
            self.prompt_cache = _merge_caches(caches)

    def _read_again(
        self, which: int, plan: Plan, cache: list[Any], tokens: list[list[int]]
    ) -> None:
        """Append what a request that begins again has answered; it steps from the last token."""
        rest = [*tokens[which], *plan.answered]
        self.model(mx.array(rest[:-1])[None], cache=cache)
        mx.eval([layer.state for layer in cache])
        self.tokens[which] += rest[:-1]
        tokens[which] = rest[-1:]

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


class WatchedBatch(GenerationBatch):
    """Answers in progress, which tell how far a step came that fails.

    Attributes:
        stepping: whether a step has begun and not ended.
        joining: whether requests are being added.
        stepped: what the last step gave, which would be lost if the prompts after it fail.
    """

    stepping = False
    joining = False
    stepped: Sequence[Any] = ()

    def next(self) -> list[Any]:
        """The next tokens."""
        self.stepped, self.stepping = (), True
        self.stepped = super().next()
        self.stepping = False
        return self.stepped

    def extend(self, batch: GenerationBatch) -> None:
        """Add requests."""
        self.joining = True
        super().extend(batch)
        self.joining = False


class EvictingBatchGenerator(BatchGenerator):
    """A `BatchGenerator` whose prompts are compacted; without a plan it is mlx-lm's own.

    A failure of a step is not the end of all: where memory could not be allocated, the
    largest request of those that were computed together fails, and the others begin again,
    from their prompts and what they have answered; other failures end those requests only.
    """

    def __init__(self, model: Any, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.plans: dict[int, Plan] = {}
        self._steps = 0
        self._prompt_batch = self._no_prompts()
        self._generation_batch: WatchedBatch = WatchedBatch.empty(self.model, self.sampler)

    def insert_segments(self, *args: Any, **kwargs: Any) -> list[int]:
        """Add requests; this thread's plan goes with the first of them."""
        plan = current.take()
        uids = super().insert_segments(*args, **kwargs)
        if plan is not None:
            self.plans[uids[0]] = plan
            _, _, max_tokens, _, _, *rest = self._unprocessed_sequences[-len(uids)]
            plan.placed, plan.sequence = True, (max_tokens, *rest)  # without its cache
        return uids

    def remove(self, uids: list[int], return_prompt_caches: bool = False) -> Any:
        """Remove requests, and what they ask."""
        removed = super().remove(uids, return_prompt_caches)
        governors = self._governors()
        for uid in uids:
            self._forget(uid)
        self._note(governors)
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
        found = super().extract_cache(kept)
        for uid, (layers, tokens) in found.items():
            if (plan := self.plans.get(uid)) is not None and isinstance(layers, list):
                found[uid] = (HeldLayers(layers, plan), tokens)
        return {**found, **dropped}

    def _is_offered(self, plan: Plan | None, tokens: list[int]) -> bool:
        if plan is None:
            return True
        compact = plan.hit is not None and plan.hit.compacted_at > 0
        if len(tokens) > plan.checkpoint or compact or plan.answered:
            return False
        share = allocated_nbytes(self._prompt_batch.prompt_cache) // len(self._prompt_batch)
        return plan.governor is None or plan.governor.has_room_for(share)

    def _no_prompts(self) -> EvictingPromptBatch:
        batch = EvictingPromptBatch.empty(
            self.model, self.sampler, prefill_step_size=self.prefill_step_size
        )
        batch.plans = self.plans
        return batch

    # -- steps -------------------------------------------------------------------------

    def _next(self) -> Any:
        self._generation_batch.stepped = ()
        governors = self._governors()
        try:
            prompted, generated = super()._next()
        except Exception as error:
            prompted, generated = [], [*self._generation_batch.stepped]
            self._take_note(generated)  # before any of them begins again
            generated += self._recovered(error)
        else:
            self._take_note(generated)
        self._steps += 1
        ended = [r.uid for r in generated if r.finish_reason is not None]
        for uid in ended:
            self._forget(uid)
        if prompted or ended or self._steps % _LOOK == 0:
            self._note(governors)
        return prompted, generated

    def _take_note(self, generated: list[Any]) -> None:
        """Note what was answered, and what the prompt cache may have of those that ended."""
        for response in generated:
            plan = self.plans.get(response.uid)
            if plan is None:
                continue
            plan.answered.append(response.token)
            if response.finish_reason is not None:
                layers = response.prompt_cache if plan.keep_compact or not plan.compacted_at else []
                response.prompt_cache = HeldLayers(layers or [], plan)
        self._let_go(generated)

    def _let_go(self, generated: list[Any]) -> None:
        """Part the batch and the requests that ended, layer by layer: lazy slices of a layer,
        and the batch without them, would keep all its rows alive beside both."""
        ended = [r.prompt_cache for r in generated if r.finish_reason and r.prompt_cache]
        for index, layer in enumerate(self._generation_batch.prompt_cache if ended else ()):
            parts = [cache[index] for cache in ended]
            mx.eval([part.state for part in (layer, *parts) if not part.empty()])

    def _forget(self, uid: int) -> None:
        plan = self.plans.pop(uid, None)
        if plan is not None and plan.governor is not None:
            plan.governor.release(plan)

    def _governors(self) -> set[Watcher]:
        return {plan.governor for plan in self.plans.values() if plan.governor is not None}

    def _note(self, governors: set[Watcher]) -> None:
        """Tell what both batches take; of answers, each request's part as what it is."""
        answers = self._generation_batch
        exact = allocated_nbytes(self._prompt_batch.prompt_cache)
        taken = allocated_nbytes(answers.prompt_cache)
        plans = [self.plans.get(uid) for uid in answers.uids]
        evicted = sum(plan is not None and plan.compacted_at > 0 for plan in plans)
        compact = taken * evicted // max(len(plans), 1)
        for governor in governors:
            governor.note(exact + taken - compact, compact)

    # -- failures ----------------------------------------------------------------------

    def _recovered(self, error: Exception) -> list[Any]:
        """End or begin again the requests whose step failed; the responses that end them."""
        failed = self._take_failed()
        if any(uid not in self.plans for uid in failed):
            raise error  # requests that are none of ours
        mx.clear_cache()
        scarce = is_out_of_memory(error)
        if not scarce:
            _log.error("%d requests failed in a step", len(failed), exc_info=error)
        largest = max(failed, key=lambda uid: _length(self.plans[uid]), default=None)
        ended = []
        for uid in failed:
            plan = self.plans[uid]
            if scarce and uid != largest and len(plan.prompt) > 1:
                self._begin_again(uid, plan)
                continue
            plan.kv.failure = no_memory() if scarce else error
            ended.append(
                GenerationBatch.Response(
                    uid=uid,
                    token=0,
                    logprobs=mx.zeros(_LOGPROBS),
                    finish_reason="stop",
                    prompt_cache=[],
                    all_tokens=[],
                )
            )
        if scarce:
            _log.warning("No memory: %d of %d requests fail", len(ended), len(failed))
        return ended

    def _take_failed(self) -> list[int]:
        """Drop the batches that the failed step worked on; their requests."""
        answers, failed = self._generation_batch, []
        waiting = {sequence[0] for sequence in self._unprocessed_sequences}
        if answers.stepping or answers.joining:
            failed = list(answers.uids)
            self._generation_batch = WatchedBatch.empty(self.model, self.sampler)
        if not answers.stepping:
            busy = {*waiting, *self._generation_batch.uids}
            ended = {r.uid for r in answers.stepped if r.finish_reason is not None}
            failed += [uid for uid in self.plans if uid not in {*busy, *ended, *failed}]
            self._prompt_batch = self._no_prompts()
            self._currently_processing = []
        return failed

    def _begin_again(self, uid: int, plan: Plan) -> None:
        assert plan.sequence is not None
        max_tokens, *rest = plan.sequence
        segments = [plan.prompt[:-1], plan.prompt[-1:]]
        cache = make_prompt_cache(self.model, self.max_kv_size)
        left = max_tokens - len(plan.answered)
        plan.hit, plan.compacted_at, plan.kv.report = None, 0, None
        if plan.governor is not None:
            plan.governor.reading(plan)
        self._unprocessed_sequences.append((uid, segments, left, cache, [], *rest))


def _length(plan: Plan) -> int:
    return len(plan.prompt) + len(plan.answered)


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
        before = plan.hit.compacted_at
    if before and len(tokens) - before < max(kv.observed_tokens - 1, 1):
        plan.compacted_at = before
        kv.report = report_of(kv.config, kept_as_it_is(cache, len(tokens)), 0.0, plan)
        return
    start = time.perf_counter()
    try:
        following = [*plan.prompt, *plan.answered][len(tokens)]
        begin = DraftStart(following, plan.stop)
        result = compact_prefilled(model, tokens, cache, kv.config, draft_start=begin)
        mx.eval([layer.state for layer in result.cache])
    except Exception as error:  # one request's fault must not end the others
        if not (isinstance(error, KvkeepError) or is_out_of_memory(error)):
            _log.exception("A cache of %d tokens could not be compacted", len(tokens))
        kv.failure = error
        return
    cache[:] = result.cache
    plan.compacted_at = len(tokens) if result.kv_layers else before
    kv.report = report_of(kv.config, result, time.perf_counter() - start, plan)
