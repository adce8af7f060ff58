"""Replay: see the window's queries of a prompt that is already in a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from kvkeep.attention import seam
from kvkeep.attention.looking import facts_of
from kvkeep.attention.observe import WindowObserver, observing, require_visible
from kvkeep.attention.undo import require_trimmable, restorer_of_rows
from kvkeep.caches import leaves_of
from kvkeep.errors import PromptError


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
    remedy = "Observe during the prefill instead, or use a policy that needs no queries."
    require_trimmable(leaves, "replay", remedy)
    seam.install(model)
    facts = facts_of(model)
    restore = [restorer_of_rows(layer, width) for layer in leaves]
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
