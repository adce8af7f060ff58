"""Compact caches in mlx-lm's batches: joining, leaving, padding, trimming."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from batched import (
    KV_HEADS,
    LAYERS,
    MODEL,
    TOLERANCE,
    assert_decodes_like,
    assert_same_request,
    compact,
    merged,
    parts,
    positions_of,
    requests,
    stock,
    unequal,
)
from kvkeep import (
    BatchPositionPreservingKVCache,
    PositionPreservingKVCache,
)
from kvkeep.errors import CacheError, KvkeepError, TrimError
from oracles import greedy, logits_of, prefilled
from tiny_models import random_tokens

# -- merge and extract ----------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0), (1,), (3, 3, 0)])
def test_merge_then_extract_gives_each_request_back(order: tuple[int, ...]) -> None:
    caches = [requests()[i] for i in order]
    batch = merged(caches)
    assert all(type(layer) is BatchPositionPreservingKVCache for layer in batch)
    assert np.asarray(batch[0].offset).tolist() == [c[0].offset for c in caches]
    assert batch[0].size() == max(c[0].size() for c in caches)
    for ours, theirs in zip(parts(batch, len(order)), caches, strict=True):
        assert_same_request(ours, theirs)


def test_a_batch_decodes_like_each_request_alone() -> None:
    batch = merged(requests())
    assert_decodes_like(batch, requests())


def test_extract_after_decoding_keeps_positions() -> None:
    alone, batch = requests(), merged(requests())
    assert_decodes_like(batch, alone)
    for ours, theirs in zip(parts(batch, 4), alone, strict=True):
        assert_same_request_by_value(ours, theirs)
        token, _ = greedy(MODEL, ours, 3, 4)
        assert token == greedy(MODEL, theirs, 3, 4)[0]


def assert_same_request_by_value(ours: list[Any], theirs: list[Any]) -> None:
    """Rows that a batch computed differ from a lone request's in the last bits."""
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.offset, positions_of(mine)) == (other.offset, positions_of(other))
        for a, b in zip(mine.keys_and_values(), other.keys_and_values(), strict=True):
            np.testing.assert_allclose(a[:, :, -5:], b[:, :, -5:], atol=TOLERANCE)


def test_an_exact_request_leaves_as_a_stock_cache() -> None:
    batch = merged(requests())
    kinds = [type(cache[0]) for cache in parts(batch, 4)]
    assert kinds == [PositionPreservingKVCache] * 3 + [KVCache]


def test_merge_leaves_the_requests_as_they_are() -> None:
    caches, untouched = requests(), requests()
    batch = merged(caches)
    assert_decodes_like(batch, untouched, 2)
    for ours, theirs in zip(caches, requests(), strict=True):
        assert_same_request(ours, theirs)


def test_an_offset_that_a_model_holds_does_not_move() -> None:
    """RoPE gets the array; adding to it in place would shift rows that are not yet computed."""
    batch = merged(requests())
    held, before = batch[0].offset, np.array(batch[0].offset)
    assert_decodes_like(batch, requests(), 1)
    np.testing.assert_array_equal(np.asarray(held), before)
    np.testing.assert_array_equal(np.asarray(batch[0].offset), before + 1)


def test_extract_by_index() -> None:
    batch = merged(requests())
    assert_same_request([layer.extract(-1) for layer in batch], requests()[3])
    with pytest.raises(IndexError):
        batch[0].extract(4)


def test_empty_caches_merge_and_fill() -> None:
    batch = merged([[PositionPreservingKVCache() for _ in range(LAYERS)] for _ in range(2)])
    assert (batch[0].empty(), batch[0].size(), batch[0].nbytes) == (True, 0, 0)
    alone = [[KVCache() for _ in range(LAYERS)] for _ in range(2)]
    assert_decodes_like(batch, alone)
    assert batch[0].extract(1).offset == 5


def test_an_empty_cache_beside_a_filled_one() -> None:
    empty = [KVCache() for _ in range(LAYERS)]
    batch = merged([compact(60, 20, 1), [PositionPreservingKVCache() for _ in range(LAYERS)]])
    assert_decodes_like(batch, [compact(60, 20, 1), empty])


def rotating() -> RotatingKVCache:
    return RotatingKVCache(max_size=8)


def stock_batch_of_two() -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((2, KV_HEADS, 3, 16)), mx.zeros((2, KV_HEADS, 3, 16)))
    return cache


@pytest.mark.parametrize(
    "make",
    [
        rotating,
        stock_batch_of_two,
        lambda: QuantizedKVCache(group_size=32),
        lambda: PositionPreservingKVCache().to_quantized(group_size=32, bits=8),
        lambda: merged([compact(20, 5)])[0],
    ],
    ids=["rotating", "batch", "quantised", "compact quantised", "batch cache"],
)
def test_what_cannot_be_merged(make: Any) -> None:
    pair = [compact(20, 5)[0], make()]
    for first in (pair[0], KVCache()):
        with pytest.raises(KvkeepError) as raised:
            first.merge(pair)
        assert "expected" in str(raised.value)


