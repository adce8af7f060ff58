"""The request that mlx-lm's generation thread is about to start.

mlx-lm's loop tokenizes a request, looks into its prompt cache and hands it to a generator, one
after the other in one thread; what it hands on has no room for ours. So the plan waits here, by
thread: threads that are not ours find nothing, and run mlx-lm's own code.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvkeep.server.settings import KvRequest


@dataclass(frozen=True)
class Plan:
    """A tokenized request.

    Attributes:
        kv: what it asks; its report is filled in.
        prompt: T token ids.
        unread: tokens at the prompt's end that no cached prefix may hold.
    """

    kv: KvRequest
    prompt: list[int]
    unread: int


class _Place(threading.local):
    plan: Plan | None = None


_place = _Place()


def put(plan: Plan | None) -> None:
    """Leave a plan for the next steps of this thread."""
    _place.plan = plan


def peek() -> Plan | None:
    """This thread's plan."""
    return _place.plan


def take() -> Plan | None:
    """This thread's plan, which is gone from here then."""
    plan, _place.plan = _place.plan, None
    return plan
