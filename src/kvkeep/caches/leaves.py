"""Cache lists whose layers hold several caches each (mlx-lm's `CacheList`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from mlx_lm.models.cache import CacheList

from kvkeep.caches.retain import is_compact, is_exact
from kvkeep.errors import SelectionError
from kvkeep.spec import LayerSelection


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
    for place, indices in enumerate(_places(cache)):
        if not any(index in changed for index in indices):
            continue
        layer = cache[place]
        if isinstance(layer, CacheList):
            held = zip(indices, layer.caches, strict=True)
            cache[place] = CacheList(*(changed.get(index, leaf) for index, leaf in held))
        else:
            cache[place] = changed[indices.start]


def with_siblings(
    cache: Sequence[Any], selected: Mapping[int, LayerSelection]
) -> dict[int, LayerSelection]:
    """A selection, and the same rows of what stands beside a selected cache in its layer.

    Two full-attention caches of one layer hold rows for the same tokens: an indexer's keys
    name rows of the cache beside them, and one mask serves both.

    Args:
        cache: a cache list.
        selected: kept positions by index among its leaves.

    Raises:
        SelectionError: it names different rows for the caches of one layer.
    """
    leaves, chosen = leaves_of(cache), dict(selected)
    for indices in _places(cache):
        named = [chosen[i] for i in indices if i in chosen]
        if not named or len(indices) == 1:
            continue
        if any(not _same_rows(one, named[0]) for one in named[1:]):
            raise SelectionError(
                "caches of one layer that keep different rows",
                expected=f"one set of positions for caches {indices.start} to {indices.stop - 1}",
                received="several",
            )
        chosen |= {i: named[0] for i in indices if is_exact(leaves[i]) or is_compact(leaves[i])}
    return dict(sorted(chosen.items()))


def _same_rows(one: LayerSelection, other: LayerSelection) -> bool:
    same = len(one.heads) == len(other.heads)
    return same and all(map(np.array_equal, one.heads, other.heads))


def _places(cache: Sequence[Any]) -> Iterator[range]:
    start = 0
    for layer in cache:
        stop = start + (len(layer.caches) if isinstance(layer, CacheList) else 1)
        yield range(start, stop)
        start = stop
