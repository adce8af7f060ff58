"""Requests of every store in one batch: each decodes as it does alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

import kvkeep
from batched import KV_HEADS, LAYERS, MODEL, assert_decodes_like, compact, merged, parts, stock
from kvkeep import (
    BatchMixedKVCache,
    BatchPositionPreservingKVCache,
    HeadPartitionedKVCache,
    PositionPreservingKVCache,
    RaggedKVCache,
)
from kvkeep.attention.seam import _stock
from kvkeep.caches import live_nbytes, retained
from kvkeep.errors import CacheError, KvkeepError, TrimError, UnsupportedModelError
from oracles import greedy, logits_of, prefilled
from tiny_models import random_tokens
from uneven import drawn, full_snapshot, rows_by_head, stored


def ragged(length: int = 70, seed: int = 0) -> list[Any]:
    return stored(stock(length, seed), drawn(length, [[20, 7], [0, 31]], seed), "ragged")


def union(length: int = 50, seed: int = 0) -> list[Any]:
    return stored(stock(length, seed), drawn(length, [[9, 12], [5, 5]], seed), "union")


def requests() -> list[list[Any]]:
    return [ragged(70, 1), stock(33, 2), union(50, 3), compact(60, 20, 4), ragged(90, 5)]


KINDS = [RaggedKVCache, KVCache, HeadPartitionedKVCache, PositionPreservingKVCache, RaggedKVCache]


def rows_of(cache: Any) -> Any:
    """Offset, and each head's positions and rows, whatever the store."""
    return cache.offset, rows_by_head(cache)


def offsets(layer: Any) -> list[int]:
    assert layer.offset.dtype == mx.int32
    return np.asarray(layer.offset).tolist()


# -- joining --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order", [(0, 1, 2, 3, 4), (1, 2), (3, 0), (2,), (0,), (1, 3, 4), (0, 0, 1)]
)
def test_merge_in_any_order_then_extract(order: tuple[int, ...]) -> None:
    caches = [requests()[i] for i in order]
    batch = merged(caches)
    assert all(type(layer) is BatchMixedKVCache for layer in batch)
    assert offsets(batch[0]) == [cache[0].offset for cache in caches]
    assert batch[0].size() == max(cache[0].size() for cache in caches)
    for i, cache in enumerate(caches):
        for layer, mine in zip(batch, cache, strict=True):
            out = layer.extract(i)
            assert type(out) is KINDS[order[i]]
            assert rows_of(out) == rows_of(mine)


def test_without_uneven_requests_nothing_changes() -> None:
    batch = merged([compact(60, 20, 1), stock(33, 2)])
    assert all(type(layer) is BatchPositionPreservingKVCache for layer in batch)


def test_a_batch_decodes_like_each_request_alone() -> None:
    batch, alone = merged(requests()), requests()
    assert_decodes_like(batch, alone)
    assert offsets(batch[0]) == [cache[0].offset for cache in alone]
    for ours, theirs in zip(parts(batch, 5), alone, strict=True):
        assert [c.offset for c in ours] == [c.offset for c in theirs]
        token, _ = greedy(MODEL, ours, 3, 4)
        assert token == greedy(MODEL, theirs, 3, 4)[0]


def test_a_batch_of_one_is_bit_equal_to_the_request_alone() -> None:
    for make in (ragged, union):
        ours, theirs = greedy(MODEL, merged([make()]), 5, 20), greedy(MODEL, make(), 5, 20)
        assert ours[0] == theirs[0]
        np.testing.assert_array_equal(ours[1], theirs[1])


def test_requests_that_lost_no_row_leave_as_stock_caches() -> None:
    whole = [[list(range(33))] * KV_HEADS] * LAYERS
    for store in ("ragged", "union"):
        exact, keep_all = stock(33, 2), stored(stock(33, 2), whole, store)
        batch = merged([keep_all, ragged()])
        out = batch[0].extract(0)
        assert type(out) is KVCache
        assert rows_of(out) == rows_of(exact[0])
        tokens, logits = greedy(MODEL, merged([keep_all]), 5, 20)
        expected = greedy(MODEL, exact, 5, 20)
        assert tokens == expected[0]
        np.testing.assert_array_equal(logits, expected[1])