# -- stock batches that compact ones join ---------------------------------------------


def test_stock_batches_alone_stay_mlx_lms() -> None:
    batch = merged([stock(20, 1), stock(40, 2)])
    assert all(type(layer) is BatchKVCache for layer in batch)
    for layer, other in zip(batch, merged([stock(30, 3)]), strict=True):
        layer.extend(other)
    assert all(type(layer) is BatchKVCache for layer in batch)
    assert_decodes_like(batch, [stock(20, 1), stock(40, 2), stock(30, 3)])


@pytest.mark.parametrize("first", ["stock", "compact"])
def test_extend_a_batch_of_one_kind_by_the_other(first: str) -> None:
    """In a server, a long evicted request joins short ones that are already being decoded."""
    plain, evicted = [stock(20, 1), stock(40, 2)], [compact(60, 20, 1), unequal(80, 15, 30, 3)]
    groups = [plain, evicted] if first == "stock" else [evicted, plain]
    batch, other = (merged(copy.deepcopy(group)) for group in groups)
    assert_decodes_like(batch, groups[0], 3)
    objects = list(batch)
    for layer, joining in zip(batch, other, strict=True):
        layer.extend(joining)
    assert all(a is b for a, b in zip(batch, objects, strict=True))
    alone = [*groups[0], *groups[1]]
    assert_decodes_like(batch, alone, 3)
    for ours, theirs in zip(parts(batch, 4), alone, strict=True):
        assert [(c.offset, positions_of(c)) for c in ours] == [
            (c.offset, positions_of(c)) for c in theirs
        ]


def test_extend_an_empty_stock_batch() -> None:
    batch = merged([[KVCache() for _ in range(LAYERS)]])
    for layer, joining in zip(batch, merged([compact(60, 20, 1)]), strict=True):
        layer.extend(joining)
    assert_decodes_like(batch, [[KVCache() for _ in range(LAYERS)], compact(60, 20, 1)])


def test_extend_by_an_empty_batch() -> None:
    batch = merged([compact(60, 20, 1)])
    for layer in batch:
        layer.extend(merged([[PositionPreservingKVCache()]])[0])
    assert_decodes_like(batch, [compact(60, 20, 1), [KVCache() for _ in range(LAYERS)]])


def test_extend_refuses_what_it_cannot_hold() -> None:
    batch = merged([compact(60, 20, 1)])[0]
    wrong = merged([stock(9)])[0]
    wrong.offset = wrong.offset + 5  # rows that are not its positions
    for other in (KVCache(), compact(20, 5)[0], wrong, rotating()):
        with pytest.raises(CacheError):
            batch.extend(other)
    assert_same_request([batch.extract(0)], compact(60, 20, 1)[:1])


# -- leaving --------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [[1, 3], [2], [3, 0], [0, 1, 2, 3]])
@pytest.mark.parametrize("as_array", [False, True], ids=["list", "array"])
def test_filter_keeps_requests_and_drops_common_padding(keep: list[int], as_array: bool) -> None:
    batch, alone = merged(requests()), requests()
    assert_decodes_like(batch, alone, 2)
    for layer in batch:
        layer.filter(mx.array(keep) if as_array else keep)
    assert min(np.asarray(batch[0].left_padding).tolist()) == 0
    left = [alone[i] for i in keep]
    assert batch[0].size() == max(cache[0].size() for cache in left)
    assert_decodes_like(batch, left, 3)


def test_split_by_deepcopy_and_filter() -> None:
    """As PromptProcessingBatch.split does it: the halves must not share anything."""
    batch, alone = merged(requests()), requests()
    assert_decodes_like(batch, alone, 2)
    other = copy.deepcopy(batch)
    for layer, twin in zip(batch, other, strict=True):
        layer.filter([0, 2])
        twin.filter([1, 3])
    assert_decodes_like(batch, [alone[0], alone[2]], 3)
    assert_decodes_like(other, [alone[1], alone[3]], 3)


