"""`evict_prompt_cache_by_head`: each KV head keeps the positions that the caller names."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache

import kvkeep
from kvkeep import (
    HeadPartitionedEvictionResult,
    HeadPartitionedKVCache,
    SnapKVEvictionResult,
    evict_prompt_cache_by_head,
)
from kvkeep.errors import CacheError, KvkeepError, SelectionError
from oracles import raw
from refusals import compact_cache, exact_cache, expect_refused
from uneven import exact, rows_by_head

HEADS = ((0, 1, 20, 39), (5,))
LAYERS = (HEADS, ((), (3, 4, 5)))


def test_one_list_per_head_serves_all_layers() -> None:
    cache = exact_cache()
    before = [raw(side) for layer in cache for side in layer.keys_and_values()]
    done = evict_prompt_cache_by_head(cache, HEADS, true_offset=40, query_heads=4)
    assert type(done) is HeadPartitionedEvictionResult
    assert isinstance(done, SnapKVEvictionResult)
    for layer, source in zip(done.cache, cache, strict=True):
        assert type(layer) is HeadPartitionedKVCache
        assert (layer.offset, layer.positions) == (40, (0, 1, 5, 20, 39))
        assert (layer.head_positions, layer.query_heads) == (HEADS, 4)
        assert layer.make_mask(1).shape == (1, 4, 1, 6)
        for head, (_, keys, _) in enumerate(rows_by_head(layer)):
            assert keys == raw(source.keys[0, head, mx.array(HEADS[head])])
    assert (done.evicted, done.true_offset, done.original_tokens, done.kv_layers) == (
        True,
        40,
        40,
        2,
    )
    assert (done.union_retained_tokens, done.per_head_retained_tokens) == (5, (4, 1))
    assert done.layer_union_tokens == {0: 5, 1: 5}
    assert done.layer_head_tokens == {0: (4, 1), 1: (4, 1)}
    live = sum(mx.contiguous(s).nbytes for c in done.cache for s in c.keys_and_values())
    assert done.compact_cache_nbytes == live < done.exact_cache_nbytes
    assert before == [raw(side) for layer in cache for side in layer.keys_and_values()]


@pytest.mark.parametrize("form", [tuple, np.array, mx.array], ids=["tuple", "numpy", "mlx"])
def test_one_such_list_per_layer(form: Any) -> None:
    indices = [[form(head) if len(head) else head for head in layer] for layer in LAYERS]
    done = evict_prompt_cache_by_head(exact_cache(), indices, true_offset=40)
    assert [layer.head_positions for layer in done.cache] == list(LAYERS)
    assert done.layer_union_tokens == {0: 5, 1: 3}
    assert done.layer_head_tokens == {0: (4, 1), 1: (0, 3)}
    assert (done.union_retained_tokens, done.per_head_retained_tokens) == (4, (2, 2))
    assert [layer.query_heads for layer in done.cache] == [None, None]


def test_rectangular_arrays_of_positions() -> None:
    per_head = np.array([[0, 1], [2, 3]])
    for indices in (per_head, np.stack([per_head, per_head])):
        done = evict_prompt_cache_by_head(exact_cache(), indices, true_offset=40)
        assert [layer.head_positions for layer in done.cache] == [((0, 1), (2, 3))] * 2


def test_keeping_everything_evicts_nothing() -> None:
    done = evict_prompt_cache_by_head(exact_cache(), [range(40)] * 2, true_offset=40)
    assert (done.evicted, done.union_retained_tokens) == (False, 40)
    assert done.per_head_retained_tokens == (40, 40)
    assert all(layer.complete for layer in done.cache)


def test_a_retrieval_head_beside_a_streaming_one() -> None:
    """As DuoAttention has it: one head keeps all, the other sinks and recent rows."""
    done = evict_prompt_cache_by_head(
        exact_cache(), [range(40), [0, 1, 38, 39]], true_offset=40, query_heads=4
    )
    assert (done.evicted, done.union_retained_tokens) == (True, 40)
    assert done.per_head_retained_tokens == (40, 4)


def test_layers_without_rows_to_evict_pass_through() -> None:
    state = ArraysCache(size=1)
    state[0] = mx.zeros((1, 4))
    done = evict_prompt_cache_by_head([state, exact(2, 40)], HEADS, true_offset=40)
    assert done.cache[0] is state
    assert (done.kv_layers, done.layer_union_tokens) == (1, {1: 5})
    nothing = evict_prompt_cache_by_head([state], HEADS, true_offset=1)
    assert (nothing.evicted, nothing.kv_layers, nothing.per_head_retained_tokens) == (False, 0, ())


@pytest.mark.parametrize(
    ("indices", "error"),
    [
        ([[1, 0], [0]], SelectionError),
        ([[0, 0], [0]], SelectionError),
        ([[-1, 0], [0]], SelectionError),
        ([[0, 40], [0]], SelectionError),
        ([[0.5], [0]], SelectionError),
        ([[0]], SelectionError),
        ([[0], [1], [2]], SelectionError),
        ([], SelectionError),
        ([[[0], [1]]], SelectionError),
        ([[[0], [1]]] * 3, SelectionError),
        ([[[0], [1]], [[0]]], SelectionError),
        ([[[0], [1]], [0]], KvkeepError),
    ],
)
def test_bad_indices_are_refused(indices: Any, error: type[KvkeepError]) -> None:
    cache = exact_cache()
    before = [raw(side) for layer in cache for side in layer.keys_and_values()]
    with pytest.raises(error) as raised:
        evict_prompt_cache_by_head(cache, indices, true_offset=40)
    assert "expected" in str(raised.value)
    assert before == [raw(side) for layer in cache for side in layer.keys_and_values()]


def test_other_refusals() -> None:
    def act(cache: list[Any]) -> Any:
        return evict_prompt_cache_by_head(cache, HEADS, true_offset=40)

    expect_refused(compact_cache(), act, CacheError, "layer 0 cannot be evicted")
    expect_refused(
        exact_cache(), lambda c: evict_prompt_cache_by_head(c, HEADS, true_offset=41), CacheError
    )
    expect_refused(
        exact_cache(),
        lambda c: evict_prompt_cache_by_head(c, HEADS, true_offset=40, query_heads=3),
        CacheError,
    )
    two: Any = KVCache()
    two.update_and_fetch(mx.zeros((2, 2, 40, 8)), mx.zeros((2, 2, 40, 8)))
    quantised = QuantizedKVCache(group_size=32)
    uneven = evict_prompt_cache_by_head(exact_cache(), HEADS, true_offset=40).cache
    batch = uneven[0].merge([uneven[0]])
    for layers in ([two], [quantised], uneven, [batch]):
        with pytest.raises(CacheError):
            act(layers)


def test_the_names_are_importable() -> None:
    for name in (
        "RaggedKVCache",
        "HeadPartitionedKVCache",
        "BatchMixedKVCache",
        "HeadPartitionedEvictionResult",
        "evict_prompt_cache_by_head",
    ):
        assert name in kvkeep.__all__ and hasattr(kvkeep, name)
