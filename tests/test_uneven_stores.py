"""Ragged and union stores: bookkeeping, bytes, trim, any sequence of steps."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import LayerSelection
from kvkeep.attention import install, installed, remove
from kvkeep.caches import (
    bytes_per_row,
    live_nbytes,
    retained,
)
from kvkeep.errors import (
    TrimError,
)
from oracles import raw
from uneven import (
    CLASSES,
    DIM,
    HEADS,
    N_HEADS,
    OFFSET,
    STORES,
    UNION,
    exact,
    exact_rows,
    fed,
    full_snapshot,
    made,
    mx_attention,
    rows_by_head,
    uneven,
)

# -- rows -----------------------------------------------------------------------------


@STORES
def test_each_head_reads_its_rows_bit_by_bit(store: str) -> None:
    source = exact(N_HEADS, OFFSET)
    before = [raw(side) for side in source.keys_and_values()]
    cache = uneven(store)
    assert type(cache) is CLASSES[store]
    assert (cache.offset, cache.head_positions, cache.live_head_rows) == (
        OFFSET,
        HEADS,
        (5, 2, 0, 5),
    )
    assert type(cache.offset) is int
    for _ in range(2):
        for head, (positions, keys, values) in enumerate(rows_by_head(cache)):
            assert positions == list(HEADS[head])
            index = mx.array(positions, mx.int32)
            for ours, theirs in ((keys, source.keys), (values, source.values)):
                assert ours == raw(mx.take(theirs[0, head], index, axis=0))
        retained(source, LayerSelection((np.arange(3),)), store)
    assert before == [raw(side) for side in source.keys_and_values()]


@STORES
def test_size_counts_what_it_says(store: str) -> None:
    cache = uneven(store)
    rows = {"ragged": 5, "union": len(UNION)}[store]
    assert cache.size() == rows
    fed(cache, 3, N_HEADS)
    assert (cache.size(), cache.offset, cache.live_head_rows) == (rows + 3, 103, (8, 5, 3, 8))
    assert cache.head_positions == tuple((*head, 100, 101, 102) for head in HEADS)


def test_positions_of_a_union_are_the_union() -> None:
    cache = uneven("union")
    fed(cache, 1, N_HEADS)
    assert cache.positions == (*UNION, 100)
    assert uneven("ragged").positions == HEADS


def test_ragged_heads_lie_in_as_many_groups_as_there_are_counts() -> None:
    cache = uneven("ragged")
    assert [heads for heads, *_ in cache.head_groups()] == [(0, 3), (1,), (2,)]
    assert [keys.shape for _, keys, _ in cache.head_groups()] == [(2, 5, 8), (1, 2, 8), (1, 0, 8)]
    assert cache.keys.shape == (12, DIM), "only kept rows are in memory"


@STORES
def test_nbytes_are_those_of_the_live_rows(store: str) -> None:
    cache = uneven(store)
    for appended in (0, 1, 300):
        if appended:
            fed(cache, appended, N_HEADS)
        if store == "ragged":
            arrays = [side for _, *sides in cache.head_groups() for side in sides]
        else:
            arrays = list(cache.keys_and_values())
        live = sum(mx.contiguous(side).nbytes for side in arrays)
        assert cache.nbytes == live_nbytes(cache) == live
        assert cache.allocated_nbytes == cache.keys.nbytes + cache.values.nbytes >= live
        assert bytes_per_row(cache) == N_HEADS * DIM * 4 * 2


def test_ragged_buffers_grow_by_mlx_lms_steps() -> None:
    cache = uneven("ragged")
    sizes = []
    for i, count in enumerate((1, 255, 1, 700, 1)):
        fed(cache, count, N_HEADS, seed=i)
        sizes.append((cache.keys.shape[0] - 12) // N_HEADS)
    assert sizes == [256, 256, 512, 257 + 768, 257 + 768]


def test_an_append_does_not_copy_the_buffer() -> None:
    """In place, or a token's cost would grow with the cache."""
    heads = (range(6000), range(1000), range(1000), range(9))
    cache = made("ragged", [list(h) for h in heads], 6000, dim=64)
    queries = exact_rows(N_HEADS, 1, 64)
    fed(cache, 1, N_HEADS, 64)
    mx.eval(cache.keys, cache.values)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for i in range(5):
        token = fed(cache, 1, N_HEADS, 64, seed=i)
        mx.eval(cache.attend(mx_attention, queries, *token, scale=1.0, sinks=None))
    assert mx.get_peak_memory() - before < cache.keys.nbytes // 2


