"""Whole models over ragged and union stores: the identity, and full attention under the mask."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvkeep
from kvkeep.attention import unchanged_on_error
from oracles import evicted_mask, greedy, logits_of, numpy_llama, prefilled
from tiny_models import random_tokens, tiny_llama, tiny_tokenizer
from uneven import CLASSES, STORES, Kept, drawn, full_snapshot, stored

TOLERANCE = 1e-4
SHAPES = pytest.mark.parametrize(
    ("heads", "kv_heads"), [(4, 2), (4, 4), (4, 1), (8, 4)], ids=["G2", "G1", "H_kv 1", "H_kv 4"]
)
PROMPT = random_tokens(150)


def counts_of(kv_heads: int, seed: int = 0) -> list[list[int]]:
    """Other numbers in each head of two layers; one head keeps nothing."""
    random = np.random.default_rng(seed)
    counts = [random.permutation([20, 7, 31, 7])[:kv_heads].tolist() for _ in range(2)]
    counts[1][-1] = 0
    return counts


def expected_logits(
    model: Any, tokens: Sequence[int], kept: Kept, evicted_at: int, until: int | None = None
) -> np.ndarray:
    masks = [evicted_mask(len(tokens), layer, evicted_at, until) for layer in kept]
    return numpy_llama(model, tokens, np.stack(masks))


# -- identity -------------------------------------------------------------------------


@STORES
@pytest.mark.parametrize("step", [1, 7, 2048])
@SHAPES
def test_keep_all_decodes_bit_equal(store: str, step: int, heads: int, kv_heads: int) -> None:
    model = tiny_llama(heads=heads, kv_heads=kv_heads)
    stock = prefilled(model, PROMPT[:-1], step)
    ours = stored(stock, [[list(range(149))] * kv_heads] * 2, store)
    assert all(type(layer) is CLASSES[store] and layer.complete for layer in ours)
    tokens, logits = greedy(model, ours, PROMPT[-1], 48)
    assert len(set(tokens)) > 3
    exact_tokens, exact_logits = greedy(model, stock, PROMPT[-1], 48)
    assert tokens == exact_tokens
    np.testing.assert_array_equal(logits, exact_logits)


@STORES
@pytest.mark.parametrize("step", [1, 7, 2048])
def test_prefill_into_empty_caches_is_bit_equal(store: str, step: int) -> None:
    model = tiny_llama()

    def empty(model: Any) -> list[Any]:
        return [CLASSES[store]() for _ in model.layers]

    ours, stock = (prefilled(model, PROMPT[:-1], step, make) for make in (empty, make_prompt_cache))
    for mine, other in zip(ours, stock, strict=True):
        for a, b in zip(mine.keys_and_values(), other.keys_and_values(), strict=True):
            assert mx.array_equal(a, b)
    tokens, logits = greedy(model, ours, PROMPT[-1], 20)
    exact_tokens, exact_logits = greedy(model, stock, PROMPT[-1], 20)
    assert tokens == exact_tokens
    np.testing.assert_array_equal(logits, exact_logits)


@STORES
def test_mlx_lms_own_loop_over_a_keep_all_cache(store: str) -> None:
    """It evaluates `state`, pipelines two steps and trims nothing."""
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    stock = prefilled(model, PROMPT[:100])
    ours = stored(stock, [[list(range(100))] * 2] * 2, store)

    def run(cache: list[Any]) -> list[int]:
        made = mlx_lm.stream_generate(
            model, tokenizer, PROMPT[100:], max_tokens=40, prompt_cache=cache, prefill_step_size=7
        )
        return [response.token for response in made]

    assert run(ours) == run(stock)


@STORES
def test_one_row_missing_in_one_head_only(store: str) -> None:
    """Almost everything is kept: the layer is uneven by a single row."""
    model = tiny_llama()
    stock = prefilled(model, PROMPT[:-1])
    kept: Kept = [[list(range(149)), [p for p in range(149) if p != 140]], [list(range(149))] * 2]
    tokens, logits = greedy(model, stored(stock, kept, store), PROMPT[-1], 10)
    whole = [*PROMPT, *tokens[:-1]]
    expected = expected_logits(model, whole, kept, 149)[149:]
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)


# -- full attention under the equivalent mask -----------------------------------------


@STORES
@SHAPES
def test_decoding(store: str, heads: int, kv_heads: int) -> None:
    model, prompt = tiny_llama(heads=heads, kv_heads=kv_heads), PROMPT[:80]
    kept = drawn(79, counts_of(kv_heads))
    cache = stored(prefilled(model, prompt[:-1], 32), kept, store)
    tokens, logits = greedy(model, cache, prompt[-1], 12)
    whole = [*prompt, *tokens[:-1]]
    np.testing.assert_allclose(logits, expected_logits(model, whole, kept, 79)[79:], atol=TOLERANCE)
    full: Kept = [[list(range(79))] * kv_heads] * 2
    stock = expected_logits(model, whole, full, 79)[79:]
    assert np.abs(logits - stock).max() > 100 * TOLERANCE, "the eviction did not matter"


@STORES
@SHAPES
@pytest.mark.parametrize("chunks", [(9,), (1, 5, 3)])
def test_several_tokens_at_once(
    store: str, heads: int, kv_heads: int, chunks: tuple[int, ...]
) -> None:
    model, done, logits = tiny_llama(heads=heads, kv_heads=kv_heads), 70, []
    kept = drawn(70, counts_of(kv_heads, 3), 3)
    cache = stored(prefilled(model, PROMPT[:70]), kept, store)
    for count in chunks:
        logits.append(logits_of(model, cache, PROMPT[done : done + count]))
        done += count
    expected = expected_logits(model, PROMPT[:done], kept, 70)[70:]
    np.testing.assert_allclose(np.concatenate(logits), expected, atol=TOLERANCE)


@STORES
@SHAPES
def test_after_a_trim_below_the_compaction_point(store: str, heads: int, kv_heads: int) -> None:
    model = tiny_llama(heads=heads, kv_heads=kv_heads)
    kept = drawn(70, counts_of(kv_heads, 5), 5)
    cache = stored(prefilled(model, PROMPT[:70]), kept, store)
    logits_of(model, cache, PROMPT[70:75])
    for layer in cache:
        layer.trim(5 + 25)
    other = random_tokens(12, seed=8)
    ours = [logits_of(model, cache, other[:5]), *(logits_of(model, cache, [t]) for t in other[5:])]
    left = [[[p for p in head if p < 45] for head in layer] for layer in kept]
    expected = expected_logits(model, [*PROMPT[:45], *other], left, 70, until=45)[45:]
    np.testing.assert_allclose(np.concatenate(ours), expected, atol=TOLERANCE)


@STORES
def test_a_rejected_draft_leaves_no_trace(store: str) -> None:
    model = tiny_llama()
    kept = drawn(70, counts_of(2), 1)
    cache = stored(prefilled(model, PROMPT[:70]), kept, store)
    twin = copy.deepcopy(cache)
    for layer in cache:
        layer.start_speculation()
    logits_of(model, cache, random_tokens(6, seed=3))
    for layer in cache:
        layer.trim(6)
        layer.stop_speculation()
    ours = logits_of(model, cache, PROMPT[70:80])
    np.testing.assert_array_equal(ours, logits_of(model, twin, PROMPT[70:80]))
    expected = expected_logits(model, PROMPT[:80], kept, 70)[70:]
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE)


def test_layers_of_different_stores_in_one_list() -> None:
    """The first layer's mask goes to all of them."""
    model = tiny_llama(layers=3)
    exact = prefilled(model, PROMPT[:70])
    kept = drawn(70, [[20, 7], [12, 12], [31, 0]], 4)
    by_store = {store: stored(exact, kept, store) for store in ("ragged", "union")}
    by_store["auto"] = stored(exact, kept, "auto")
    for order in (("ragged", "auto", "union"), ("union", "auto", "ragged")):
        cache = [copy.deepcopy(by_store[store][i]) for i, store in enumerate(order)]
        ours = [logits_of(model, cache, PROMPT[70:75]), logits_of(model, cache, PROMPT[75:76])]
        expected = expected_logits(model, PROMPT[:76], kept, 70)[70:]
        np.testing.assert_allclose(np.concatenate(ours), expected, atol=TOLERANCE)


