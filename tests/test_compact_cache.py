"""The compact cache alone: building, trim, speculation, masks, bytes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, can_trim_prompt_cache, trim_prompt_cache

import kvkeep
from kvkeep import LayerSelection, PositionPreservingKVCache, PositionPreservingQuantizedKVCache
from kvkeep.caches import CompactCache, retained
from kvkeep.errors import CacheError, KvkeepError, SelectionError, TrimError
from oracles import attend, masked_attention, raw
from small_caches import DIM, HEADS, PER_HEAD, SHARED, STORES, append, compact, rows, snapshot

# -- building -------------------------------------------------------------------------


def test_offset_and_rows_are_two_numbers() -> None:
    cache = compact()
    assert (cache.offset, cache.size(), cache.positions) == (100, 3, SHARED)
    assert type(cache.offset) is int
    append(cache, 2)
    assert (cache.offset, cache.size(), cache.positions) == (102, 5, (*SHARED, 100, 101))
    assert cache.head_positions == ((*SHARED, 100, 101),)


def test_positions_per_head() -> None:
    cache = compact(PER_HEAD)
    append(cache, 1)
    assert cache.positions == tuple((*head, 100) for head in PER_HEAD)
    np.testing.assert_array_equal(cache.position_table(), [(*head, 100) for head in PER_HEAD])


def test_positions_may_be_arrays() -> None:
    for positions in (
        np.array(PER_HEAD),
        [np.array(h) for h in PER_HEAD],
        [[*h] for h in PER_HEAD],
    ):
        assert compact(positions).positions == PER_HEAD
    assert compact(np.array(SHARED)).positions == compact(mx.array(SHARED)).positions == SHARED


def test_an_empty_cache_grows_like_a_stock_one() -> None:
    cache = PositionPreservingKVCache()
    assert (cache.offset, cache.size(), cache.nbytes, cache.empty()) == (0, 0, 0, True)
    append(cache, 3)
    assert (cache.offset, cache.positions, cache.empty()) == (3, (0, 1, 2), False)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"keys": rows(3)}, CacheError),
        ({"values": rows(3)}, CacheError),
        ({"keys": rows(3), "values": rows(2), "offset": 3}, CacheError),
        ({"keys": rows(3), "values": rows(3, heads=1), "offset": 3}, CacheError),
        ({"keys": rows(3)[0], "values": rows(3)[0], "offset": 3}, CacheError),
        ({"keys": rows(3), "values": rows(3)[..., 0], "offset": 3}, CacheError),
        (
            {"keys": mx.zeros((2, 2, 3, 4)), "values": mx.zeros((2, 2, 3, 4)), "offset": 3},
            CacheError,
        ),
        ({"keys": rows(3), "values": rows(3), "offset": 100}, CacheError),
        ({"offset": 5}, CacheError),
        ({"offset": -1}, CacheError),
        ({"positions": [0, 1], "offset": 9}, CacheError),
        ({"keys": rows(3), "values": rows(3), "offset": 9, "positions": [0, 1]}, CacheError),
        ({"keys": rows(3), "values": rows(3), "offset": 9, "positions": [0, 5, 9]}, CacheError),
        (
            {"keys": rows(3), "values": rows(3), "offset": 9, "positions": [[0, 1, 2]] * 3},
            CacheError,
        ),
        (
            {"keys": rows(3), "values": rows(3), "offset": 9, "positions": [[0, 1, 2], [3]]},
            CacheError,
        ),
        ({"keys": rows(3), "values": rows(3), "offset": 9, "positions": [2, 1, 0]}, SelectionError),
        ({"keys": rows(3), "values": rows(3), "offset": 9, "positions": [0, 1, 1]}, SelectionError),
        (
            {"keys": rows(3), "values": rows(3), "offset": 9, "positions": [-1, 0, 1]},
            SelectionError,
        ),
        (
            {"keys": rows(3), "values": rows(3), "offset": 9, "positions": [0.0, 1, 2]},
            SelectionError,
        ),
        ({"keys": rows(3), "values": rows(3), "offset": 3, "protected_stored": 4}, CacheError),
        ({"keys": rows(3), "values": rows(3), "offset": 3, "protected_stored": -1}, CacheError),
    ],
)
def test_parts_that_make_no_cache_are_refused(arguments: dict[str, Any], error: type) -> None:
    with pytest.raises(error) as raised:
        PositionPreservingKVCache(**arguments)
    assert isinstance(raised.value, KvkeepError)
    assert "expected" in str(raised.value)


@pytest.mark.parametrize(
    "new",
    [mx.zeros((2, HEADS, 1, DIM)), mx.zeros((1, 3, 1, DIM)), mx.zeros((1, HEADS, 1, DIM + 1))],
    ids=["batch", "heads", "head size"],
)
def test_rows_that_do_not_fit_are_refused(new: mx.array) -> None:
    cache = compact()
    append(cache, 1)
    before = snapshot(cache)
    with pytest.raises(CacheError):
        cache.update_and_fetch(new, new)
    assert snapshot(cache) == before


def test_an_empty_cache_takes_one_request_only() -> None:
    cache = PositionPreservingKVCache()
    with pytest.raises(CacheError):
        cache.update_and_fetch(mx.zeros((2, HEADS, 3, DIM)), mx.zeros((2, HEADS, 3, DIM)))
    assert cache.empty()


def test_from_selection_checks_the_heads() -> None:
    exact: Any = KVCache()
    append(exact, 10)
    for heads in (((0, 1), (2,)), ((0, 1),) * 3):
        kept = LayerSelection(tuple(np.array(h) for h in heads))
        with pytest.raises(CacheError):
            PositionPreservingKVCache.from_selection(exact.keys, exact.values, kept, 10)
        with pytest.raises(CacheError):
            retained(exact, kept, "per-head")


@STORES
def test_kept_rows_are_bit_equal(positions: Any) -> None:
    exact: Any = KVCache()
    append(exact, 100)
    before = [raw(a) for a in exact.keys_and_values()]
    heads = positions if np.ndim(positions) == 2 else (positions,)
    cache = retained(exact, LayerSelection(tuple(np.array(h) for h in heads)))
    append(cache, 1, seed=30)
    for ours, theirs in zip(cache.keys_and_values(), exact.keys_and_values(), strict=True):
        for head in range(HEADS):
            kept = np.array(heads[head % len(heads)])
            assert mx.array_equal(ours[0, head, :3], theirs[0, head, mx.array(kept)])
    after = [raw(a) for a in exact.keys_and_values()]
    assert before == after, "the exact cache was changed"


def test_a_cache_is_never_falsy() -> None:
    """mlx-lm asks `if cache`: a falsy one would decode without a mask."""
    batch = PositionPreservingKVCache.merge([PositionPreservingKVCache()])
    quantized = PositionPreservingQuantizedKVCache()
    for cache in (PositionPreservingKVCache(), quantized, batch):
        assert bool(cache)
        assert not hasattr(cache, "__len__")
        assert not hasattr(cache, "__bool__")


# -- trim and speculation -------------------------------------------------------------


def test_trim_restores_the_logical_prefix() -> None:
    cache = compact()
    assert cache.trim(70) == 70
    assert (cache.offset, cache.positions, cache.size()) == (30, (0,), 1)
    assert mx.array_equal(cache.keys_and_values()[0], rows(3, seed=1)[:, :, :1])
    append(cache, 1)
    assert cache.positions == (0, 30)


def test_trim_takes_appended_rows_first() -> None:
    cache = compact(PER_HEAD)
    append(cache, 5)
    keys, _ = cache.keys_and_values()
    assert cache.trim(3) == 3
    assert cache.positions == tuple((*head, 100, 101) for head in PER_HEAD)
    assert mx.array_equal(cache.keys_and_values()[0], keys[:, :, :5])


def test_trim_across_both_in_one_call() -> None:
    cache = compact()
    append(cache, 5)
    cache.trim(5 + 10)
    assert (cache.offset, cache.positions) == (90, (0, 40))
    cache.trim(90)
    assert (cache.offset, cache.positions, cache.size()) == (0, (), 0)
    append(cache, 2)
    assert cache.positions == (0, 1)


def test_trim_to_unequal_heads_and_on() -> None:
    cache = compact(PER_HEAD)
    cache.trim(45)  # heads keep (0, 40) and (7, 50)
    assert (cache.owns_attention, cache.positions) == (False, ((0, 40), (7, 50)))
    cache.trim(10)
    assert (cache.owns_attention, cache.positions) == (True, ((0, 40), (7,)))
    assert cache.live_head_rows == (2, 1)
    with pytest.raises(CacheError):
        cache.position_table()
    append(cache, 2)
    assert cache.positions == ((0, 40, 45, 46), (7, 45, 46))
    cache.trim(12)
    assert (cache.owns_attention, cache.positions) == (False, ((0,), (7,)))
    keys = cache.keys_and_values()[0]
    assert mx.array_equal(keys[0, :, 0], rows(3, seed=1)[0, :, 0])


def test_a_head_may_lose_all_its_rows() -> None:
    """Then its dead rows must still be finite: an infinite weightless row would poison the sum."""
    cache = compact(((0, 1, 2), (50, 60, 70)))
    for offset, left in ((2, ((0, 1), ())), (1, ((0,), ()))):
        cache.trim(cache.offset - offset)
        assert cache.positions == left
        assert np.isfinite(np.asarray(cache.keys_and_values()[0])).all()
    queries, keys, values = rows(1, heads=4, seed=3), rows(1, seed=4), rows(1, seed=5)
    out = attend(cache, queries, keys, values)
    allowed = np.array([[[True, True]], [[False, True]]])
    live = cache.keys_and_values()
    expected = masked_attention(queries[0], live[0][0], live[1][0], allowed, 1.0)
    np.testing.assert_allclose(out[0], expected, atol=1e-5)


@STORES
@pytest.mark.parametrize("n", [-1, 103, 10**9, True, False, 1.0, "2", None], ids=repr)
def test_a_refused_trim_changes_nothing(positions: Any, n: Any) -> None:
    cache = compact(positions)
    append(cache, 2)
    before = snapshot(cache)
    with pytest.raises(TrimError) as raised:
        cache.trim(n)
    assert "expected" in str(raised.value)
    assert snapshot(cache) == before


def test_trim_counts_tokens_of_any_integer_type() -> None:
    cache = compact()
    one: Any
    for one in (np.int64(1), np.uint8(1)):
        assert type(cache.trim(one)) is int
    assert cache.trim(0) == 0
    assert cache.offset == 98


def test_mlx_lm_trims_compact_caches_in_a_list() -> None:
    stock = KVCache()
    append(stock, 100)
    caches = [compact(), stock]
    assert can_trim_prompt_cache(caches)
    assert trim_prompt_cache(caches, 70) == 70
    assert [c.offset for c in caches] == [30, 30]


def test_trim_never_reaches_rows_that_a_caller_still_holds() -> None:
    keys = rows(3, seed=1)
    cache = PositionPreservingKVCache(keys, keys, offset=100, positions=SHARED)
    cache.trim(70)
    append(cache, 1)
    assert mx.array_equal(keys, rows(3, seed=1))


def test_speculation_limits() -> None:
    cache = compact(protected_stored=3)
    append(cache, 2)
    cache.start_speculation()
    append(cache, 3)
    before = snapshot(cache)
    with pytest.raises(TrimError):
        cache.trim(4)
    assert snapshot(cache) == before
    assert cache.trim(2) == 2
    with pytest.raises(TrimError):
        cache.trim(2)
    assert cache.trim(1) == 1
    with pytest.raises(TrimError):
        cache.trim(1)
    cache.stop_speculation()
    assert cache.trim(1) == 1
    assert cache.positions == (*SHARED, 100)


def test_speculation_is_bounded_by_what_it_appended_also_where_little_is_protected() -> None:
    cache = compact(protected_stored=0)
    cache.start_speculation()
    append(cache, 1)
    with pytest.raises(TrimError):
        cache.trim(2)
    assert cache.trim(1) == 1


def test_protected_rows_follow_a_logical_trim() -> None:
    cache = compact()
    assert cache.protected_stored == 3
    cache.trim(70)
    assert cache.protected_stored == 1


@STORES
def test_suffix_trim_then_other_tokens(positions: Any) -> None:
    """A rejected draft leaves no trace."""
    drafted, plain = compact(positions), compact(positions)
    append(drafted, 4, seed=50)
    drafted.trim(3)
    append(drafted, 2, seed=60)
    append(plain, 4, seed=50)
    kept = [a[:, :, :4] for a in plain.keys_and_values()]
    expected = [mx.concatenate([k, rows(2, seed=60 + i)], 2) for i, k in enumerate(kept)]
    for ours, theirs in zip(drafted.keys_and_values(), expected, strict=True):
        assert mx.array_equal(ours, theirs)
    assert drafted.offset == 103


# -- masks ----------------------------------------------------------------------------


@STORES
def test_masks_that_keep_the_fused_path(positions: Any) -> None:
    cache = compact(positions)
    assert cache.make_mask(1) is None
    assert cache.make_mask(4) == "causal"
    assert cache.make_mask(4, return_array=False, window_size=None) == "causal"
    assert cache.make_mask(1, return_array=True) is None  # as of stock caches
    append(cache, 2)
    for n in (2, 3):
        mask = cache.make_mask(n, return_array=True)
        assert isinstance(mask, mx.array) and mask.dtype == mx.bool_
        expected = np.arange(5 + n)[None] <= np.arange(5, 5 + n)[:, None]
        np.testing.assert_array_equal(np.asarray(mask), expected)


@pytest.mark.parametrize("window", [1, 3, 10, 59, 60, 61, 1000])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_window_mask_is_exact_for_shared_positions(window: int, n: int) -> None:
    cache = compact()
    append(cache, 4)
    mask = cache.make_mask(n, window_size=window, return_array=True)
    positions = np.array([*SHARED, *range(100, 104 + n)])
    tokens = np.arange(104, 104 + n)[:, None]
    expected = (positions <= tokens) & (positions > tokens - window)
    np.testing.assert_array_equal(np.asarray(mask), expected)


@pytest.mark.parametrize("n", [1, 6])
def test_window_mask_equals_the_stock_one_when_nothing_is_gone(n: int) -> None:
    stock, cache = KVCache(), PositionPreservingKVCache()
    append(stock, 20)
    append(cache, 20)
    for window in (4, 20, 100):
        ours, theirs = (
            c.make_mask(n, window_size=window, return_array=True) for c in (cache, stock)
        )
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_masks_that_cannot_be_made() -> None:
    for n in (0, -1):
        with pytest.raises(CacheError):
            compact().make_mask(n)
    with pytest.raises(CacheError):
        compact(PER_HEAD).make_mask(1, window_size=8)


# -- bytes ----------------------------------------------------------------------------


def array_bytes(arrays: Sequence[mx.array]) -> int:
    return sum(mx.contiguous(a).nbytes for a in arrays)


@STORES
@pytest.mark.parametrize("appended", [0, 1, 300])
def test_nbytes_are_those_of_the_live_rows(positions: Any, appended: int) -> None:
    cache = compact(positions)
    if appended:
        append(cache, appended)
    assert cache.nbytes == array_bytes(cache.keys_and_values())
    assert cache.allocated_nbytes == cache.keys.nbytes + cache.values.nbytes >= cache.nbytes


def test_buffers_grow_like_the_stock_ones() -> None:
    """Decoding then allocates as rarely as mlx-lm does."""
    stock: Any = KVCache()
    cache = PositionPreservingKVCache()
    for i, count in enumerate((200, 56, 1, 255, 1, 700, 1)):
        append(stock, count, seed=i)
        append(cache, count, seed=i)
        assert cache.keys.shape == stock.keys.shape


def test_nbytes_of_unequal_heads_leave_dead_rows_out() -> None:
    cache = compact(PER_HEAD)
    cache.trim(55)  # heads keep (0, 40) and (7,)
    assert cache.nbytes == 3 * DIM * 4 * 2
    append(cache, 2)
    assert cache.nbytes == 7 * DIM * 4 * 2


def test_keys_and_values_of_unequal_width() -> None:
    """Some models keep values wider than keys."""
    cache = PositionPreservingKVCache(rows(3), rows(3, dim=8), offset=100, positions=SHARED)
    cache.update_and_fetch(rows(1), rows(1, dim=8))
    assert cache.nbytes == 4 * HEADS * (DIM + 8) * 4
    assert snapshot(copy.deepcopy(cache)) == snapshot(cache)


def test_compact_caches_share_one_base() -> None:
    assert issubclass(PositionPreservingKVCache, CompactCache)
    assert not issubclass(PositionPreservingKVCache, KVCache), "it would inherit merge and trim"
    assert kvkeep.PositionPreservingKVCache is PositionPreservingKVCache
