"""Hearing what `mx.fast.rope` is asked and gives, in one thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

#: Called with what a rotation gave and the offset that it was asked for.
Hear = Callable[[mx.array, Any], None]

_lock = threading.Lock()
_open = 0  # in all threads
_original: Any = None
_mine = threading.local()  # .hear: this thread's listeners, innermost last


@contextlib.contextmanager
def hearing_rotations(hear: Hear) -> Iterator[None]:
    """Tell `hear` of this thread's rotations; `mx.fast.rope` is put back with the last one."""
    global _open, _original
    with _lock:
        if _open == 0:
            _original = mx.fast.rope
            mx.fast.rope = _heard
        _open += 1
    before: list[Hear] = getattr(_mine, "hear", [])
    _mine.hear = [*before, hear]
    try:
        yield
    finally:
        _mine.hear = before
        with _lock:
            _open -= 1
            if _open == 0:
                mx.fast.rope = _original


def _heard(*args: Any, **kwargs: Any) -> mx.array:
    turned = _original(*args, **kwargs)
    for hear in getattr(_mine, "hear", ()):
        hear(turned, kwargs.get("offset"))
    return turned