@pytest.mark.parametrize("store", ["ragged", "union"])
@pytest.mark.parametrize("n", [1, 4])
def test_an_exact_layer_behind_an_uneven_one(store: str, n: int) -> None:
    """A union that holds every row is as long as the exact layer: its mask would fit there."""
    model = tiny_llama()
    exact = prefilled(model, PROMPT[:70])
    kept: Kept = [[list(range(70)), [0, 1, 69]]]
    cache = stored(exact, kept, store)
    assert type(cache[1]) is not CLASSES[store]
    ours = logits_of(model, cache, PROMPT[70 : 70 + n])
    whole = [*kept, [list(range(70))] * 2]
    expected = expected_logits(model, PROMPT[: 70 + n], whole, 70)[70:]
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE)


def test_both_stores_in_half_precision() -> None:
    model = tiny_llama(seed=3)
    model.set_dtype(mx.bfloat16)
    exact, kept = prefilled(model, PROMPT[:70]), drawn(70, counts_of(2), 2)
    logits = []
    for store in CLASSES:
        cache = stored(exact, kept, store)
        out = [model(mx.array([[t]]), cache=cache)[0, -1] for t in PROMPT[70:76]]
        assert cache[0].keys.dtype == mx.bfloat16
        logits.append(np.asarray(mx.stack(out).astype(mx.float32)))
    assert np.abs(logits[0] - logits[1]).max() < 0.05 * np.abs(logits[0]).max()


@STORES
def test_a_failed_forward_is_undone(store: str) -> None:
    model = tiny_llama()
    cache = stored(prefilled(model, PROMPT[:70]), drawn(70, counts_of(2), 1), store)
    before = [full_snapshot(layer) for layer in cache]
    with pytest.raises(RuntimeError), unchanged_on_error(cache):
        logits_of(model, cache, PROMPT[70:80])
        raise RuntimeError
    assert [full_snapshot(layer) for layer in cache] == before


@STORES
def test_saved_caches_decode_on(store: str, tmp_path: Path) -> None:
    model, path = tiny_llama(), str(tmp_path / "cache.safetensors")
    cache = stored(prefilled(model, PROMPT[:70]), drawn(70, counts_of(2), 1), store)
    logits_of(model, cache, PROMPT[70:75])
    kvkeep.save_prompt_cache(path, cache)
    ours = greedy(model, kvkeep.load_prompt_cache(path), 5, 8)
    theirs = greedy(model, cache, 5, 8)
    assert ours[0] == theirs[0]
    np.testing.assert_array_equal(ours[1], theirs[1])
