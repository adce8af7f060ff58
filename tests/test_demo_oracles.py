"""The oracles on real weights: keeping all is stock, evicting is stock under a mask."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

import kvkeep
from kvkeep.attention import install
from kvkeep.compaction import prefill_and_compact

pytestmark = pytest.mark.demo_model

TEXT = (
    "The keeper rowed out before dawn, when the harbour was grey and the gulls still slept on the"
    " pilings. He carried a lamp, two loaves and the brass key that opened the lower door. Three"
    " boats lay at anchor beyond the mole: a collier from the north, a pilot cutter with a torn"
    " jib, and a schooner whose name had been painted over. He wrote their marks in the book, as"
    " his father had done, and noted the wind, which was backing to the west. "
)


def greedy(model: Any, cache: list[Any], token: int, count: int) -> tuple[list[int], mx.array]:
    """`count` greedy tokens after `token`, and all logits [count, vocabulary]."""
    tokens, logits = [], []
    for _ in range(count):
        step = model(mx.array([[token]]), cache=cache)[:, -1]
        token = int(np.asarray(mx.argmax(step)))
        tokens.append(token)
        logits.append(step)
    return tokens, mx.concatenate(logits)


def prefilled(model: Any, tokens: list[int], step: int) -> list[Any]:
    cache = make_prompt_cache(model)
    for start in range(0, len(tokens), step):
        model(mx.array(tokens[start : start + step])[None], cache=cache)
        mx.eval([c.state for c in cache])
    return cache


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 7, 64, 2048])
def test_keeping_all_is_bit_equal_to_stock(demo_model: Any, step: int) -> None:
    model, tokenizer = demo_model
    tokens = tokenizer.encode(TEXT)
    exact = prefilled(model, tokens[:-1], step)
    length = len(tokens) - 1
    shared = kvkeep.evict_prompt_cache(exact, range(length), true_offset=length).cache
    heads = kvkeep.LayerSelection((np.arange(length),) * exact[0].keys.shape[1])
    per_head = kvkeep.evict_selection(
        exact, kvkeep.Selection(length, {i: heads for i in range(len(exact))})
    ).cache
    expected, logits = greedy(model, copy.deepcopy(exact), tokens[-1], 64)
    for cache in (shared, per_head):
        assert all(type(c) is kvkeep.PositionPreservingKVCache for c in cache)
        got, compact_logits = greedy(model, cache, tokens[-1], 64)
        assert got == expected
        assert mx.array_equal(compact_logits, logits)


class MaskedFullCache(KVCache):
    """Every row is there; attention sees the kept ones and what was appended."""

    owns_attention = True

    def __init__(self, exact: KVCache, compact: Any) -> None:
        super().__init__()
        self.keys, self.values, self.offset = exact.keys, exact.values, exact.offset
        self.prompt = exact.offset
        self.kept = np.zeros((len(compact.head_positions), self.prompt), bool)
        for row, positions in zip(self.kept, compact.head_positions, strict=True):
            row[list(positions)] = True

    def attend(self, attention: Any, queries: Any, keys: Any, values: Any, **options: Any) -> Any:
        length, count = keys.shape[2], queries.shape[2]
        later = np.ones((len(self.kept), length - self.prompt), bool)
        mask = np.concatenate([self.kept, later], axis=1)[:, None]
        mask = mask & np.tril(np.ones((count, length), bool), length - count)
        mask = np.repeat(mask, queries.shape[1] // len(mask), axis=0)
        visible: Any = mask[None]
        return attention(queries, keys, values, cache=None, mask=mx.array(visible), **options)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "snapkv-d"},
        {"policy": "snapkv"},
        {"policy": "snapkv", "store": "shared", "pooling": "max"},
    ],
    ids=["snapkv-d", "snapkv per head", "snapkv shared"],
)
def test_evicting_equals_the_full_cache_under_a_mask(demo_model: Any, settings: dict) -> None:
    model, tokenizer = demo_model
    tokens = tokenizer.encode(TEXT * 3 + "The keeper opened the lower door with")
    exact = make_prompt_cache(model)
    config = kvkeep.EvictionConfig(budget="25%", **settings)
    result = prefill_and_compact(model, tokens[:-1], exact, config, step=64, keep_exact=True)
    assert result.evicted
    assert result.retained_tokens == (len(tokens) - 1) // 4
    install(model)
    full = [MaskedFullCache(e, c) for e, c in zip(exact, result.cache, strict=True)]
    last = mx.array(tokens[-1:] + tokenizer.encode(" the brass key"))[None]
    got = model(last, cache=result.cache)
    expected = model(last, cache=full)
    stock = np.asarray(model(last, cache=exact))
    got, expected = np.asarray(got), np.asarray(expected)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.abs(stock - expected).max() > 1e-2 * np.abs(expected).max()  # the mask counts
