"""The compact cache's copies and states: independent, complete, refused where they are broken."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest

from kvkeep import PositionPreservingKVCache
from kvkeep.attention import install, installed, remove
from kvkeep.errors import CacheError, KvkeepError, TrimError
from small_caches import PER_HEAD, STORES, append, compact, snapshot


@STORES
def test_deepcopy_is_independent(positions: Any) -> None:
    cache = compact(positions)
    append(cache, 2)
    before = snapshot(cache)
    twin = copy.deepcopy(cache)
    assert snapshot(twin) == before
    append(twin, 3, seed=77)
    twin.trim(60)
    append(twin, 4, seed=78)
    assert snapshot(cache) == before
    changed = snapshot(twin)
    append(cache, 1, seed=79)
    cache.trim(80)
    assert snapshot(twin) == changed


def test_deepcopy_keeps_a_speculation() -> None:
    cache = compact()
    cache.start_speculation()
    append(cache, 1)
    twin = copy.deepcopy(cache)
    with pytest.raises(TrimError):
        twin.trim(2)


def as_lists(state: Any) -> Any:
    """A state as mlx-lm's `load_prompt_cache` hands it over: nested lists."""
    return [as_lists(part) for part in state] if isinstance(state, tuple) else state


@STORES
@pytest.mark.parametrize("shape", [tuple, as_lists], ids=["tuple", "lists"])
def test_state_round_trip(positions: Any, shape: Any) -> None:
    cache = compact(positions, protected_stored=2)
    append(cache, 2)
    for trimmed in (0, 1, 54):  # the last leaves unequal heads
        cache.trim(trimmed)
        again = PositionPreservingKVCache.from_state(shape(cache.state), cache.meta_state)
        assert snapshot(again) == snapshot(cache)
        assert again.owns_attention == cache.owns_attention
        setter = PositionPreservingKVCache()
        setter.state = shape(cache.state)
        assert snapshot(setter) == snapshot(cache)


def test_state_of_an_empty_cache() -> None:
    again = PositionPreservingKVCache.from_state(PositionPreservingKVCache().state)
    assert (again.empty(), again.offset, again.positions) == (True, 0, ())
    append(again, 1)
    assert again.positions == (0,)


def test_two_caches_from_one_state_do_not_share_rows() -> None:
    state = compact().state
    first, second = (PositionPreservingKVCache.from_state(state) for _ in range(2))
    before = snapshot(second)
    first.trim(70)
    append(first, 1)
    assert snapshot(second) == before
    assert mx.array_equal(state[0], compact().state[0])


def test_meta_state_is_text_and_must_agree() -> None:
    cache = compact(protected_stored=1)
    append(cache, 1)
    assert cache.meta_state == ("101", "4", "1")
    with pytest.raises(CacheError):
        PositionPreservingKVCache.from_state(cache.state, ("100", "4", "1"))


def broken_states() -> list[tuple[Any, ...]]:
    keys, values, table, start, appended, protected = compact().state
    return [
        (keys, values),
        (keys, None, table, start, appended, protected),
        (keys, values, table[:, :2], start, appended, protected),
        (keys, values, table, start, 1, protected),
        (keys, values, table, 50, appended, protected),
        (keys, values, table[0], start, appended, protected),
        (keys, values, table[:, ::-1], start, appended, protected),
        (keys, values, table, start, appended, 4),
        (keys, values, table, start, appended, -1),
        (keys, values, mx.array([[0, -1, 40, 99]]), start, appended, protected),
        (keys, values, mx.array([[0, -1, 99], [1, 2, 3]]), start, appended, protected),
        (keys, values, mx.concatenate([table] * 3), start, appended, protected),
        (keys, values, table, start, -1, protected),
    ]


@pytest.mark.parametrize("state", broken_states())
def test_a_state_that_is_no_cache_is_refused(state: Any) -> None:
    with pytest.raises(KvkeepError):
        PositionPreservingKVCache.from_state(state)


def test_loading_unequal_heads_asks_for_the_seam() -> None:
    """In a new process nothing else would: the model's own mask would read dead rows."""
    cache = compact(PER_HEAD)
    cache.trim(55)
    state, was_installed = cache.state, installed()
    assert cache.owns_attention
    try:
        remove()
        PositionPreservingKVCache.from_state(compact().state)
        assert not installed(), "a cache with even heads needs no seam"
        PositionPreservingKVCache.from_state(state)
        assert installed()
    finally:
        (install if was_installed else remove)()
