"""Requests of every kind, alone and in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

import kvkeep
from kvkeep import (
    LayerSelection,
    Selection,
)
from oracles import logits_of, prefilled
from tiny_models import random_tokens, tiny_llama

MODEL = tiny_llama()
LAYERS, KV_HEADS = 2, 2
TOLERANCE = 1e-5


def stock(length: int, seed: int = 0) -> list[Any]:
    return prefilled(MODEL, random_tokens(length, seed), 64)


def compact(length: int, keep: int, seed: int = 0, heads: int = KV_HEADS) -> list[Any]:
    """A request of `length` tokens that kept `keep` random rows, other ones in each layer."""
    random = np.random.default_rng(seed)
    layers = {
        layer: LayerSelection(
            tuple(np.sort(random.choice(length, keep, replace=False)) for _ in range(heads))
        )
        for layer in range(LAYERS)
    }
    return kvkeep.evict_selection(stock(length, seed), Selection(length, layers)).cache


def unequal(length: int, keep: int, cut: int, seed: int = 0) -> list[Any]:
    """A request whose heads hold unequal numbers of rows, after a logical trim."""
    cache = compact(length, keep, seed)
    for layer in cache:
        layer.trim(cut)
    assert any(layer.owns_attention for layer in cache)
    return cache


def requests() -> list[list[Any]]:
    return [
        compact(60, 20, 1),
        compact(90, 41, 2, heads=1),
        unequal(80, 15, 30, 3),
        stock(33, 4),
    ]


NAMES = ["per-head", "shared", "unequal heads", "stock"]


def merged(caches: Sequence[list[Any]]) -> list[Any]:
    """As mlx-lm's BatchGenerator does it, through the first request's caches."""
    return [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]


def positions_of(cache: Any) -> tuple[tuple[int, ...], ...]:
    return (tuple(range(cache.offset)),) if type(cache) is KVCache else cache.head_positions


def assert_same_request(ours: list[Any], theirs: list[Any]) -> None:
    """Positions, offset and live rows, the rows bit by bit."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.offset == other.offset
        assert positions_of(mine) == positions_of(other)
        assert mine.size() == other.size()
        for a, b in zip(mine.keys_and_values(), other.keys_and_values(), strict=True):
            for head in range(KV_HEADS):
                live = len(positions_of(mine)[head % len(positions_of(mine))])
                assert mx.array_equal(
                    a[0, head, a.shape[2] - live :], b[0, head, b.shape[2] - live :]
                )


def assert_decodes_like(batch: list[Any], alone: Sequence[list[Any]], count: int = 5) -> None:
    """Each request of the batch gives the logits that it gives alone. Both are advanced."""
    tokens = [[7 + i] for i in range(len(alone))]
    for _ in range(count):
        ours = np.asarray(MODEL(mx.array(tokens), cache=batch)[:, -1])
        for i, cache in enumerate(alone):
            theirs = logits_of(MODEL, cache, tokens[i])[-1]
            np.testing.assert_allclose(ours[i], theirs, atol=TOLERANCE)
        tokens = [[int(row.argmax())] for row in ours]


def parts(batch: list[Any], count: int) -> list[list[Any]]:
    return [[layer.extract(i) for layer in batch] for i in range(count)]
