"""The memory governor: which requests may begin, so that all caches together stay in bounds."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace

from kvkeep.caches import is_compact
from kvkeep.footprint import Footprint
from kvkeep.policies import policy_of
from kvkeep.reuse import Hit, PromptStore
from kvkeep.server.current import Plan
from kvkeep.server.faults import RequestError
from kvkeep.spec import Budget

_FEWEST = 8  # a shrunken budget is at least this part of the one that was asked
_RECENT = 16  # requests that an estimate of the waiting time looks at


@dataclass(frozen=True)
class Need:
    """Bytes that one request's cache takes at most.

    Attributes:
        prompt: while its prompt is read, what is kept of it included.
        decode: from then on to its last token.
    """

    prompt: int
    decode: int

    @property
    def most(self) -> int:
        """The greater of the two."""
        return max(self.prompt, self.decode)


@dataclass
class _Live:
    need: Need
    began: float
    answering: bool = False


class MemoryGovernor:
    """Bounds the bytes of live caches and of the prompt cache, together.

    A batch is padded to its longest request, so that n requests take n times what the largest
    of them does; a request that is yet to answer counts as the greater of its two needs.
    Methods are called by the generation thread; the numbers may be read by any.

    Args:
        limit: bytes, or None for no bound.
        store: the prompt cache; it is what has to give way first.
        shrink: lower an evicted request's budget before it is refused.
        max_store_nbytes: the user's own bound of the prompt cache, or None.

    Attributes:
        live: bytes of the live caches' buffers at the last step, "exact" and "compact".
        peak: the most that live caches and prompt cache ever took together, of the steps'.
    """

    def __init__(
        self,
        limit: int | None,
        store: PromptStore,
        *,
        shrink: bool = False,
        max_store_nbytes: int | None = None,
    ) -> None:
        self.limit = limit
        self.shrink = shrink
        self.live = {"exact": 0, "compact": 0}
        self.peak = 0
        self._store = store
        self._max_store = max_store_nbytes
        self._live: dict[Plan, _Live] = {}
        self._seconds: deque[float] = deque(maxlen=_RECENT)

    @property
    def reserved(self) -> int:
        """Bytes that the live requests take at most."""
        return self._bound([])

    def admit(self, plan: Plan, estimate: Estimate) -> bool:
        """Reserve what a request needs, or say that it has to wait.

        Args:
            estimate: what a plan needs.

        Raises:
            RequestError: 413, it needs more than the limit by itself.
        """
        self._forget_strays()
        if self.limit is None:
            return True
        need = estimate.need(plan)
        hit = plan.expected
        if hit is not None and self._bound([need]) + hit.entry.nbytes > self.limit:
            plan.expected = None  # there is no room for the entry and a copy of it
            need = estimate.need(plan)
        if need.most > self.limit and (need := self._shrunk(plan, estimate, alone=True)) is None:
            raise self._too_large(plan, estimate.need(plan))
        if self._bound([need]) > self.limit:
            return False
        self._reserve(plan, need)
        return True

    def admit_smaller(self, plan: Plan, estimate: Estimate) -> bool:
        """Reserve for a request with a lower budget, where that is allowed and enough."""
        need = self._shrunk(plan, estimate, alone=False)
        if need is None:
            return False
        self._reserve(plan, need)
        return True

    def answering(self, plan: Plan) -> None:
        """A request's prompt is read and compacted."""
        if (live := self._live.get(plan)) is not None:
            live.answering = True

    def reading(self, plan: Plan) -> None:
        """A request begins again."""
        if (live := self._live.get(plan)) is not None:
            live.answering = False

    def release(self, plan: Plan) -> None:
        """A request's cache is gone from the live ones."""
        live = self._live.pop(plan, None)
        if live is not None:
            self._seconds.append(time.monotonic() - live.began)
            self._bound_store()

    def has_room_for(self, nbytes: int) -> bool:
        """Whether the prompt cache may take so many bytes; older entries go if they must.

        Called before the bytes are computed, so that both never exist beside each other.
        """
        bound = self._store_bound()
        if bound is None:
            return True
        if nbytes > bound:
            return False
        self._store.trim_to(n_bytes=bound - nbytes)
        return True

    @property
    def in_flight(self) -> int:
        """Bytes of the live caches' buffers at the last step."""
        return sum(self.live.values())

    def note(self, exact: int, compact: int) -> None:
        """What the live caches take at this step."""
        self.live = {"exact": exact, "compact": compact}
        self.peak = max(self.peak, exact + compact + self._store.nbytes)

    def busy(self, waited: float) -> RequestError:
        """The refusal of a request that has waited too long."""
        return RequestError(
            "no memory for another request at the moment",
            status=503,
            code="kv_memory_exhausted",
            expected=f"room within --kv-memory ({self.limit} bytes)",
            received=f"{len(self._live)} requests that take up to {self.reserved} bytes,"
            f" after {waited:.0f} s",
            remedy="Try again later.",
            retry_after=self._retry_after(),
        )

    # -- bounds ------------------------------------------------------------------------

    def _bound(self, more: list[Need]) -> int:
        reading = [live.need for live in self._live.values() if not live.answering] + more
        answering = [live.need for live in self._live.values() if live.answering]
        decode = max((need.decode for need in reading + answering), default=0)
        prompt = max((need.prompt for need in reading), default=0)
        return len(reading) * max(prompt, decode) + len(answering) * decode

    def _reserve(self, plan: Plan, need: Need) -> None:
        self._live[plan] = _Live(need, time.monotonic())
        self._bound_store(keep=plan.expected)

    def _store_bound(self) -> int | None:
        if self.limit is None:
            return self._max_store
        room = max(0, self.limit - self.reserved)
        return room if self._max_store is None else min(room, self._max_store)

    def _bound_store(self, keep: Hit | None = None) -> None:
        """Entries go until what is left fits beside the live requests; `keep` fits."""
        bound = self._store_bound()
        self._store.max_nbytes = bound
        if bound is not None:
            self._store.trim_to(n_bytes=bound, keep=None if keep is None else keep.entry)

    def _forget_strays(self) -> None:
        """Requests that were admitted, but ended before a generator took them."""
        for plan in [p for p in self._live if p.kv.ended and not p.placed]:
            self.release(plan)

    # -- shrinking ---------------------------------------------------------------------

    def _shrunk(self, plan: Plan, estimate: Estimate, *, alone: bool) -> Need | None:
        """The need with the largest lower budget that fits, which the plan then has.

        Args:
            alone: fit into the limit alone, not beside the live requests.
        """
        config = plan.kv.config
        if not self.shrink or config is None or self.limit is None:
            return None
        asked = estimate.kept_rows(plan)
        low = max(_fewest_rows(plan), asked // _FEWEST, 1)
        high, best = asked - 1, None
        while low <= high:
            rows = (low + high) // 2
            plan.kv.config = replace(config, budget=Budget(rows, "rows"))
            need = estimate.need(plan)
            if (need.most if alone else self._bound([need])) <= self.limit:
                best, low = (plan.kv.config, need), rows + 1
            else:
                high = rows - 1
        plan.kv.config = config
        if best is None:
            return None
        plan.kv.shrunk_from = plan.kv.shrunk_from or str(config.limit)
        plan.kv.config, need = best
        plan.expected = None  # compact rows of the budget that was asked serve no longer
        return need

    # -- refusals ----------------------------------------------------------------------

    def _too_large(self, plan: Plan, need: Need) -> RequestError:
        kept = " and what is kept of it" if plan.kv.config is not None else ""
        return RequestError(
            f"a prompt of {len(plan.prompt)} tokens needs {need.most} bytes of cache",
            status=413,
            code="kv_memory_too_small",
            expected=f"at most {self.limit} bytes (--kv-memory)",
            received=f"{need.prompt} bytes for the prompt{kept},"
            f" {need.decode} bytes for the answer (max_tokens {plan.max_tokens})",
            remedy="Shorten the prompt, ask for fewer max_tokens"
            + (", lower kv.budget" if need.decode > need.prompt else "")
            + ", or give the server more memory.",
        )

    def _retry_after(self) -> int:
        """Seconds until one of the live requests should have ended, from how long others took."""
        took = sorted(self._seconds)
        usual = took[len(took) // 2] if took else 10.0
        now = time.monotonic()
        ages = [now - live.began for live in self._live.values()]
        return max(1, round(usual - max(ages, default=0.0)))


@dataclass(frozen=True)
class Estimate:
    """What requests need of a model's caches.

    Attributes:
        footprint: the model's.
        chunk: tokens of a prefill step.
        draft: the draft model's, whose cache stays exact, or None.
    """

    footprint: Footprint
    chunk: int
    draft: Footprint | None = None

    def need(self, plan: Plan) -> Need:
        """What a request's cache takes at most, in bytes of buffers."""
        length, last = len(plan.prompt), len(plan.prompt) + plan.max_tokens
        drafted = 0 if self.draft is None else self.draft.allocated_nbytes(last, chunk=self.chunk)
        config, held = plan.kv.config, length - 1
        if config is None or held <= config.min_tokens:
            prompt = self.footprint.allocated_nbytes(length, chunk=self.chunk)
            return Need(prompt + drafted, self.footprint.allocated_nbytes(last) + drafted)
        there = _rows_before(plan, held)
        kept = min(self.kept_rows(plan), there)
        ahead = policy_of(config).draft_length  # rows that come and go before others are evicted
        prompt = self.footprint.allocated_nbytes(held + ahead, kept=there + ahead, chunk=self.chunk)
        compact = self.footprint.nbytes(held, kept=kept)
        rows = kept + plan.max_tokens + 1
        decode = self.footprint.allocated_nbytes(last, kept=rows)
        return Need(prompt + compact + drafted, decode + drafted)

    def kept_rows(self, plan: Plan) -> int:
        """Rows per head that an evicted request keeps of its prompt, at most."""
        config, held = plan.kv.config, len(plan.prompt) - 1
        if config is None or config.store == "union":  # a union is what any head keeps
            return held
        limit = config.limit
        if limit.unit == "bytes":
            return min(held, int(limit.amount) // max(self.footprint.evictable_row_bytes, 1))
        return limit.rows(held)


def _rows_before(plan: Plan, held: int) -> int:
    """Rows per head before a prompt of `held` tokens is compacted."""
    hit = plan.expected
    if hit is None or not hit.entry.compacted_at:
        return held
    rows = max(layer.size() for layer in hit.entry.layers if is_compact(layer))
    return rows - (len(hit.entry.tokens) - hit.length) + held - hit.length


def _fewest_rows(plan: Plan) -> int:
    """Rows that no budget may go below: what is protected, and the window."""
    config, held = plan.kv.config, len(plan.prompt) - 1
    if config is None:
        return held
    inside = sum(max(0, min(stop, held) - start) for start, stop in config.protect)
    return inside + config.sink_tokens + max(plan.kv.observed_tokens, config.recent_tokens or 0)
