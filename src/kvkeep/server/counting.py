"""A request's tokens counted on their way from the generation thread to its client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvkeep.server.settings import KvRequest

Progress = Callable[[int, int], None]


def counted(kv: KvRequest, answer: Iterator[Any]) -> Iterator[Any]:
    """mlx-lm's responses as they come, noted in the request's entry."""
    entry = kv.entry
    for response in answer:
        if kv.failure is None:  # the one token of a request that failed is dropped
            if entry.generated == 0 and kv.report is not None:
                entry.compacted(kv.report)
            entry.token()
            if response.finish_reason is not None:
                entry.reason = response.finish_reason
        yield response


def noted(kv: KvRequest, progress: Progress | None) -> Progress:
    """A progress callback that notes the prefill in the request's entry first."""

    def note(done: int, total: int) -> None:
        kv.entry.prefill(done, total)
        if progress is not None:
            progress(done, total)

    return note