# -- padding --------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(7, 3, 5, 1), (1, 9, 1, 9), (4, 4, 4, 4)])
@pytest.mark.parametrize("chunk", [100, 3])
def test_right_padding(lengths: tuple[int, ...], chunk: int) -> None:
    """Prompts of unequal length in one forward, padded behind, also across chunks."""
    batch, alone = merged(requests()), requests()
    tails = [random_tokens(n, seed=10 + n) for n in lengths]
    longest = max(lengths)
    tokens = mx.array([tail + [0] * (longest - len(tail)) for tail in tails])
    for layer in batch:
        layer.prepare(lengths=list(lengths), right_padding=[longest - n for n in lengths])
    for start in range(0, longest, chunk):
        MODEL(tokens[:, start : start + chunk], cache=batch)
        mx.eval([layer.state for layer in batch])
    for layer in batch:
        layer.finalize()
    for cache, tail in zip(alone, tails, strict=True):
        logits_of(MODEL, cache, tail)
    assert np.asarray(batch[0].offset).tolist() == [cache[0].offset for cache in alone]
    assert_decodes_like(batch, alone, 3)
    for ours, theirs in zip(parts(batch, 4), alone, strict=True):
        assert [positions_of(c) for c in ours] == [positions_of(c) for c in theirs]


def test_left_padding_of_empty_caches() -> None:
    batch = merged([[PositionPreservingKVCache() for _ in range(LAYERS)] for _ in range(2)])
    prompts = [random_tokens(6, 1), random_tokens(2, 2)]
    for layer in batch:
        layer.prepare(left_padding=[0, 4])
    MODEL(mx.array([prompts[0], [0] * 4 + prompts[1]]), cache=batch)
    assert np.asarray(batch[0].left_padding).tolist() == [0, 4]
    assert_decodes_like(batch, [prefilled(MODEL, p) for p in prompts])


def test_left_padding_behind_rows_is_refused() -> None:
    batch = merged([compact(60, 20, 1)])[0]
    batch.prepare(left_padding=[0])
    with pytest.raises(CacheError):
        batch.prepare(left_padding=[2])


def test_finalize_without_padding_does_nothing() -> None:
    batch, alone = merged(requests()), requests()
    for layer in batch:
        layer.prepare(lengths=[1] * 4, right_padding=[0] * 4)
        layer.finalize()
    assert_decodes_like(batch, alone, 2)


# -- trim, bytes, state ---------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 2, 4, 12, 33])
def test_trim_within_appended_and_below(n: int) -> None:
    batch, alone = merged(requests()), requests()
    assert_decodes_like(batch, alone, 4)
    for layer in batch:
        assert layer.trim(n) == n
    for cache in alone:
        for layer in cache:
            layer.trim(n)
    assert np.asarray(batch[0].offset).tolist() == [cache[0].offset for cache in alone]
    for ours, theirs in zip(parts(batch, 4), alone, strict=True):
        assert [positions_of(c) for c in ours] == [positions_of(c) for c in theirs]
    assert_decodes_like(batch, alone, 3)


@pytest.mark.parametrize("n", [-1, 38, True, 1.5])
def test_a_refused_trim_changes_nothing(n: Any) -> None:
    batch, alone = merged(requests()), requests()
    assert_decodes_like(batch, alone, 4)  # the shortest request has 37 tokens now
    with pytest.raises(TrimError):
        batch[0].trim(n)
    assert_decodes_like(batch, alone, 2)


def test_nbytes_count_live_rows_only() -> None:
    batch, row = merged(requests()), 16 * 4 * 2
    for appended in (0, 3):
        if appended:
            assert_decodes_like(batch, requests(), appended)
        reported = [layer.nbytes for layer in batch]  # before extract() settles anything
        for layer in range(LAYERS):
            heads = [positions_of(cache[layer]) for cache in parts(batch, 4)]
            live = sum(len(h[i % len(h)]) for h in heads for i in range(KV_HEADS))
            assert reported[layer] == batch[layer].nbytes == live * row
            buffers = batch[layer].keys.nbytes + batch[layer].values.nbytes
            assert batch[layer].allocated_nbytes == buffers >= batch[layer].nbytes


def test_state_round_trip() -> None:
    batch, alone = merged(requests()), requests()
    assert_decodes_like(batch, alone, 2)
    states = [layer.state for layer in batch]
    again = [BatchPositionPreservingKVCache.from_state(state) for state in states]
    twins = [BatchPositionPreservingKVCache.from_state(state) for state in states]
    assert_decodes_like(again, copy.deepcopy(alone), 3)
    assert_decodes_like(twins, copy.deepcopy(alone), 3)
    assert_decodes_like(batch, alone, 3)


def test_a_state_that_is_no_batch_is_refused() -> None:
    keys, values, end, tables = merged(requests())[0].state
    broken = [
        (keys, values, end, tables[:2]),
        (keys, values, end + 1, tables),
        (None, None, end, tables),
        (keys, values, end, [(table, start, 99) for table, start, _ in tables]),
    ]
    for state in broken:
        with pytest.raises(CacheError):
            BatchPositionPreservingKVCache.from_state(state)


def test_a_window_over_a_compact_batch_is_refused() -> None:
    with pytest.raises(CacheError):
        merged(requests())[0].make_mask(1, window_size=8)
