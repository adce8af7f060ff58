"""The compact cache with quantised rows: positions stay, and mlx-lm's --kv-bits works on it."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache

import kvkeep
from kvkeep import (
    LayerSelection,
    PositionPreservingKVCache,
    PositionPreservingQuantizedKVCache,
    Selection,
)
from kvkeep.errors import CacheError, KvkeepError, TrimError
from oracles import greedy, logits_of, prefilled, raw
from tiny_models import random_tokens, tiny_llama, tiny_tokenizer

HEADS, DIM, GROUP = 2, 32, 32
MODEL = tiny_llama(head_dim=DIM)
PROMPT = random_tokens(80)
SHARED = (0, 40, 99)
PER_HEAD = ((0, 40, 99), (7, 50, 60))
STORES = pytest.mark.parametrize("positions", [SHARED, PER_HEAD], ids=["shared", "per-head"])
BITS = pytest.mark.parametrize("bits", [4, 8])


def rows(count: int, seed: int = 0) -> mx.array:
    random = np.random.default_rng(seed)
    return mx.array(random.standard_normal((1, HEADS, count, DIM)).astype(np.float32))


def plain(positions: Any = SHARED, **options: Any) -> PositionPreservingKVCache:
    return PositionPreservingKVCache(
        rows(3, 1), rows(3, 2), offset=100, positions=positions, **options
    )


def quantised(positions: Any = SHARED, bits: int = 8) -> PositionPreservingQuantizedKVCache:
    return plain(positions).to_quantized(group_size=GROUP, bits=bits)


def snapshot(cache: Any) -> tuple[Any, ...]:
    parts = [part for packed in cache.keys_and_values() for part in packed]
    data = [raw(part) for part in parts]
    return cache.offset, cache.positions, cache.protected_stored, cache.size(), *data


@STORES
@BITS
def test_conversion_keeps_positions_and_packs_the_same_rows(positions: Any, bits: int) -> None:
    cache = plain(positions, protected_stored=2)
    cache.update_and_fetch(rows(2, 3), rows(2, 4))
    before = [np.array(part) for part in cache.keys_and_values()]
    packed = cache.to_quantized(group_size=GROUP, bits=bits)
    assert type(packed) is PositionPreservingQuantizedKVCache
    assert (packed.offset, packed.positions) == (102, cache.positions)
    assert (packed.protected_stored, packed.size()) == (2, 5)
    assert (packed.bits, packed.group_size) == (bits, GROUP)
    for ours, live in zip(packed.keys_and_values(), cache.keys_and_values(), strict=True):
        for mine, theirs in zip(ours, mx.quantize(live, group_size=GROUP, bits=bits), strict=True):
            assert mx.array_equal(mine, theirs)
    packed.update_and_fetch(rows(4), rows(4))
    packed.trim(60)
    assert (cache.offset, cache.size(), cache.protected_stored) == (102, 5, 2)
    for part, old in zip(cache.keys_and_values(), before, strict=True):
        np.testing.assert_array_equal(np.asarray(part), old)


@BITS
def test_appended_rows_are_quantised_like_the_stock_ones(bits: int) -> None:
    ours = PositionPreservingKVCache().to_quantized(group_size=GROUP, bits=bits)
    theirs = QuantizedKVCache(group_size=GROUP, bits=bits)
    for count in (3, 1, 300, 1):
        made = [cache.update_and_fetch(rows(count, 5), rows(count, 6)) for cache in (ours, theirs)]
        for mine, stock in zip(*made, strict=True):
            assert all(mx.array_equal(a, b) for a, b in zip(mine, stock, strict=True))
    assert ours.offset == theirs.offset == 305


@BITS
@pytest.mark.parametrize("heads", [1, HEADS], ids=["shared", "per-head"])
def test_keep_all_is_bit_equal_to_the_stock_quantised_cache(bits: int, heads: int) -> None:
    stock = prefilled(MODEL, PROMPT[:-1], 32)
    keep = LayerSelection((np.arange(79),) * heads)
    compact = kvkeep.evict_selection(stock, Selection(79, {0: keep, 1: keep})).cache
    ours, theirs = (
        [layer.to_quantized(group_size=GROUP, bits=bits) for layer in cache]
        for cache in (compact, stock)
    )
    mine, other = (greedy(MODEL, cache, PROMPT[-1], 32) for cache in (ours, theirs))
    assert mine[0] == other[0]
    np.testing.assert_array_equal(mine[1], other[1])


def evicted(keep: int = 30) -> list[Any]:
    random = np.random.default_rng(0)
    stock = prefilled(MODEL, PROMPT[:-1], 32)
    layers = {
        i: LayerSelection(
            tuple(np.sort(random.choice(79, keep, replace=False)) for _ in range(HEADS))
        )
        for i in range(2)
    }
    return kvkeep.evict_selection(stock, Selection(79, layers)).cache


@pytest.mark.parametrize(("start", "at_once"), [(0, True), (79, True), (85, False), (10**6, None)])
def test_generate_step_quantises_a_compact_cache(start: int, at_once: bool | None) -> None:
    """`quantized_kv_start` is compared with the true offset, not with the rows."""
    cache = evicted()
    kinds = []
    steps = generate_step(
        mx.array(PROMPT[-1:]),
        MODEL,
        max_tokens=12,
        prompt_cache=cache,
        kv_bits=8,
        kv_group_size=GROUP,
        quantized_kv_start=start,
    )
    tokens = []
    for token, _ in steps:
        tokens.append(token)
        kinds.append(type(cache[0]))
    small, packed = PositionPreservingKVCache, PositionPreservingQuantizedKVCache
    assert kinds[0] is (packed if at_once else small)
    assert kinds[-1] is (small if at_once is None else packed)
    assert cache[0].offset == 79 + 13 and cache[0].size() == 30 + 13
    assert cache[0].head_positions[0][30:] == tuple(range(79, 92))
    exact = greedy(MODEL, evicted(), PROMPT[-1], 12)[0]
    if at_once is None:
        assert tokens == exact
    else:  # 8 bits are close: the first tokens agree
        assert tokens[:3] == exact[:3]


def test_eight_bits_stay_close_to_full_rows() -> None:
    packed = [layer.to_quantized(group_size=GROUP, bits=8) for layer in evicted()]
    ours, theirs = (logits_of(MODEL, cache, PROMPT[-4:]) for cache in (packed, evicted()))
    difference = np.abs(ours - theirs).max()
    assert 0 < difference < 0.1


def test_kvkeep_stream_generate_with_kv_bits() -> None:
    config = kvkeep.EvictionConfig(
        policy="snapkv", budget=kvkeep.Budget.parse(30), window=8, min_tokens=0
    )
    cache = [KVCache() for _ in range(2)]
    responses = list(
        kvkeep.stream_generate(
            MODEL,
            tiny_tokenizer(),
            PROMPT,
            config=config,
            max_tokens=6,
            prompt_cache=cache,
            kv_bits=8,
            kv_group_size=GROUP,
            quantized_kv_start=0,
        )
    )
    assert len(responses) == 6
    assert all(type(layer) is PositionPreservingQuantizedKVCache for layer in cache)
    assert cache[0].offset == len(PROMPT) + 6


@STORES
def test_trim_as_without_quantisation(positions: Any) -> None:
    packed, cache = quantised(positions), plain(positions)
    for both in (packed, cache):
        both.update_and_fetch(rows(2, 3), rows(2, 4))
    for n in (1, 1 + 45, 10, 30):
        assert packed.trim(n) == cache.trim(n) == n
        assert packed.positions == cache.positions
        assert packed.owns_attention == cache.owns_attention
        expected = cache.to_quantized(group_size=GROUP, bits=8)
        counts = packed.live_head_rows
        for mine, theirs in zip(packed.keys_and_values(), expected.keys_and_values(), strict=True):
            for a, b in zip(mine, theirs, strict=True):
                for head in range(HEADS):
                    dead = packed.size() - counts[head % len(counts)]
                    assert mx.array_equal(a[0, head, dead:], b[0, head, dead:])


@pytest.mark.parametrize("n", [-1, 101, True])
def test_a_refused_trim_changes_nothing(n: Any) -> None:
    cache = quantised(PER_HEAD)
    before = snapshot(cache)
    with pytest.raises(TrimError):
        cache.trim(n)
    assert snapshot(cache) == before


def test_a_speculation_survives_quantisation() -> None:
    cache = plain()
    cache.start_speculation()
    cache.update_and_fetch(rows(2), rows(2))
    packed = cache.to_quantized(group_size=GROUP, bits=8)
    with pytest.raises(TrimError):
        packed.trim(3)
    assert packed.trim(2) == 2


def as_lists(state: Any) -> Any:
    return [as_lists(part) for part in state] if isinstance(state, tuple) else state


@STORES
@pytest.mark.parametrize("shape", [tuple, as_lists], ids=["tuple", "lists"])
def test_state_round_trip(positions: Any, shape: Any) -> None:
    cache = quantised(positions, bits=4)
    cache.update_and_fetch(rows(2, 3), rows(2, 4))
    for trimmed in (0, 1, 54):
        cache.trim(trimmed)
        state = shape(cache.state)
        again, twin = (
            PositionPreservingQuantizedKVCache.from_state(state, cache.meta_state) for _ in range(2)
        )
        assert snapshot(again) == snapshot(cache)
        assert (again.bits, again.group_size) == (4, GROUP)
        again.trim(5)
        again.update_and_fetch(rows(3, 8), rows(3, 9))
        assert snapshot(twin) == snapshot(cache), "two caches from one state share rows"


def test_state_of_an_empty_cache() -> None:
    empty = PositionPreservingKVCache().to_quantized(group_size=GROUP, bits=4)
    again = PositionPreservingQuantizedKVCache.from_state(empty.state)
    assert (again.empty(), again.offset, again.nbytes, again.bits) == (True, 0, 0, 4)


def test_states_that_are_no_cache() -> None:
    keys, values, table, start, appended, protected, group, bits = quantised().state
    tail = (protected, group, bits)
    for state in (
        (keys, values),
        (keys, values, table[:, :2], start, appended, *tail),
        (keys, values, table, start, 1, *tail),
        (keys, values, table, start, appended, 9, group, bits),
        (keys, None, table, start, appended, *tail),
    ):
        with pytest.raises(KvkeepError):
            PositionPreservingQuantizedKVCache.from_state(state)


@STORES
def test_deepcopy_is_independent(positions: Any) -> None:
    cache = quantised(positions)
    before = snapshot(cache)
    twin = copy.deepcopy(cache)
    twin.trim(30)
    twin.update_and_fetch(rows(4, 3), rows(4, 4))
    assert snapshot(cache) == before


@STORES
@BITS
def test_nbytes_are_those_of_the_live_arrays(positions: Any, bits: int) -> None:
    cache = quantised(positions, bits)
    for appended in (0, 1, 300):
        if appended:
            cache.update_and_fetch(rows(appended), rows(appended))
        live = [part for packed in cache.keys_and_values() for part in packed]
        assert cache.nbytes == sum(mx.contiguous(part).nbytes for part in live)
        assert cache.allocated_nbytes >= cache.nbytes
    assert cache.nbytes < 304 * HEADS * DIM * 4 * 2 / 2


def test_nbytes_leave_dead_rows_out() -> None:
    cache = quantised(PER_HEAD)
    per_row = cache.nbytes // 6
    cache.trim(55)
    assert cache.nbytes == 3 * per_row


@pytest.mark.parametrize("dim", [16, 48])
def test_a_head_size_that_no_group_fits_is_refused(dim: int) -> None:
    some = mx.zeros((1, HEADS, 2, dim))
    cache = PositionPreservingKVCache(some, some, offset=9, positions=(0, 3))
    with pytest.raises(CacheError) as raised:
        cache.to_quantized(group_size=GROUP, bits=8)
    assert "--kv-group-size" in str(raised.value)
    assert cache.positions == (0, 3)


def test_a_batch_is_refused() -> None:
    two = mx.zeros((2, HEADS, 1, DIM))
    for cache in (quantised(), PositionPreservingKVCache().to_quantized(GROUP, 8)):
        with pytest.raises(CacheError):
            cache.update_and_fetch(two, two)


def test_mlx_lm_refuses_to_batch_it() -> None:
    """mlx-lm has no batched quantised attention: no `merge` here lets it say so."""
    with pytest.raises(ValueError, match="does not yet support batching"):
        mlx_lm.batch_generate(
            MODEL, tiny_tokenizer(), [[1]], prompt_caches=[[quantised(), quantised()]]
        )


def test_it_is_not_quantised_again() -> None:
    assert not hasattr(quantised(), "to_quantized")
    assert not hasattr(plain(), "bits"), "mlx-lm would take its quantised path"