@STORES
def test_a_cache_that_was_never_filled(store: str) -> None:
    cache = CLASSES[store]()
    assert (cache.offset, cache.size(), cache.nbytes, cache.empty()) == (0, 0, 0, True)
    assert bool(cache) and cache.is_trimmable() and cache.owns_attention
    again = CLASSES[store].from_state(cache.state, cache.meta_state)
    for one in (cache, again, copy.deepcopy(cache)):
        fed(one, 3, 2)
        assert (one.offset, one.empty(), one.complete) == (3, False, True)
        assert one.head_positions == ((0, 1, 2),)


@STORES
def test_making_one_asks_for_the_seam(store: str) -> None:
    was_installed, state = installed(), uneven(store).state
    try:
        for make in (CLASSES[store], lambda: CLASSES[store].from_state(state)):
            remove()
            make()
            assert installed()
    finally:
        (install if was_installed else remove)()


# -- trim and speculation -------------------------------------------------------------


@STORES
@pytest.mark.parametrize("n", [0, 2, 3, 4, 22, 60, 61, 102, 103])
def test_trim_takes_appended_rows_first_then_the_logical_prefix(store: str, n: int) -> None:
    cache = uneven(store)
    fed(cache, 3, N_HEADS)
    whole = rows_by_head(cache)
    assert cache.trim(n) == n
    assert cache.offset == 103 - n
    for (positions, keys, values), (old, old_keys, old_values) in zip(
        rows_by_head(cache), whole, strict=True
    ):
        left = [p for p in old if p < 103 - n]
        assert positions == left
        end = len(left) * DIM * 4
        assert (keys, values) == (old_keys[:end], old_values[:end])
    assert cache.protected_stored == min(cache.size(), {"ragged": 5, "union": len(UNION)}[store])
    fed(cache, 2, N_HEADS, seed=31)
    assert [p[-2:] for p in cache.head_positions] == [(103 - n, 104 - n)] * len(
        cache.head_positions
    )


def test_a_trim_regroups_ragged_heads() -> None:
    cache = made("ragged", [[0, 1, 2], [0, 50, 60], [0, 1, 70]], 80)
    groups = [[heads for heads, *_ in cache.head_groups()]]
    for n in (15, 10, 10, 43):
        cache.trim(n)
        groups.append([heads for heads, *_ in cache.head_groups()])
    assert groups == [
        [(0, 1, 2)],
        [(0, 1), (2,)],
        [(0,), (1, 2)],
        [(0,), (1,), (2,)],
        [(0, 2), (1,)],
    ]


@STORES
@pytest.mark.parametrize("n", [-1, 103, 10**9, True, 1.0, "2", None], ids=repr)
def test_a_refused_trim_changes_nothing(store: str, n: Any) -> None:
    cache = uneven(store)
    fed(cache, 2, N_HEADS)
    before = full_snapshot(cache)
    with pytest.raises(TrimError):
        cache.trim(n)
    assert full_snapshot(cache) == before


@STORES
def test_speculation(store: str) -> None:
    cache = uneven(store)
    fed(cache, 2, N_HEADS)
    cache.start_speculation()
    fed(cache, 3, N_HEADS)
    before = full_snapshot(cache)
    for one in (cache, copy.deepcopy(cache)):
        with pytest.raises(TrimError):
            one.trim(4)
        assert full_snapshot(one) == before
    assert cache.trim(2) == 2
    cache.stop_speculation()
    assert cache.trim(4) == 4
    assert cache.offset == 99


# -- any sequence of steps ------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    steps=st.lists(st.tuples(st.sampled_from("at"), st.integers(0, 9)), max_size=8),
    seed=st.integers(0, 99),
)
def test_any_sequence_of_appends_and_trims(
    counts: list[int], steps: list[tuple[str, int]], seed: int
) -> None:
    """Against plain lists of positions, and the two stores against each other."""
    random = np.random.default_rng(seed)
    heads = [sorted(random.choice(12, count, replace=False).tolist()) for count in counts]
    model, offset = [list(head) for head in heads], 12
    caches = [made(store, heads, 12) for store in CLASSES]
    for i, (step, n) in enumerate(steps):
        if step == "a":
            for cache in caches:
                fed(cache, n + 1, len(heads), seed=i)
            model = [[*head, *range(offset, offset + n + 1)] for head in model]
            offset += n + 1
        else:
            n = min(n, offset)
            for cache in caches:
                cache.trim(n)
            offset -= n
            model = [[p for p in head if p < offset] for head in model]
    for cache in caches:
        assert cache.offset == offset
        if not cache.empty():
            assert [positions for positions, *_ in rows_by_head(cache)] == model
    assert rows_by_head(caches[0]) == rows_by_head(caches[1])
