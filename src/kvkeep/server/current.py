"""The request that mlx-lm's generation thread is about to start.

mlx-lm's loop tokenizes a request, looks into its prompt cache and hands it to a generator, one
after the other in one thread; what it hands on has no room for ours. So the plan waits here, by
thread: threads that are not ours find nothing, and run mlx-lm's own code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvkeep.reuse import Hit
from kvkeep.server.settings import KvRequest


class Watcher(Protocol):
    """Whoever bounds the memory of all requests."""

    def answering(self, plan: Plan) -> None:
        """A request's prompt is read and compacted."""
        ...

    def reading(self, plan: Plan) -> None:
        """A request begins again."""
        ...

    def release(self, plan: Plan) -> None:
        """A request's cache is gone."""
        ...

    def has_room_for(self, nbytes: int) -> bool:
        """Whether the prompt cache may take so many bytes."""
        ...

    def note(self, exact: int, compact: int) -> None:
        """Bytes of the live caches' buffers at this step."""
        ...


@dataclass(frozen=True)
class Reused:
    """What the prompt cache gave: not its entry, which may go while its request lives.

    Attributes:
        kind: "exact" or "compact".
        tokens: that the layers hold.
        compacted_at: tokens that they held when rows were last evicted; 0 is exact.
    """

    kind: str
    tokens: int
    compacted_at: int


@dataclass(eq=False)
class Plan:
    """A tokenized request, and how far it has come.

    Attributes:
        kv: what it asks; its report is filled in.
        prompt: T token ids.
        max_tokens: of the answer.
        unread: tokens at the prompt's end that no exact cached prefix may hold.
        compact_unread: the same of compact ones.
        checkpoint: tokens up to which its exact rows are offered to the prompt cache.
        keep: takes the exact layers of all but the prompt's last token, of a request that is
            evicted outside of a batch; None where they are not kept.
        keep_compact: whether its compact cache is offered to the prompt cache.
        expected: what the prompt cache has for it, until it is taken.
        hit: what the prompt cache gave, or None.
        compacted_at: tokens that its cache held when rows were last evicted; 0 is exact.
        governor: who is told how far it is.
        placed: whether a generator has it.
        sequence: how mlx-lm's batch generator answers it (max_tokens, sampler, …), to begin
            again with.
        answered: tokens that were sent; a request that begins again reads them.
        stop: token ids that end an answer.
    """

    kv: KvRequest
    prompt: list[int]
    max_tokens: int = 0
    unread: int = 1
    compact_unread: int = 1
    checkpoint: int = 0
    keep: Callable[[list[Any]], None] | None = None
    keep_compact: bool = False
    expected: Hit | None = None
    hit: Reused | None = None
    compacted_at: int = 0
    governor: Watcher | None = None
    placed: bool = False
    sequence: tuple[Any, ...] | None = None
    answered: list[int] = field(default_factory=list)
    stop: frozenset[int] = frozenset()


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
