"""Queries over latent rows (MLA): absorbed into the latent space, the rotated part beside them.

Such a layer caches one latent row per token, as keys, and the rotated part of its key, as
values. Attention's scores are scale * (a.latent + q_pe.k_pe), where a is the query absorbed
by the layer's `embed_q`; the second term reaches attention in its mask. [a, q_pe] and
[latent, k_pe] are therefore the queries and keys of one head with the same scores.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from kvkeep.caches import RowGroup

_ABSORBS = "embed_q"  # what mlx-lm's models call it


def absorbers_of(model: Any, count: int) -> list[Callable[[mx.array], mx.array]]:
    """The maps that absorb queries, in the order of layers; none unless there are `count`."""
    if not isinstance(model, nn.Module):
        return []
    named = [
        (path, module)
        for path, module in model.named_modules()
        if path.rpartition(".")[2] == _ABSORBS
    ]
    named.sort(key=lambda pair: [int(n) for n in re.findall(r"\d+", pair[0])])
    return [module for _, module in named] if len(named) == count else []


class Absorber:
    """Makes queries over the rows of one latent layer of what its attention is given.

    Args:
        absorb: the layer's `embed_q`.
        rotated: what this thread's last rotations gave, the newest last.
    """

    def __init__(self, absorb: Callable[[mx.array], mx.array], rotated: deque[mx.array]) -> None:
        self._absorb, self._rotated = absorb, rotated

    def __call__(self, queries: mx.array, cache: Any) -> mx.array:
        """Queries [1, H_q, n, D] as [1, H_q, n, latent + rotated].

        A single token's come absorbed; several tokens' do not, as attention then works with
        expanded keys.
        """
        if queries.shape[2] > 1:
            queries = self._absorb(queries)
        part = rotated_part(self._rotated, queries.shape, cache.values.shape[-1])
        assert part is not None  # else the model's facts would not say that it can be done
        return mx.concatenate([queries, part.astype(queries.dtype)], axis=-1)


def rotated_part(rotated: Sequence[mx.array], shape: Sequence[int], size: int) -> mx.array | None:
    """The last rotation of `size` channels of queries [1, H_q, n, D], or None."""
    wanted = (*shape[:3], size)
    return next((rows for rows in reversed(rotated) if rows.shape == wanted), None)


def latent_group(group: RowGroup) -> RowGroup:
    """Latent rows as the keys and values that queries of an `Absorber` read."""
    joined = mx.concatenate([group.keys, group.values], axis=-1)
    return replace(group, keys=joined, values=group.keys)
