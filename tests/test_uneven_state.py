"""Ragged and union stores: copies, states, files, building from parts and from other stores."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as mlx_cache
import numpy as np
import pytest

import kvkeep
from kvkeep import HeadPartitionedKVCache, LayerSelection, PositionPreservingKVCache, RaggedKVCache
from kvkeep.caches import (
    layer_positions,
    layer_rows,
    require_evictable,
    retained,
    row_groups,
)
from kvkeep.errors import (
    CacheError,
    ConfigError,
    KvkeepError,
    SelectionError,
)
from oracles import raw
from uneven import (
    CLASSES,
    DIM,
    HEADS,
    N_HEADS,
    OFFSET,
    STORES,
    exact,
    exact_rows,
    fed,
    full_snapshot,
    made,
    rows_by_head,
    uneven,
)

# -- copies, states, files ------------------------------------------------------------


@STORES
def test_deepcopy_is_independent(store: str) -> None:
    """Both write in place where nobody else holds the buffer; a copy must not be written to."""
    cache = uneven(store)
    fed(cache, 2, N_HEADS)
    before = full_snapshot(cache)
    twin = copy.deepcopy(cache)
    assert full_snapshot(twin) == before
    for seed in range(3):
        fed(twin, 1, N_HEADS, seed=70 + seed)
    twin.trim(60)
    fed(twin, 4, N_HEADS, seed=78)
    assert full_snapshot(cache) == before
    changed = full_snapshot(twin)
    fed(cache, 1, N_HEADS, seed=79)
    cache.trim(80)
    assert full_snapshot(twin) == changed


@STORES
def test_rows_that_a_caller_holds_do_not_change(store: str) -> None:
    cache = uneven(store)
    fed(cache, 1, N_HEADS)
    held, bits = row_groups(cache), rows_by_head(cache)
    fed(cache, 3, N_HEADS)
    cache.trim(30)
    fed(cache, 3, N_HEADS)
    now = {h: raw(g.keys[i]) for g in held for i, h in enumerate(g.heads.tolist())}
    assert [now[h] for h in range(N_HEADS)] == [keys for _, keys, _ in bits]


def as_lists(state: Any) -> Any:
    return [as_lists(part) for part in state] if isinstance(state, tuple | list) else state


@STORES
@pytest.mark.parametrize("trimmed", [0, 1, 30, 97, 102])
def test_state_round_trip(store: str, trimmed: int) -> None:
    cache = uneven(store)
    fed(cache, 2, N_HEADS)
    cache.trim(trimmed)
    before = full_snapshot(cache)
    for state in (cache.state, as_lists(cache.state)):
        twins = [CLASSES[store].from_state(state, cache.meta_state) for _ in range(2)]
        assert all(full_snapshot(twin) == before for twin in twins)
        fed(twins[0], 3, N_HEADS)
        assert full_snapshot(twins[1]) == full_snapshot(cache) == before
        fed(twins[1], 3, N_HEADS)
        assert full_snapshot(twins[0]) == full_snapshot(twins[1])


def broken(state: tuple[Any, ...], index: int, part: Any) -> tuple[Any, ...]:
    return (*state[:index], part, *state[index + 1 :])


def test_states_that_are_no_cache_are_refused() -> None:
    ragged, union = uneven("ragged").state, uneven("union").state
    keys, _, counts, table, *_ = ragged
    cases: list[tuple[Any, Any]] = [
        (RaggedKVCache, ragged[:5]),
        (RaggedKVCache, broken(ragged, 0, keys[:2])),
        (RaggedKVCache, broken(ragged, 0, [k[:, :1] for k in keys])),
        (RaggedKVCache, broken(ragged, 2, counts + 1)),
        (RaggedKVCache, broken(ragged, 2, counts[:3])),
        (RaggedKVCache, broken(ragged, 3, table[:2])),
        (RaggedKVCache, broken(ragged, 4, 7)),
        (RaggedKVCache, broken(ragged, 5, 1)),
        (RaggedKVCache, broken(ragged, 6, 99)),
        (HeadPartitionedKVCache, union[:6]),
        (HeadPartitionedKVCache, broken(union, 6, union[6][:2])),
        (HeadPartitionedKVCache, broken(union, 6, union[6][:, :3])),
        (HeadPartitionedKVCache, broken(union, 6, union[6].astype(mx.int32))),
        (HeadPartitionedKVCache, broken(union, 2, mx.concatenate([union[2]] * 4))),
        (HeadPartitionedKVCache, broken(union, 7, 3)),
        (HeadPartitionedKVCache, broken(union, 4, 1)),
    ]
    for kind, state in cases:
        with pytest.raises(KvkeepError):
            kind.from_state(state)
    with pytest.raises(CacheError):
        RaggedKVCache.from_state(ragged, ("1", "2", "3"))


@STORES
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("stock", [False, True], ids=["kvkeep", "mlx-lm"])
def test_saved_and_loaded(store: str, dtype: mx.Dtype, stock: bool, tmp_path: Path) -> None:
    source = exact(N_HEADS, OFFSET)
    source.keys, source.values = source.keys.astype(dtype), source.values.astype(dtype)
    kept = [HEADS, ((0,), (), (), (5, 6))]
    caches = [retained(source, LayerSelection(tuple(map(np.array, h))), store) for h in kept]
    caches.append(source)
    caches[0].update_and_fetch(*(exact_rows(N_HEADS, 2, seed=i).astype(dtype) for i in (5, 6)))
    path = str(tmp_path / "cache.safetensors")
    module: Any = mlx_cache if stock else kvkeep
    module.save_prompt_cache(path, caches, {"model": "tiny"})
    again, metadata = module.load_prompt_cache(path, return_metadata=True)
    assert metadata == {"model": "tiny"}
    for ours, theirs in zip(again[:2], caches, strict=False):
        assert type(ours) is CLASSES[store]
        assert ours.keys.dtype == dtype
        assert ours.offset == theirs.offset
        assert ours.head_positions == theirs.head_positions
        assert ours.nbytes == theirs.nbytes
        for mine, other in zip(row_groups(ours), row_groups(theirs), strict=True):
            assert mx.array_equal(mine.keys, other.keys)
            assert mx.array_equal(mine.values, other.values)
        fed(ours, 1, N_HEADS)


def test_a_saved_union_remembers_its_query_heads() -> None:
    cache = HeadPartitionedKVCache(query_heads=8)
    assert HeadPartitionedKVCache.from_state(cache.state).query_heads == 8


# -- building, retaining --------------------------------------------------------------


def test_building_a_union_from_parts() -> None:
    rows = exact_rows(2, 3)
    cache = HeadPartitionedKVCache(
        rows, rows, offset=100, positions=(0, 40, 99), head_positions=((0, 40, 99), (40,))
    )
    assert cache.positions == (0, 40, 99)
    assert cache.head_positions == ((0, 40, 99), (40,))
    whole = HeadPartitionedKVCache(rows, rows, offset=3)
    assert (whole.head_positions, whole.complete) == (((0, 1, 2),), True)


@pytest.mark.parametrize(
    "parts",
    [
        {"positions": (0, 40, 99), "head_positions": ((0,),)},
        {"positions": (0, 40, 99), "head_positions": ((0,), (1,))},
        {"positions": (0, 40, 99), "head_positions": ((0,), (40, 0))},
        {"positions": (0, 40, 99), "query_heads": 3},
        {"positions": (0, 40, 99), "query_heads": 0},
        {"positions": (0, 40)},
        {"positions": ((0, 40, 99), (0, 1, 2))},
        {"positions": (0, 40, 100)},
        {"positions": (0, 40, 99), "protected_stored": 4},
        {},
    ],
)
def test_parts_that_make_no_union_are_refused(parts: dict[str, Any]) -> None:
    rows = exact_rows(2, 3)
    with pytest.raises(KvkeepError) as raised:
        HeadPartitionedKVCache(rows, rows, offset=100, **parts)
    assert "expected" in str(raised.value)
    with pytest.raises(CacheError):
        HeadPartitionedKVCache(head_positions=((0,),))


@STORES
def test_rows_that_do_not_fit_are_refused(store: str) -> None:
    for cache in (uneven(store), CLASSES[store]()):
        filled = not cache.empty()
        if filled:
            fed(cache, 1, N_HEADS)
        before = full_snapshot(cache)
        bad = [(2, N_HEADS, 1, DIM)]
        bad += [(1, N_HEADS + 1, 1, DIM), (1, N_HEADS, 1, DIM + 1)] if filled else []
        for shape in bad:
            with pytest.raises(CacheError):
                cache.update_and_fetch(mx.zeros(shape), mx.zeros(shape))
        assert full_snapshot(cache) == before
    with pytest.raises(CacheError):
        cache = uneven("ragged")
        cache.update_and_fetch(mx.zeros((1, N_HEADS, 1, DIM)), mx.zeros((1, N_HEADS, 2, DIM)))


KINDS = ("exact", "shared", "per-head", "after a trim", "ragged", "union")


def layer_of(kind: str) -> Any:
    """Three heads that all hold positions 0, 10, 20, 30 and 40 among others, offset 60."""
    common = [0, 10, 20, 30, 40]
    more = {"ragged": ([1], [2, 3, 4], []), "union": ([1], [2, 3, 4], [])}
    extra = more.get(kind, ([1, 55], [2, 56], [3, 4]))
    if kind == "exact":
        return exact(3, 60)
    if kind == "shared":
        return retained(exact(3, 60), LayerSelection((np.array([0, 10, 15, 20, 30, 40]),)))
    heads = [sorted([*common, *e]) for e in extra]
    if kind in more:
        return made(kind, heads, 60)
    layer = made("per-head", heads, 60)
    if kind == "after a trim":
        layer.trim(10)
        assert layer.live_head_rows == (6, 6, 7)
    return layer


@pytest.mark.parametrize("store", ["auto", "ragged", "union", "per-head"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "kept", [((0, 20), (10, 40), (0, 30)), ((0, 20, 40), (), (30,)), ((0, 10, 20),)]
)
def test_retaining_from_every_kind_of_layer(store: str, kind: str, kept: Any) -> None:
    layer, chosen = layer_of(kind), LayerSelection(tuple(np.array(h, np.int32) for h in kept))
    fed(layer, 1, 3)
    before = rows_by_head(layer)
    if store == "per-head" and not chosen.equal_counts:
        with pytest.raises(CacheError, match="ragged"):
            retained(layer, chosen, store)
        return
    compact = retained(layer, chosen, store)
    uneven_store = {"auto": RaggedKVCache}.get(store, CLASSES.get(store))
    even = chosen.equal_counts and store in ("auto", "per-head")
    assert type(compact) is (PositionPreservingKVCache if even else uneven_store)
    assert compact.offset == layer.offset
    source = exact(3, 60)
    for head, (positions, keys, values) in enumerate(rows_by_head(compact)):
        assert positions == list(kept[head % len(kept)])
        index = mx.array(positions, mx.int32)
        assert keys == raw(mx.take(source.keys[0, head], index, axis=0))
        assert values == raw(mx.take(source.values[0, head], index, axis=0))
    assert rows_by_head(layer) == before


@STORES
def test_what_is_gone_cannot_be_retained(store: str) -> None:
    cache = uneven(store)
    hidden = LayerSelection(tuple(np.array(h, np.int32) for h in ((5,), (5,), (), ())))
    for target in ("ragged", "union", "auto"):
        with pytest.raises(SelectionError):
            retained(cache, hidden, target)
        with pytest.raises(CacheError):
            retained(cache, LayerSelection((np.array([0]),) * 3), target)


def test_a_store_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="ragged"):
        retained(exact(2, 9), LayerSelection((np.array([0]),)), "raged")


@STORES
def test_reading_what_is_not_rectangular_is_refused(store: str) -> None:
    cache = uneven(store)
    for read in (layer_rows, layer_positions, kvkeep.dense_kv):
        with pytest.raises(CacheError):
            read(cache)
    with pytest.raises(CacheError):
        require_evictable([cache])
    even = made(store, [[0, 5]] * 2, 9)
    assert layer_rows(even)[0].shape == (2, 2, DIM)
    assert kvkeep.dense_kv(even)[0].shape == (1, 2, 2, DIM)
    assert len(layer_positions(even)) in (1, 2)
    with pytest.raises(CacheError):
        row_groups(CLASSES[store]())


@STORES
def test_quantising_is_refused(store: str) -> None:
    with pytest.raises(CacheError, match="per-head"):
        uneven(store).to_quantized(group_size=32, bits=8)


@STORES
def test_masks_that_cannot_be_made(store: str) -> None:
    for n in (0, -1):
        with pytest.raises(CacheError):
            uneven(store).make_mask(n)
    with pytest.raises(CacheError):
        uneven(store).make_mask(1, window_size=4)
    with pytest.raises(CacheError):
        uneven("union").make_mask(1, query_heads=6)
    assert uneven("ragged").make_mask(1) is None
    assert uneven("ragged").make_mask(2) == "causal"
