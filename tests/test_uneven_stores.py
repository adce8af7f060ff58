"""Ragged and union stores: bookkeeping, trim, copies, states, refusals, bytes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as mlx_cache
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvkeep
from kvkeep import HeadPartitionedKVCache, LayerSelection, PositionPreservingKVCache, RaggedKVCache
from kvkeep.attention import install, installed, remove
from kvkeep.caches import (
    RowsForAttentionOnly,
    bytes_per_row,
    layer_positions,
    layer_rows,
    live_nbytes,
    require_evictable,
    retained,
    row_groups,
)
from kvkeep.errors import (
    CacheError,
    ConfigError,
    KvkeepError,
    SelectionError,
    TrimError,
    UnsupportedModelError,
)
from oracles import attend, masked_attention, raw
from uneven import CLASSES, STORES, exact, exact_rows, fed, full_snapshot, made, rows_by_head

HEADS = ((0, 5, 17, 61, 80), (3, 70), (), (2, 40, 41, 42, 99))  # 5, 2, 0, 5 rows
N_HEADS, DIM, OFFSET = len(HEADS), 8, 100
UNION = tuple(sorted({p for head in HEADS for p in head}))


def uneven(store: str) -> Any:
    return made(store, HEADS, OFFSET)


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


def mx_attention(queries: Any, keys: Any, values: Any, *, cache: Any, **options: Any) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, keys, values, **options)


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


# -- attention ------------------------------------------------------------------------


def expected_attention(cache: Any, queries: mx.array, scale: float, sinks: Any) -> np.ndarray:
    """Each head alone over its live rows, in float64."""
    n, out = queries.shape[2], []
    share = queries.shape[1] // N_HEADS
    for group in row_groups(cache):
        rows = group.keys.shape[1]
        causal = np.arange(rows)[None] <= np.arange(rows - n, rows)[:, None]
        for i, head in enumerate(group.heads.tolist()):
            mine = slice(head * share, (head + 1) * share)
            own = None if sinks is None else sinks[mine]
            args = (queries[0, mine], group.keys[i : i + 1], group.values[i : i + 1], causal)
            out.append((head, masked_attention(*args, scale, own)))
    return np.concatenate([rows for _, rows in sorted(out, key=lambda pair: pair[0])])


@STORES
@pytest.mark.parametrize("share", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("trimmed", [0, 30, 97])
def test_one_attention_call(store: str, share: int, n: int, with_sinks: bool, trimmed: int) -> None:
    cache, scale = uneven(store), DIM**-0.5
    fed(cache, 2, N_HEADS)
    cache.trim(trimmed)
    queries = exact_rows(N_HEADS * share, n, seed=3)
    sinks = exact_rows(1, N_HEADS * share, seed=4)[0, 0, :, 0] if with_sinks else None
    new = exact_rows(N_HEADS, n, seed=5), exact_rows(N_HEADS, n, seed=6)
    out = attend(cache, queries, *new, scale=scale, sinks=sinks)
    np.testing.assert_allclose(out[0], expected_attention(cache, queries, scale, sinks), atol=1e-5)


@STORES
def test_the_mask_that_a_model_passes_does_not_matter(store: str) -> None:
    install()
    queries, scale = exact_rows(N_HEADS, 1, seed=3), 1.0
    new = exact_rows(N_HEADS, 1, seed=5), exact_rows(N_HEADS, 1, seed=6)
    expected = attend(uneven(store), queries, *new, scale=scale)
    call = mlx_base().scaled_dot_product_attention
    for mask in (None, "causal", mx.ones((1, 77), mx.bool_)):
        cache = uneven(store)
        rows = cache.update_and_fetch(*new)
        out = call(queries, *rows, cache=cache, scale=scale, mask=mask)
        np.testing.assert_array_equal(np.asarray(out), expected)


@STORES
def test_a_mask_that_says_more_than_causal_is_refused(store: str) -> None:
    install()
    cache = uneven(store)
    rows = fed(cache, 1, N_HEADS)
    with pytest.raises(UnsupportedModelError):
        mlx_base().scaled_dot_product_attention(
            exact_rows(N_HEADS, 1), *rows, cache=cache, scale=1.0, mask=mx.zeros((1, 6))
        )


def mlx_base() -> Any:
    from mlx_lm.models import base

    return base


def test_a_unions_mask_does_not_reach_layers_of_another_kind() -> None:
    """A model hands its first layer's mask to all; an exact layer may be as long as the union."""
    install()
    union = made("union", [range(20), [0, 19]], 20)
    mask = union.make_mask(1)
    stock = exact(2, 20)
    queries, new = exact_rows(2, 1, seed=3), exact_rows(2, 1, seed=4)
    rows = stock.update_and_fetch(new, new)
    call = mlx_base().scaled_dot_product_attention
    out = call(queries, *rows, cache=stock, scale=1.0, mask=mask)
    plain = mx.fast.scaled_dot_product_attention(queries, *rows, scale=1.0)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(plain))