def test_merge_and_extract_share_nothing_with_the_batch() -> None:
    caches = requests()
    before = [[rows_of(layer) for layer in cache] for cache in caches]
    batch = merged(caches)
    taken = parts(batch, 5)
    assert_decodes_like(batch, requests(), 3)
    for cache, mine, rows in zip(caches, taken, before, strict=True):
        assert [rows_of(layer) for layer in cache] == rows
        assert [rows_of(layer) for layer in mine] == rows


@pytest.mark.parametrize("first", ["stock", "compact", "mixed"])
@pytest.mark.parametrize("second", ["stock", "compact", "mixed"])
def test_extend_batches_of_any_kind_by_any_other(first: str, second: str) -> None:
    groups = {
        "stock": [stock(20, 1), stock(40, 2)],
        "compact": [compact(60, 20, 3), stock(25, 4)],
        "mixed": [ragged(70, 5), stock(33, 6), union(50, 7)],
    }
    alone = [*copy.deepcopy(groups[first]), *copy.deepcopy(groups[second])]
    batch, other = merged(groups[first]), merged(groups[second])
    assert_decodes_like(batch, alone[: len(groups[first])], 2)
    objects = list(batch)
    for layer, joining in zip(batch, other, strict=True):
        layer.extend(joining)
    assert all(a is b for a, b in zip(batch, objects, strict=True))
    if "mixed" in (first, second):
        assert all(type(layer) is BatchMixedKVCache for layer in batch)
    assert_decodes_like(batch, alone, 3)


def test_extend_refuses_what_it_cannot_hold() -> None:
    batch = merged([ragged()])[0]
    before = rows_of(batch.extract(0))
    wide = retained(stock(9)[0], kvkeep.LayerSelection((np.arange(3),)), "ragged")
    wide.keys = mx.concatenate([wide.keys, wide.keys], axis=1)
    for other in (KVCache(), ragged()[0], RotatingKVCache(max_size=8), wide.merge([wide])):
        with pytest.raises(CacheError):
            batch.extend(other)
    assert (rows_of(batch.extract(0)), offsets(batch)) == (before, [70])


@pytest.mark.parametrize(
    "make",
    [
        lambda: RotatingKVCache(max_size=8),
        lambda: QuantizedKVCache(group_size=32),
        lambda: merged([ragged()])[0],
    ],
    ids=["rotating", "quantised", "batch"],
)
def test_what_cannot_be_merged(make: Any) -> None:
    for first in (ragged()[0], KVCache(), compact(20, 5)[0]):
        with pytest.raises(KvkeepError) as raised:
            first.merge([ragged()[0], make()])
        assert "expected" in str(raised.value)


# -- leaving, padding, trimming -------------------------------------------------------


