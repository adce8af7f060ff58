"""Replay: see the window's queries of a prompt that is already in a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from kvkeep.attention import seam
from kvkeep.attention.observe import WindowObserver, observing, require_visible
from kvkeep.caches import is_exact
from kvkeep.errors import CacheError, PromptError


def replay_queries(
    model: Any, cache: list[Any], tokens: Sequence[int], layers: list[int], *, policy: str
) -> Mapping[int, WindowObserver]:
    """Trim the last W tokens, run them again under observation, restore their rows.

    Works for any way the cache was filled; costs one forward of W tokens. Afterwards the
    cache holds the very rows it held before.

    Args:
        cache: every layer trimmable; unchanged when this returns or raises.
        tokens: the last W token ids that the cache holds.
        layers: indices of the layers to observe.
        policy: named in refusals.

    Raises:
        PromptError: no tokens, or more than the cache holds.
        CacheError: a layer cannot be trimmed.
        UnsupportedModelError: the seam cannot see the model's queries.
    """
    width = len(tokens)
    held = min((cache[layer].offset for layer in layers), default=0)
    if not 0 < width <= held:
        raise PromptError(
            "cannot replay the window",
            expected=f"between 1 and {held} tokens, the last ones of the cache",
            received=f"{width} tokens",
        )
    stuck = sorted({type(c).__name__ for c in cache if not c.is_trimmable()})
    if stuck:
        raise CacheError(
            "cannot replay over a cache that cannot be trimmed",
            expected="trimmable layers",
            received=", ".join(stuck),
            remedy="Observe during the prefill instead, or replay on a copy.",
        )
    seam.install(model)
    saved = _last_rows(cache, width)
    try:
        for layer in cache:
            layer.trim(width)
        with observing(cache, layers, width) as observers:
            model(mx.array(list(tokens))[None], cache=cache)
            require_visible(observers, model, policy)
            mx.eval([o.queries for o in observers.values()])
    finally:
        _restore_rows(cache, saved, held)
    return observers


def _last_rows(cache: list[Any], width: int) -> dict[int, tuple[mx.array, mx.array]]:
    """Copies of the rows that the replay will write over."""
    saved = {}
    for index, layer in enumerate(cache):
        if is_exact(layer):
            rows = slice(layer.offset - width, layer.offset)
            keys, values = layer.keys_and_values()
            saved[index] = mx.contiguous(keys[..., rows, :]), mx.contiguous(values[..., rows, :])
    mx.eval(list(saved.values()))
    return saved


def _restore_rows(cache: list[Any], saved: dict[int, tuple[mx.array, mx.array]], held: int) -> None:
    for index, (keys, values) in saved.items():
        layer = cache[index]
        start = held - keys.shape[2]
        layer.keys[..., start:held, :] = keys
        layer.values[..., start:held, :] = values
        layer.offset = held