def test_only_what_it_handed_out_is_attended_to() -> None:
    cache, other = uneven("ragged"), uneven("ragged")
    old = fed(cache, 1, N_HEADS)
    new, foreign = fed(cache, 1, N_HEADS), fed(other, 1, N_HEADS)
    plain = exact_rows(N_HEADS, 8)
    queries = exact_rows(N_HEADS, 1)
    for keys, values in (old, foreign, (plain, plain), (new[0], plain)):
        with pytest.raises(UnsupportedModelError) as raised:
            cache.attend(mx_attention, queries, keys, values, scale=1.0, sinks=None)
        assert "expected" in str(raised.value)
    cache.attend(mx_attention, queries, *new, scale=1.0, sinks=None)


def test_anything_else_that_a_model_does_with_ragged_rows_fails() -> None:
    install()
    keys: Any = fed(uneven("ragged"), 1, N_HEADS)[0]
    kind: Any = type(keys)
    assert kind is RowsForAttentionOnly
    one = mx.ones((1,))
    acts: list[Any] = [
        lambda: keys.shape,
        lambda: keys[..., :1, :],
        lambda: keys.transpose(0, 1, 3, 2),
        lambda: keys * 2,
        lambda: 2 * keys,
        lambda: list(keys),
        lambda: len(keys),
        lambda: keys == one,
        lambda: setattr(keys, "x", 1),
        lambda: mlx_base().scaled_dot_product_attention(
            exact_rows(4, 1), keys, keys, cache=None, scale=1.0, mask=None
        ),
    ]
    for act in acts:
        with pytest.raises(UnsupportedModelError) as raised:
            act()
        assert "RaggedKVCache" in str(raised.value)
    for act in (  # MLX's own functions name what they were given
        lambda: mx.array(keys),
        lambda: mx.matmul(one, keys),
        lambda: mx.fast.scaled_dot_product_attention(exact_rows(4, 1), keys, keys, scale=1.0),
    ):
        with pytest.raises(
            (TypeError, ValueError, KvkeepError), match=r"RowsForAttentionOnly|RaggedKVCache"
        ):
            act()


# -- masks of the union ---------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("query_heads", [None, 4, 8])
def test_mask_of_a_union(n: int, query_heads: int | None) -> None:
    cache = uneven("union")
    fed(cache, 2, N_HEADS)
    mask = cache.make_mask(n, query_heads=query_heads)
    rows = len(UNION) + 2 + n
    assert (mask.dtype, mask.shape) == (mx.bool_, (1, query_heads or N_HEADS, n, rows))
    share = (query_heads or N_HEADS) // N_HEADS
    for head in range(query_heads or N_HEADS):
        for row in range(n):
            seen = [p in HEADS[head // share] for p in UNION]
            tail = [i <= 2 + row for i in range(2 + n)]
            assert mask[0, head, row].tolist() == seen + tail
    assert cache.make_mask(1, return_array=True).shape[1] == N_HEADS


def test_the_kept_part_of_the_mask_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = HeadPartitionedKVCache._built

    def counted(self: Any, query_heads: int, rows: int) -> mx.array:
        built.append(rows)
        return build(self, query_heads, rows)

    monkeypatch.setattr(HeadPartitionedKVCache, "_built", counted)
    cache = made("union", HEADS, OFFSET)
    queries = exact_rows(8, 1)
    for i in range(600):
        rows = fed(cache, 1, N_HEADS, seed=i % 7)
        out = cache.attend(mx_attention, queries, *rows, scale=1.0, sinks=None)
        if i in (0, 255, 256, 257, 599):
            expected = expected_attention(cache, queries, 1.0, None)
            np.testing.assert_allclose(np.asarray(out)[0], expected, atol=1e-5)
    assert len(built) == 1
    cache.trim(10)
    assert len(built) == 1
    cache.trim(cache.offset - 60)
    fed(cache, 1, N_HEADS)
    cache.attend(mx_attention, queries, *cache.keys_and_values(), scale=1.0, sinks=None)
    assert len(built) == 2


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
