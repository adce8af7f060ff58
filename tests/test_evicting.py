"""Evicting a given selection: what is kept, what is passed through, what stays the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from bare_models import cache_bytes
from kvkeep import (
    LayerSelection,
    Selection,
    evict_prompt_cache,
    evict_selection,
)
from kvkeep.attention import install
from kvkeep.compaction import cache_nbytes
from oracles import evicted_mask, greedy, logits_of, numpy_llama, prefilled
from tiny_models import random_tokens, tiny_llama

TOKENS = random_tokens(60)


def mixed_cache() -> list[Any]:
    """Exact layers among a sliding window, a state, and a layer that is still empty."""
    exact = prefilled(tiny_llama(), TOKENS)
    rotating, state = RotatingKVCache(16), ArraysCache(2)
    rotating.update_and_fetch(mx.ones((1, 2, 60, 16)), mx.ones((1, 2, 60, 16)))
    state[0] = mx.ones((1, 3))
    return [rotating, exact[0], state, KVCache(), exact[1]]


@pytest.mark.parametrize(
    "kept", [[0, 1, 59], np.array([5, 30]), mx.array([7]), (), range(60)], ids=repr
)
def test_a_mixed_list_is_evicted_where_it_can_be(kept: Sequence[int]) -> None:
    cache = mixed_cache()
    before = [repr(c) for c in cache_bytes(cache)]
    entries = list(cache)
    result = evict_prompt_cache(cache, kept, true_offset=60)
    positions = tuple(np.asarray(kept, int).tolist())
    for index in (0, 2, 3):
        assert result.cache[index] is entries[index]
    for index in (1, 4):
        assert result.cache[index].positions == positions
        assert (result.cache[index].offset, result.cache[index].size()) == (60, len(positions))
    assert (result.evicted, result.kv_layers) == (len(positions) < 60, 2)
    assert (result.retained_tokens, result.original_tokens) == (len(positions), 60)
    assert result.true_offset == 60
    assert result.compact_cache_nbytes == cache_nbytes(result.cache)
    assert result.exact_cache_nbytes == cache_nbytes(cache)
    row = 2 * 2 * 2 * 16 * 4
    saved = result.exact_cache_nbytes - result.compact_cache_nbytes
    assert saved == (60 - len(positions)) * row
    assert all(a is b for a, b in zip(cache, entries, strict=True))
    assert [repr(c) for c in cache_bytes(cache)] == before


def test_decoding_from_the_evicted_cache_leaves_the_callers_alone() -> None:
    model = tiny_llama()
    cache = prefilled(model, TOKENS)
    before = cache_bytes(cache)
    result = evict_prompt_cache(cache, list(range(0, 60, 2)), true_offset=60)
    greedy(model, result.cache, 5, 8)
    assert cache_bytes(cache) == before


def test_a_list_without_evictable_layers_comes_back_as_it_is() -> None:
    for cache in ([], [KVCache()], [RotatingKVCache(8), ArraysCache(2)]):
        result = evict_prompt_cache(cache, [0, 1], true_offset=60)
        assert (result.evicted, result.kv_layers, result.retained_tokens) == (False, 0, 60)
        assert len(result.cache) == len(cache)
        assert all(a is b for a, b in zip(result.cache, cache, strict=True))


def test_heads_may_keep_different_rows() -> None:
    model = tiny_llama()
    install()
    cache = prefilled(model, TOKENS)
    heads = [[0, 5, 9, 59], [1, 30, 31, 58]]
    layers = {i: LayerSelection(tuple(np.array(h) for h in heads)) for i in (0, 1)}
    result = evict_selection(cache, Selection(60, layers))
    assert result.cache[0].head_positions == tuple(map(tuple, heads))
    mask = np.stack([evicted_mask(61, heads, 60)] * 2)
    right = numpy_llama(model, [*TOKENS, 5], mask)[-1:]
    np.testing.assert_allclose(logits_of(model, result.cache, [5]), right, rtol=1e-4, atol=1e-4)