@pytest.mark.parametrize("keep", [[1, 3], [2], [4, 0], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("as_array", [False, True], ids=["list", "array"])
def test_filter(keep: list[int], as_array: bool) -> None:
    batch, alone = merged(requests()), requests()
    assert_decodes_like(batch, alone, 2)
    for layer in batch:
        layer.filter(mx.array(keep) if as_array else keep)
    assert_decodes_like(batch, [alone[i] for i in keep], 3)


def test_split_by_deepcopy_and_filter() -> None:
    """As PromptProcessingBatch.split does it: the halves must not share anything."""
    batch, alone = merged(requests()), requests()
    assert_decodes_like(batch, alone, 2)
    other = copy.deepcopy(batch)
    for layer, twin in zip(batch, other, strict=True):
        layer.filter([0, 2])
        twin.filter([1, 3, 4])
    assert_decodes_like(batch, [alone[0], alone[2]], 3)
    assert_decodes_like(other, [alone[1], alone[3], alone[4]], 3)


@pytest.mark.parametrize("lengths", [(7, 3, 5, 1, 4), (1, 9, 1, 9, 2), (4, 4, 4, 4, 4)])
@pytest.mark.parametrize("chunk", [100, 3])
def test_right_padding(lengths: tuple[int, ...], chunk: int) -> None:
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
    assert offsets(batch[0]) == [cache[0].offset for cache in alone]
    assert_decodes_like(batch, alone, 3)


def test_left_padding_of_empty_caches() -> None:
    batch = merged([[RaggedKVCache() for _ in range(LAYERS)] for _ in range(2)])
    prompts = [random_tokens(6, 1), random_tokens(2, 2)]
    for layer in batch:
        layer.prepare(left_padding=[0, 4])
    assert offsets(batch[0]) == [0, -4]
    tokens = mx.array([prompts[0], [0] * 4 + prompts[1]])
    for start in range(0, 6, 3):
        MODEL(tokens[:, start : start + 3], cache=batch)
    assert offsets(batch[0]) == [6, 2]
    assert_decodes_like(batch, [prefilled(MODEL, prompt) for prompt in prompts])
    with pytest.raises(CacheError):
        batch[0].prepare(left_padding=[1, 0])


@pytest.mark.parametrize("n", [0, 2, 4, 12, 33])
def test_trim_within_appended_and_below(n: int) -> None:
    batch, alone = merged(requests()), requests()
    assert_decodes_like(batch, alone, 4)
    for layer in batch:
        assert layer.trim(n) == n
    for cache in alone:
        for layer in cache:
            layer.trim(n)
    assert offsets(batch[0]) == [cache[0].offset for cache in alone]
    assert_decodes_like(batch, alone, 3)


@pytest.mark.parametrize("n", [-1, 38, True, 1.5])
def test_a_refused_trim_changes_nothing(n: Any) -> None:
    batch, alone = merged(requests()), requests()
    assert_decodes_like(batch, alone, 4)  # the shortest request has 37 tokens now
    with pytest.raises(TrimError):
        batch[0].trim(n)
    assert_decodes_like(batch, alone, 2)


# -- the rest of the contract ---------------------------------------------------------


def test_nbytes_count_live_rows_only() -> None:
    batch, alone = merged(requests()), requests()
    for appended in (0, 3):
        if appended:
            assert_decodes_like(batch, alone, appended)
        for i, layer in enumerate(batch):
            live = sum(live_nbytes(cache[i]) for cache in alone)
            assert layer.nbytes == live <= layer.allocated_nbytes


def test_an_append_does_not_copy_the_buffers() -> None:
    """A view that outlives its step would make the next append copy the whole buffer."""
    heads, length, dim = 2, 6000, 64
    single: Any = KVCache()
    single.update_and_fetch(*(mx.ones((1, heads, length, dim)) for _ in range(2)))
    rows = kvkeep.LayerSelection((np.arange(0, length, 2), np.arange(5)))
    batch: Any = KVCache.merge([single, *(retained(single, rows, s) for s in ("ragged", "union"))])
    del single

    def step() -> None:
        new = mx.ones((3, heads, 1, dim))
        handed = batch.update_and_fetch(new, new)
        out = batch.attend(_stock, mx.ones((3, heads, 1, dim)), *handed, scale=1.0, sinks=None)
        mx.eval(out)

    for _ in range(3):
        step()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(4):
        step()
    assert mx.get_peak_memory() - before < batch.allocated_nbytes // 8


def test_state_round_trip_and_files(tmp_path: Path) -> None:
    batch, alone = merged(requests()), requests()
    assert_decodes_like(batch, alone, 2)
    states = [layer.state for layer in batch]
    path = str(tmp_path / "batch.safetensors")
    kvkeep.save_prompt_cache(path, batch)
    twins = [BatchMixedKVCache.from_state(state) for state in states]
    for again in (twins, kvkeep.load_prompt_cache(path)):
        assert all(type(layer) is BatchMixedKVCache for layer in again)
        assert_decodes_like(again, copy.deepcopy(alone), 3)
    assert_decodes_like(batch, alone, 3)


def test_states_that_are_no_batch_are_refused() -> None:
    state = merged(requests())[0].state
    for broken in ((state[0][:2],), (("Nonsense", 0, state[0][2]),), (("KVCache", 0),)):
        with pytest.raises(CacheError):
            BatchMixedKVCache.from_state(broken)


def test_rows_that_do_not_fit_leave_every_request_as_it_was() -> None:
    batch = merged(requests())[0]
    before = [full_snapshot(batch.extract(i)) for i in (0, 2, 3, 4)]
    for shape in ((4, 2, 1, 16), (5, 3, 1, 16), (5, 2, 1, 17)):
        with pytest.raises(CacheError):
            batch.update_and_fetch(mx.zeros(shape), mx.zeros(shape))
    assert before == [full_snapshot(batch.extract(i)) for i in (0, 2, 3, 4)]
    assert offsets(batch) == [cache[0].offset for cache in requests()]


def test_its_rows_are_for_its_own_attention_only() -> None:
    batch = merged(requests())[0]
    new = mx.zeros((5, 2, 1, 16))
    old = batch.update_and_fetch(new, new)
    batch.update_and_fetch(new, new)
    with pytest.raises(UnsupportedModelError):
        batch.attend(lambda *_, **__: new, mx.zeros((5, 4, 1, 16)), *old, scale=1.0, sinks=None)
    with pytest.raises(UnsupportedModelError):
        old[0].shape  # noqa: B018
    with pytest.raises(CacheError):
        batch.make_mask(1, window_size=4)
    assert bool(batch) and batch.is_trimmable() and not batch.empty()


def test_mlx_lms_batch_generator() -> None:
    """Prompts of unequal length on top of caches of every store, joining one after the other."""
    prompts = [random_tokens(n, seed=n) for n in (5, 1, 9, 3, 2)]
    generator = BatchGenerator(MODEL, max_tokens=8, completion_batch_size=3, prefill_batch_size=2)
    uids = generator.insert(prompts, caches=requests())
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    ended: dict[int, Any] = {}
    while len(ended) < len(uids):
        for response in generator.next()[1]:
            found[response.uid].append(response.token)
            if response.finish_reason is not None:
                ended[response.uid] = response.prompt_cache
    for uid, prompt, cache, kind in zip(uids, prompts, requests(), KINDS, strict=True):
        if len(prompt) > 1:
            logits_of(MODEL, cache, prompt[:-1])
        tokens, _ = greedy(MODEL, cache, prompt[-1], 8)
        assert found[uid] == tokens
        logits_of(MODEL, cache, tokens[-1:])  # mlx-lm's batch runs the last token too
        assert type(ended[uid][0]) is kind
        assert ended[uid][0].offset == cache[0].offset


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_order_of_joining_and_leaving(data: Any) -> None:
    pool = requests()
    first = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    alone = [copy.deepcopy(pool[i]) for i in first]
    batch = merged(copy.deepcopy(alone))
    for _ in range(data.draw(st.integers(1, 4))):
        step = data.draw(st.sampled_from(["decode", "filter", "extend", "trim", "extract"]))
        if step == "decode":
            assert_decodes_like(batch, alone, 2)
        elif step == "filter":
            keep = data.draw(
                st.lists(st.integers(0, len(alone) - 1), min_size=1, max_size=4, unique=True)
            )
            for layer in batch:
                layer.filter(keep)
            alone = [alone[i] for i in keep]
        elif step == "extend":
            more = [
                copy.deepcopy(pool[i])
                for i in data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=2))
            ]
            for layer, joining in zip(batch, merged(copy.deepcopy(more)), strict=True):
                layer.extend(joining)
            alone += more
        elif step == "trim":
            n = data.draw(st.integers(0, 10))
            for layer in [*batch, *(layer for cache in alone for layer in cache)]:
                layer.trim(n)
        else:
            singles = parts(batch, len(alone))
            order = data.draw(st.permutations(range(len(alone))))
            batch = merged([singles[i] for i in order])
            alone = [alone[i] for i in order]
    assert_decodes_like(batch, alone, 2)
