"""Does a model hand its rotated queries to attention as the rotation gave them?"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvkeep.attention import seam
from kvkeep.attention.observe import WindowObserver, observing
from kvkeep.attention.rotations import hearing_rotations
from kvkeep.caches import leaves_of

_mine = threading.local()  # .given: what this thread's last rotations gave


class _Observer(WindowObserver):
    """Notes whether a layer's queries are what a rotation gave."""

    rotated = False

    def observe(
        self,
        queries: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
        cache: Any = None,
    ) -> mx.array:
        given: deque[mx.array] = _mine.given
        self.rotated = any(queries is rows for rows in given) or any(
            _equal(queries, rows) for rows in given
        )
        return super().observe(queries, scale, mask, sinks, cache)


def unrotated_layers(model: Any, layers: list[int]) -> list[int]:
    """Those of the layers whose attention is seen to get other queries than rotated ones.

    Some models rotate in some layers only, rotate a part of the channels and join it to the
    rest, or normalise after the rotation: what looks like a layer's rotation could not be
    taken back off its rows. Two tokens run through the model with a cache of their own. Only
    the graph is built where attention gets the very array that the rotation gave; else the
    two are compared. Layers that call attention themselves cannot be seen and are not among
    the result.
    """
    seam.install(model)
    cache = make_prompt_cache(model)
    with _watched(), observing(leaves_of(cache), layers, 0, observer=_Observer) as observers:
        model(mx.array([[0, 0]]), cache=cache)
    return [
        layer
        for layer, observer in observers.items()
        if observer.calls and not getattr(observer, "rotated", True)
    ]


def _equal(queries: mx.array, rows: mx.array) -> bool:
    """Whether a model has done no more to the rotated rows than to change their dtype."""
    if queries.shape != rows.shape:
        return False
    return bool(mx.array_equal(queries.astype(mx.float32), rows.astype(mx.float32)))


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Keep what `mx.fast.rope` gave to this thread last."""
    given = _mine.given = deque(maxlen=4)  # of one layer: more would stay alive
    try:
        with hearing_rotations(lambda turned, offset: given.append(turned)):
            yield
    finally:
        del _mine.given
