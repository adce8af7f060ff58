"""Replay: see the window's queries of a prompt that is already in a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from kvkeep.attention import seam
from kvkeep.attention.looking import facts_of
from kvkeep.attention.observe import WindowObserver, observing, require_visible
from kvkeep.attention.undo import restorer_of_copy
from kvkeep.caches import is_exact, leaves_of
from kvkeep.errors import CacheError, PromptError


def replay_queries(
    model: Any,
    cache: list[Any],
    tokens: Sequence[int],
    layers: list[int],
    *,
    policy: str,
    needed: bool = True,
) -> Mapping[int, WindowObserver]:
    """Trim the last W tokens, run them again under observation, restore their rows.

    Works for any way the cache was filled; costs one forward of W tokens. Afterwards the
    cache holds the very rows it held before. Layers other than a plain `KVCache` are copied
    for that; of a `KVCache`, only the last W rows are.

    Args:
        cache: every layer trimmable; unchanged when this returns or raises.
        tokens: the last W token ids that the cache holds.
        layers: indices, among the leaves, of what to observe.
        policy: named in refusals.
        needed: False accepts a model whose queries are not seen, as `require_visible` does.

    Raises:
        PromptError: no tokens, or more than the cache holds.
        CacheError: a layer cannot be trimmed.
        UnsupportedModelError: the seam cannot see the model's queries.
    """
    width = len(tokens)
    leaves = leaves_of(cache)
    held = min((leaves[layer].offset for layer in layers), default=0)
    if not 0 < width <= held:
        raise PromptError(
            "cannot replay the window",
            expected=f"between 1 and {held} tokens, the last ones of the cache",
            received=f"{width} tokens",
        )
    stuck = sorted({type(c).__name__ for c in leaves if not c.is_trimmable()})
    if stuck:
        raise CacheError(
            "cannot replay over a cache that cannot be trimmed",
            expected="trimmable layers",
            received=", ".join(stuck),
            remedy="Observe during the prefill instead, or use a policy that needs no queries.",
        )
    seam.install(model)
    facts = facts_of(model)
    restore = [_restorer(layer, width) for layer in leaves]
    try:
        for layer in leaves:
            layer.trim(width)
        with observing(leaves, layers, width, facts=facts) as observers:
            model(mx.array(list(tokens))[None], cache=cache)
            require_visible(observers, model, policy, queries=needed, facts=facts)
            mx.eval([o.queries for o in observers.values() if o.queries is not None])
    finally:
        for give_back in restore:
            give_back()
    return observers


def _restorer(layer: Any, width: int) -> Callable[[], None]:
    """What puts a layer back after its last `width` rows were written over."""
    if not is_exact(layer):
        return restorer_of_copy(layer)
    offset = layer.offset
    rows = slice(offset - width, offset)
    # Copies of the rows alone: a second reference to the buffer would have it copied whole.
    keys, values = (mx.contiguous(a[..., rows, :]) for a in layer.keys_and_values())
    mx.eval(keys, values)

    def give_back() -> None:
        layer.keys[..., rows, :] = keys
        layer.values[..., rows, :] = values
        layer.offset = offset
        mx.eval(layer.keys, layer.values)

    return give_back
