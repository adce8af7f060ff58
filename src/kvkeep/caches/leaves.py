"""Cache lists whose layers hold several caches each (mlx-lm's `CacheList`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlx_lm.models.cache import CacheList


def leaves_of(cache: Sequence[Any]) -> list[Any]:
    """The caches of a cache list in order, those inside a `CacheList` one by one.

    Where no layer holds several, this is the list itself. Selections, observers and facts
    about a model count caches in this order.
    """
    found: list[Any] = []
    for layer in cache:
        if isinstance(layer, CacheList):
            found += layer.caches
        else:
            found.append(layer)
    return found


def replace_leaves(cache: list[Any], changed: Mapping[int, Any]) -> None:
    """Put other caches in a list, by index among its leaves.

    A `CacheList` that holds one of them is replaced by a new one: the old may be somebody
    else's.
    """
    for place, indices in enumerate(places_of(cache)):
        if not any(index in changed for index in indices):
            continue
        layer = cache[place]
        if isinstance(layer, CacheList):
            held = zip(indices, layer.caches, strict=True)
            cache[place] = CacheList(*(changed.get(index, leaf) for index, leaf in held))
        else:
            cache[place] = changed[indices.start]


def places_of(cache: Sequence[Any]) -> Iterator[range]:
    """For each layer of a cache list, the indices of its leaves."""
    start = 0
    for layer in cache:
        stop = start + (len(layer.caches) if isinstance(layer, CacheList) else 1)
        yield range(start, stop)
        start = stop
