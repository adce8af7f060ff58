"""The request that mlx-lm's generation thread is about to start.

mlx-lm's loop tokenizes a request, looks into its prompt cache and hands it to a generator, one
after the other in one thread; what it hands on has no room for ours. So the plan waits here, by
thread: threads that are not ours find nothing, and run mlx-lm's own code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvkeep.reuse import Hit
from kvkeep.server.settings import KvRequest


@dataclass(eq=False)
class Plan:
    """A tokenized request, and how far it has come.

    Attributes:
        kv: what it asks; its report is filled in.
        prompt: T token ids.
        unread: tokens at the prompt's end that no exact cached prefix may hold.
        compact_unread: the same of compact ones.
        checkpoint: tokens up to which its exact rows are offered to the prompt cache.
        keep: takes the exact layers of all but the prompt's last token, where they are kept
            though the request is evicted outside of a batch.
        keep: takes the exact layers of all but the prompt's last token, of a request that is
        evicted alone; None where they are not kept.
    hit: what the prompt cache gave, or None.
        compacted_at: tokens that its cache held when rows were last evicted; 0 is exact.
        sequence: what mlx-lm's batch generator was given, to begin again from.
        replayed: answered tokens that a request which begins again has to read.
    """

    kv: KvRequest
    prompt: list[int]
    unread: int = 1
    compact_unread: int = 1
    checkpoint: int = 0
    keep: Callable[[list[Any]], None] | None = None
    hit: Hit | None = None
    compacted_at: int = 0
    sequence: tuple[Any, ...] | None = None
    replayed: tuple[int, ...] = ()


class HeldLayers(list[Any]):
    """Layers on their way into the prompt cache, with what evicted their rows."""

    def __init__(self, layers: list[Any], plan: Plan) -> None:
        super().__init__(layers)
        self.plan = plan


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
