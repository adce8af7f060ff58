"""The queue in front of mlx-lm's loop: requests wait here until there is memory for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Queue
from typing import Any

from kvkeep.server.current import Plan
from kvkeep.server.faults import ClientGone
from kvkeep.server.governor import Estimate, MemoryGovernor

_PAUSE = 0.02  # seconds between two looks at requests that all wait


@dataclass
class _Waiting:
    answers: Queue[Any]
    request: Any
    args: Any
    since: float

    @property
    def handed(self) -> tuple[Any, Any, Any]:
        """As mlx-lm's loop takes it."""
        return self.answers, self.request, self.args


class Admission:
    """First come, first served: while the first request waits, so do those behind it.

    Args:
        governor: says whether a request may begin.
        take: the next request as mlx-lm's loop takes it, after so many seconds at most; None
            where there is none.
        plan: tokenizes a request and says what its cache needs, or None where that cannot be
            known yet (its model is not loaded). Raises what is wrong with the request.
        patience: seconds that a request waits at most.
    """

    def __init__(
        self,
        governor: MemoryGovernor,
        take: Callable[[float | None], Any],
        plan: Callable[[Any, Any], tuple[Plan, Estimate] | None],
        patience: float,
    ) -> None:
        self._governor = governor
        self._take = take
        self._plan = plan
        self._patience = patience
        self._waiting: deque[_Waiting] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def next(self, timeout: float | None) -> tuple[Any, Any, Any] | None:
        """The next request that may begin.

        Args:
            timeout: seconds to wait for one; None does not wait.
        """
        self._gather(timeout)
        while self._waiting:
            first = self._waiting[0]
            try:
                if first.args.kv.ended:
                    raise ClientGone
                admitted = self._admitted(first)
            except Exception as error:  # whatever is wrong with it is its own
                self._waiting.popleft()
                first.answers.put(error)
                continue
            if admitted:
                return self._waiting.popleft().handed
            self.refuse_late()
            if self._waiting and self._waiting[0] is first and not first.args.kv.admitted:
                if timeout:
                    time.sleep(min(timeout, _PAUSE))
                return None
        return None

    def refuse_late(self) -> None:
        """Answer those that have waited too long, and drop those that nobody waits for."""
        now, stay = time.monotonic(), deque[_Waiting]()
        for waiting in self._waiting:
            kv, waited = waiting.args.kv, now - waiting.since
            if kv.ended:
                waiting.answers.put(ClientGone())
            elif kv.admitted or waited <= self._patience:
                stay.append(waiting)
            elif (error := self._refusal(waiting, waited)) is not None:
                waiting.answers.put(error)
            else:
                stay.append(waiting)
        self._waiting = stay

    def _refusal(self, waiting: _Waiting, waited: float) -> Exception | None:
        """What a request that waited too long is told; None where a lower budget fits."""
        try:
            planned = self._plan(waiting.request, waiting.args)
            if planned is not None and self._governor.admit_smaller(*planned):
                waiting.args.kv.admitted = True
                return None
        except Exception as error:  # whatever is wrong with it is its own
            return error
        return self._governor.busy(waited)

    def _gather(self, timeout: float | None) -> None:
        taken = self._take(None if self._waiting else timeout)
        while taken is not None:
            answers, request, args = taken
            self._waiting.append(_Waiting(answers, request, args, time.monotonic()))
            taken = self._take(None)

    def _admitted(self, waiting: _Waiting) -> bool:
        if waiting.args.kv.admitted or self._governor.limit is None:
            return True
        planned = self._plan(waiting.request, waiting.args)
        if planned is None:
            return True
        waiting.args.kv.admitted = self._governor.admit(*planned)
        return waiting.args.kv.admitted
