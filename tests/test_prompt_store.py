"""The store of prompt caches: what serves which prompt, and what goes first."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from kvkeep.caches import allocated_nbytes, retained
from kvkeep.errors import CacheError
from kvkeep.reuse import PromptStore
from kvkeep.spec import EvictionConfig, LayerSelection
from small_caches import rows

CONFIG = EvictionConfig(policy="snapkv", budget=4)
OTHER = EvictionConfig(policy="snapkv", budget=5)
MODEL = ("model", None, None)


def exact(length: int, seed: int = 1) -> list[Any]:
    layers = [KVCache() for _ in range(2)]
    for layer in layers:
        layer.update_and_fetch(rows(length, seed=seed), rows(length, seed=seed + 1))
    return layers


def compact(at: int, appended: int = 0) -> list[Any]:
    """Every second row of `at`, and so many rows more."""
    kept = LayerSelection((np.arange(0, at, 2),))
    layers = [retained(layer, kept) for layer in exact(at)]
    for layer in layers if appended else ():
        layer.update_and_fetch(rows(appended), rows(appended))
    return layers


def tokens(*lengths: int) -> list[int]:
    """Runs of tokens: the i-th run counts up from 1000 i."""
    return [1000 * i + n for i, length in enumerate(lengths) for n in range(length)]


def test_an_exact_entry_serves_any_prefix_and_stays_as_it_is() -> None:
    store = PromptStore()
    layers = exact(10)
    store.insert(MODEL, tokens(10), layers)
    for prompt, served in (
        (tokens(10, 5), 10),
        (tokens(10), 9),
        (tokens(6, 9), 6),
        (tokens(3), 2),
        ([7, 8, 9], 0),
        ([0], 0),
    ):
        hit = store.find(MODEL, prompt)
        assert (hit.length if hit else 0) == served
        if hit is not None:
            taken = store.take(hit)
            assert [layer.offset for layer in taken] == [served, served]
            held, _ = taken[1].keys_and_values()
            np.testing.assert_array_equal(held, layers[1].keys[..., :served, :])
    assert [layer.offset for layer in layers] == [10, 10]
    assert store.find(("other", None, None), tokens(10, 5)) is None
    hit = store.find(MODEL, tokens(10, 5), unread=8)
    assert hit is not None and hit.length == 7
    assert store.find(MODEL, tokens(10, 5), unread=15) is None


def test_taking_rows_does_not_write_into_the_store() -> None:
    store = PromptStore()
    store.insert(MODEL, tokens(10), exact(10))
    hit = store.find(MODEL, tokens(6, 9))
    assert hit is not None
    before = [np.array(layer.keys) for layer in hit.entry.layers]
    for layer in store.take(hit):
        layer.update_and_fetch(mx.zeros((1, 2, 9, 4)), mx.zeros((1, 2, 9, 4)))
        mx.eval(layer.keys)
    for layer, keys in zip(hit.entry.layers, before, strict=True):
        np.testing.assert_array_equal(layer.keys, keys)


def test_a_compact_entry_is_never_trimmed_below_where_it_was_compacted() -> None:
    store = PromptStore()
    store.insert(MODEL, tokens(20, 6), compact(20, 6), config=CONFIG, compacted_at=20)
    for prompt, served in (
        (tokens(20, 6, 3), 26),
        (tokens(20, 6), 25),
        (tokens(20, 2, 0, 7), 22),
        ([*tokens(20), 5], 20),
        (tokens(20), 0),
        ([*tokens(19), 5, 6, 7], 0),
    ):
        hit = store.find(MODEL, prompt, config=CONFIG)
        assert (hit.length if hit else 0) == served
        if hit is not None:
            for layer in store.take(hit):
                assert layer.offset == served
                assert layer.positions == (*range(0, 20, 2), *range(20, served))
    assert store.find(MODEL, tokens(20, 6, 3), config=OTHER) is None
    assert store.find(MODEL, tokens(20, 6, 3)) is None
    near = store.find(MODEL, tokens(20, 6, 3), config=CONFIG, compact_unread=8)
    assert near is not None and near.length == 21
    assert store.find(MODEL, tokens(20, 6, 3), config=CONFIG, compact_unread=10) is None


def test_an_unusable_longer_entry_does_not_hide_a_usable_one() -> None:
    store = PromptStore()
    store.insert(MODEL, tokens(20, 4), compact(20, 4), config=CONFIG, compacted_at=20)
    store.insert(MODEL, tokens(20, 9), compact(29), config=CONFIG, compacted_at=29)
    hit = store.find(MODEL, [*tokens(20, 4), 1, 2, 3], config=CONFIG)
    assert hit is not None and (hit.entry.compacted_at, hit.length) == (20, 24)


def test_kinds_meet_without_harm() -> None:
    store = PromptStore()
    store.insert(MODEL, tokens(8), exact(8), role="system")
    store.insert(MODEL, tokens(20), compact(20), config=CONFIG, compacted_at=20)
    assert [entry.kind for entry in store] == ["exact", "compact"]  # no checkpoint is lost
    store.insert(MODEL, tokens(20), exact(20))
    assert [entry.kind for entry in store] == ["compact", "exact"]
    hit = store.find(MODEL, tokens(20, 1), config=CONFIG)
    assert hit is not None and hit.entry.kind == "compact"  # chosen for just these tokens
    hit = store.find(MODEL, tokens(20, 1))
    assert hit is not None and hit.entry.kind == "exact"
    store.insert(MODEL, tokens(20, 9), compact(20, 9), config=CONFIG, compacted_at=20)
    assert [len(entry.tokens) for entry in store] == [20, 29]  # the longer one trims to it
    store.insert(MODEL, tokens(20, 9, 5), compact(34), config=CONFIG, compacted_at=34)
    assert [len(entry.tokens) for entry in store] == [20, 29, 34]  # it does not
    hit = store.find(MODEL, [*tokens(20), 3, 3], config=CONFIG)
    assert hit is not None and hit.length == 20


def test_layers_that_cannot_be_trimmed_serve_as_a_whole() -> None:
    store = PromptStore()
    sliding = RotatingKVCache(max_size=4)
    sliding.update_and_fetch(rows(9), rows(9))
    state = ArraysCache(1)
    state[0] = mx.zeros((1, 3))
    layers = [*exact(9), sliding, state]
    store.insert(MODEL, tokens(9), layers)
    store.insert(MODEL, tokens(5), exact(5))
    assert len(store) == 2
    hit = store.find(MODEL, tokens(9, 2))
    assert hit is not None and hit.length == 9
    hit = store.find(MODEL, tokens(9))
    assert hit is not None and hit.length == 5


def test_bytes_are_those_of_the_buffers_and_bounds_hold() -> None:
    one = exact(10)
    size = allocated_nbytes(one)
    store = PromptStore(max_entries=3, max_nbytes=3 * size)
    for first in range(5):
        store.insert(MODEL, [first, *tokens(9)], exact(10))
        assert store.nbytes == size * len(store) == sum(e.nbytes for e in store)
    assert [entry.tokens[0] for entry in store] == [2, 3, 4]
    hit = store.find(MODEL, [2, *tokens(9, 1)])
    assert hit is not None
    store.take(hit)
    store.trim_to(n_bytes=size)
    assert [entry.tokens[0] for entry in store] == [2]  # the last that was used
    store.insert(MODEL, [9, *tokens(9)], exact(10))
    store.trim_to(n_sequences=0, keep=hit.entry)
    assert [entry.tokens[0] for entry in store] == [2]
    store.max_nbytes = size - 1
    store.insert(MODEL, [8, *tokens(9)], exact(10))
    assert len(store) == 0 and store.nbytes == 0
    store.insert(MODEL, [8], exact(1))
    store.clear()
    assert len(store) == 0


def test_system_prompts_stay_longest() -> None:
    store = PromptStore(max_entries=4)
    for first, role in enumerate(["system", "user", "assistant", "assistant", "user", "user"]):
        store.insert(MODEL, [first, 1], exact(2), role=role)
    assert [entry.role for entry in store] == ["system", "assistant", "user", "user"]
    store.trim_to(n_sequences=1)
    assert [entry.role for entry in store] == ["system"]


def test_what_does_not_fit_its_tokens_is_refused() -> None:
    store = PromptStore()
    with pytest.raises(CacheError, match="offset 9"):
        store.insert(MODEL, tokens(9), exact(10))
    with pytest.raises(CacheError, match="no such compact cache"):
        store.insert(MODEL, tokens(10), exact(10), compacted_at=4)
    with pytest.raises(CacheError, match="no such compact cache"):
        store.insert(MODEL, tokens(10), compact(10), config=CONFIG, compacted_at=11)
    assert len(store) == 0


def test_a_lazy_slice_of_a_batch_does_not_keep_the_batch() -> None:
    store = PromptStore()
    layer = KVCache()
    batch = mx.zeros((8, 2, 64, 256))
    mx.eval(batch)
    layer.update_and_fetch(mx.contiguous(batch[:1]), mx.contiguous(batch[:1]))
    before = mx.get_active_memory()
    store.insert(MODEL, list(range(64)), [layer])
    del batch, layer
    mx.clear_cache()
    assert mx.get_active_memory() < before


@given(
    entries=st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(0, 8)),
        max_size=6,
    ),
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=10),
    unread=st.integers(1, 4),
)
def test_the_best_hit_is_found(
    entries: list[tuple[list[int], int]], prompt: list[int], unread: int
) -> None:
    """Against a plain search over every entry and length; compact ones where the number says
    where."""
    store = PromptStore(max_entries=100)
    best = 0
    for read, at in entries:
        at = min(at, len(read))
        layers = compact(at, len(read) - at) if at else exact(len(read))
        config = CONFIG if at else None
        store.insert(MODEL, read, layers, config=config, compacted_at=at)
        for length in range(max(at, 1), min(len(read), len(prompt) - unread) + 1):
            if read[:length] == prompt[:length]:
                best = max(best, length)
    hit = store.find(MODEL, prompt, config=CONFIG, unread=unread)
    assert (hit.length if hit else 0) == best
    if hit is not None:
        taken = store.take(hit)
        assert all(layer.offset == hit.length for layer in taken)
        assert hit.entry.tokens[: hit.length].tolist() == prompt[: hit.length]
