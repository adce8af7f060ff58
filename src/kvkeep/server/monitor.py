"""What the server is doing: each request's numbers, as the threads that serve it leave them.

A request's numbers are written by the thread that knows them, as plain attributes, and read by
any other: a number may be a token old, but no thread waits for another, and no reader touches
an array.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_log = logging.getLogger(__name__)

State = Literal["reading", "queued", "prefill", "decode", "done"]
#: The states of a live request, in the order in which it passes through them.
LIVE_STATES: tuple[State, ...] = ("queued", "prefill", "decode")
#: How rows are stored: all of a prompt's, or those that an eviction left.
KINDS: tuple[str, ...] = ("exact", "compact")
RECENT = 20
NO_POLICY = "none"


@dataclass(frozen=True)
class RequestView:
    """One request at one moment. A number that is not known is None.

    Attributes:
        id: the answer's X-Request-Id.
        endpoint: the path that was asked, or "other".
        stream: whether the answer is streamed.
        state: where it is; "reading" before its body is checked.
        age_s: seconds since it came; of one that is done, how long it took.
        policy: eviction policy, "none" for exact.
        budget: as the user spells it, None for exact.
        prompt_tokens: T, the prompt's length.
        prefilled_tokens: how many of them the cache holds so far.
        reused_tokens: how many of them came from the prompt cache.
        reuse: as what they were stored there: "exact", "compact" or "none".
        retained_tokens: rows per KV head after the prompt, with the last token's.
        generated: tokens answered so far.
        exact_bytes: of the prompt's rows before eviction.
        compact_bytes: of those that are left.
        queue_s: seconds before the generation thread took it up.
        prefill_s: seconds from there to the first token.
        first_token_s: seconds from its arrival to the first token.
        compact_s: seconds of scoring and compacting.
        tokens_per_s: of the tokens after the first.
        status: HTTP status, 499 where the client left; None while it is live.
        reason: how it ended: the answer's finish reason, or a short name of the fault.
        ended_at: when, in seconds since the epoch.
    """

    id: str
    endpoint: str
    stream: bool
    state: State
    age_s: float
    policy: str
    budget: str | None
    prompt_tokens: int | None
    prefilled_tokens: int
    reused_tokens: int
    reuse: str
    retained_tokens: int | None
    generated: int
    exact_bytes: int | None
    compact_bytes: int | None
    queue_s: float | None
    prefill_s: float | None
    first_token_s: float | None
    compact_s: float | None
    tokens_per_s: float | None
    status: int | None
    reason: str | None
    ended_at: float | None

    @property
    def evicted_tokens(self) -> int | None:
        """Rows per KV head that are gone."""
        if self.prompt_tokens is None or self.retained_tokens is None:
            return None
        return self.prompt_tokens - self.retained_tokens


@dataclass(frozen=True)
class Totals:
    """Sums over all requests since the start, the live ones included; none ever falls.

    Attributes:
        requests: that have ended.
        prompt_tokens, generated_tokens: read and answered.
        reused_tokens: of prompts, from the prompt cache, by how they were stored.
        rows_kept, rows_evicted: per KV head, of prompts whose eviction is reported.
    """

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    rows_kept: int = 0
    rows_evicted: int = 0

    def plus(self, views: Iterable[RequestView]) -> Totals:
        """These sums and the numbers of some requests."""
        views = list(views)
        reused = dict(self.reused_tokens)
        for view in views:
            if view.reused_tokens:
                reused[view.reuse] = reused.get(view.reuse, 0) + view.reused_tokens
        return Totals(
            self.requests + sum(view.state == "done" for view in views),
            self.prompt_tokens + sum(view.prompt_tokens or 0 for view in views),
            self.generated_tokens + sum(view.generated for view in views),
            reused,
            self.rows_kept + sum(view.retained_tokens or 0 for view in views),
            self.rows_evicted + sum(view.evicted_tokens or 0 for view in views),
        )


@dataclass(frozen=True)
class Stored:
    """Caches of one kind in the prompt cache."""

    entries: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Snapshot:
    """The server at one moment.

    Attributes:
        uptime_s: seconds since the start.
        live: requests that wait or are served, oldest first.
        recent: the last that ended, newest first.
        states: how many live requests are in each state.
        totals: sums since the start.
        prompt_cache: what it holds, by kind.
        in_flight: bytes of the live requests' caches, by kind.
        limits: by name; None is no limit.
    """

    uptime_s: float
    live: tuple[RequestView, ...]
    recent: tuple[RequestView, ...]
    states: Mapping[str, int]
    totals: Totals
    prompt_cache: Mapping[str, Stored]
    in_flight: Mapping[str, int]
    limits: Mapping[str, float | None]


class Entry:
    """One request's numbers. Its methods are its events; each returns at once.

    An event that comes after `finished` is dropped. Without a monitor nobody reads it.
    """

    def __init__(
        self,
        request_id: str = "",
        *,
        kind: str = "other",
        stream: bool = False,
        monitor: Monitor | None = None,
    ) -> None:
        self.id = request_id
        self.kind = kind
        self.stream = stream
        self.state: State = "reading"
        self.policy = NO_POLICY
        self.budget: str | None = None
        self.prompt_tokens: int | None = None
        self.prefilled_tokens = 0
        self.reused_tokens = 0
        self.reuse = "none"
        self.retained_tokens: int | None = None
        self.evicted = False
        self.generated = 0
        self.exact_bytes: int | None = None
        self.compact_bytes: int | None = None
        self.compact_s: float | None = None
        self.status: int | None = None
        self.reason: str | None = None
        self._monitor = monitor
        self._begun = time.monotonic()
        self._queued: float | None = None
        self._admitted: float | None = None
        self._first: float | None = None
        self._ended: float | None = None
        self._ended_at: float | None = None

    # -- events ------------------------------------------------------------------------

    def asks(self, policy: str | None, budget: str | None, *, stream: bool) -> None:
        """Its body is read: what it asks of its cache; None is exact."""
        self.policy = policy or NO_POLICY
        self.budget = budget
        self.stream = stream

    def queued(self) -> None:
        """It waits for the generation thread; from now on it is live."""
        if self.state == "reading":
            self._queued = time.monotonic()
            self.state = "queued"
            if self._monitor is not None:
                self._monitor._add(self)

    def admitted(
        self, prompt_tokens: int, reused_tokens: int = 0, reuse_kind: str = "none"
    ) -> None:
        """The generation thread took it up. Called again, the numbers are put right.

        Args:
            prompt_tokens: T.
            reused_tokens: how many of them the prompt cache gave.
            reuse_kind: "exact", "compact" or "none".
        """
        if self.state == "done":
            return
        if self._admitted is None:
            self._admitted = time.monotonic()
        self.prompt_tokens = prompt_tokens
        self.reused_tokens = reused_tokens
        self.reuse = reuse_kind if reused_tokens else "none"
        self.prefilled_tokens = max(self.prefilled_tokens, reused_tokens)
        if self.state != "decode":
            self.state = "prefill"

    def prefill(self, done: int, total: int) -> None:
        """So many of the tokens that were left to read are read."""
        if self.state != "done":
            self.prefilled_tokens = self.reused_tokens + done

    def sized(self, exact_bytes: int, compact_bytes: int) -> None:
        """What its cache takes, and would take without eviction, at this moment."""
        if self.state != "done":
            self.exact_bytes, self.compact_bytes = exact_bytes, compact_bytes

    def compacted(self, report: Mapping[str, Any]) -> None:
        """Its cache is ready to decode from.

        Args:
            report: `usage.kv`, see `kvkeep.server.reports`.
        """
        if self.state == "done":
            return
        self.sized(report["exact_bytes"], report["compact_bytes"])
        self.retained_tokens = report["retained_tokens"]
        self.evicted = report["evicted"]
        if self.evicted:
            self.compact_s = report["compact_ms"] / 1000

    def token(self) -> None:
        """One more token is answered."""
        self.generated += 1
        if self._first is None:
            self._first = time.monotonic()
            if self.state != "done":
                self.state = "decode"

    def finished(self, status: int, reason: str) -> None:
        """It has ended; only the first call counts.

        Args:
            status: HTTP status, or what it would be had the headers not been sent.
            reason: short name; never a text of the client's.
        """
        if self.state == "done":
            return
        self.status, self.reason = status, reason
        self._ended, self._ended_at = time.monotonic(), time.time()
        if self._monitor is not None:
            self._monitor._end(self)
        self.state = "done"

    # -- reading -----------------------------------------------------------------------

    def view(self, *, done: bool = False) -> RequestView:
        """Its numbers at this moment."""
        now = time.monotonic() if self._ended is None else self._ended
        return RequestView(
            id=self.id,
            endpoint=self.kind,
            stream=self.stream,
            state="done" if done else self.state,
            age_s=now - self._begun,
            policy=self.policy,
            budget=self.budget,
            prompt_tokens=self.prompt_tokens,
            prefilled_tokens=self.prefilled_tokens,
            reused_tokens=self.reused_tokens,
            reuse=self.reuse,
            retained_tokens=self.retained_tokens,
            generated=self.generated,
            exact_bytes=self.exact_bytes,
            compact_bytes=self.compact_bytes,
            queue_s=_between(self._queued, self._admitted),
            prefill_s=_between(self._admitted, self._first),
            first_token_s=_between(self._begun, self._first),
            compact_s=self.compact_s,
            tokens_per_s=self._speed(now),
            status=self.status,
            reason=self.reason,
            ended_at=self._ended_at,
        )

    def _speed(self, now: float) -> float | None:
        if self._first is None or self.generated < 2 or now <= self._first:
            return None
        return (self.generated - 1) / (now - self._first)


class Monitor:
    """Which requests are live, what the last ones did, and the sums.

    Attributes:
        listeners: called once with each request that has ended, by the thread that served it.
        prompt_cache: gives what the prompt cache holds, by kind.
        in_flight: gives the bytes of the live caches, by kind.
        limits: by name, in bytes or seconds; None is no limit.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[RequestView], None]] = []
        self.prompt_cache: Callable[[], Mapping[str, Stored]] = dict
        self.in_flight: Callable[[], Mapping[str, int]] = self._reported_bytes
        self.limits: dict[str, float | None] = {}
        self._lock = threading.Lock()
        self._live: dict[int, Entry] = {}
        self._recent: deque[RequestView] = deque(maxlen=RECENT)
        self._past = Totals()
        self._begun = time.monotonic()

    def begin(self, request_id: str, *, kind: str = "other", stream: bool = False) -> Entry:
        """A request came in; its entry."""
        return Entry(request_id, kind=kind, stream=stream, monitor=self)

    def snapshot(self) -> Snapshot:
        """The server at this moment, from numbers that are there already."""
        with self._lock:
            live = tuple(entry.view() for entry in self._live.values())
            recent = tuple(reversed(self._recent))
            totals = self._past.plus(live)
        return Snapshot(
            uptime_s=time.monotonic() - self._begun,
            live=live,
            recent=recent,
            states={state: sum(view.state == state for view in live) for state in LIVE_STATES},
            totals=totals,
            prompt_cache={**dict.fromkeys(KINDS, Stored()), **self.prompt_cache()},
            in_flight={**dict.fromkeys(KINDS, 0), **self.in_flight()},
            limits=dict(self.limits),
        )

    def _add(self, entry: Entry) -> None:
        with self._lock:
            self._live[id(entry)] = entry

    def _end(self, entry: Entry) -> None:
        view = entry.view(done=True)
        with self._lock:
            self._live.pop(id(entry), None)
            self._recent.append(view)
            self._past = self._past.plus([view])
        for listener in self.listeners:
            try:
                listener(view)
            except Exception:  # whoever watches must not end what is watched
                _log.exception("A listener failed")

    def _reported_bytes(self) -> dict[str, int]:
        """Bytes of the prompts' rows, as far as they are known."""
        sums = dict.fromkeys(KINDS, 0)
        with self._lock:
            for entry in self._live.values():
                sums["compact" if entry.evicted else "exact"] += entry.compact_bytes or 0
        return sums


def _between(start: float | None, stop: float | None) -> float | None:
    return None if start is None or stop is None else stop - start
