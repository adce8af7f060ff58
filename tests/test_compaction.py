"""From a prompt to a compact cache: what is kept, that it is exact, and what is left alone."""

from __future__ import annotations

import weakref
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from bare_models import (
    PartlySeenModel,
    attention_inputs,
    cache_bytes,
    tiny_model,
    window_weights,
)
from kvkeep import (
    Budget,
    EvictionConfig,
    LayerSelection,
    PositionPreservingKVCache,
    Selection,
    compact_prompt_cache,
    compaction,
    evict_selection,
)
from kvkeep.attention import install
from kvkeep.compaction import cache_nbytes, prefill_and_compact, store_selection
from kvkeep.errors import UnsupportedModelError
from oracles import evicted_mask, greedy, logits_of, numpy_llama, prefilled
from tiny_models import random_tokens, tiny_bare_model, tiny_llama

TOKENS = random_tokens(60)
NEXT = [7, 11, 3, 40, 22]
SNAPKV = {"policy": "snapkv", "window": 6, "pool_kernel": 5}
CONFIGS = {
    "snapkv-d": {"policy": "snapkv-d", "window": 6},
    "snapkv-d, per-head store": {"policy": "snapkv-d", "window": 6, "store": "per-head"},
    "snapkv": SNAPKV,
    "snapkv, shared": {**SNAPKV, "store": "shared"},
    "snapkv, max": {**SNAPKV, "pooling": "max", "store": "per-head"},
}


def config_of(name: str, budget: Any = 16, **more: Any) -> EvictionConfig:
    return EvictionConfig.parse({"min_tokens": 0, "budget": budget, **CONFIGS[name], **more})


def positions_of(layer: Any) -> list[list[int]]:
    """Kept positions per KV head (one list where they are shared)."""
    return [list(head) for head in layer.head_positions]


def best(scores: np.ndarray, keep: int, sinks: int, recent: int) -> list[int]:
    """The rule of selection, spelled out by sorting."""
    length = len(scores)
    forced = list(range(sinks)) + list(range(length - recent, length))
    rest = [p for p in range(length) if p not in forced]
    rest.sort(key=lambda p: (scores[p], p), reverse=True)
    return sorted([*forced, *rest[: keep - len(forced)]])


def right_positions(name: str, model: Any, keep: int = 16) -> list[list[list[int]]]:
    """Kept positions per layer and head, from float64 scores of the model's own queries."""
    config, length = config_of(name), len(TOKENS)
    weights = [window_weights(q, k, 6) for q, k in attention_inputs(model, TOKENS)]
    if config.policy == "snapkv-d":
        total = sum(w.sum(axis=(0, 1)) for w in weights)
        return [[best(np.asarray(total), keep, 4, keep // 8)]] * len(weights)
    layers = []
    for layer in weights:
        prefix = np.pad(layer.mean(axis=1)[:, : length - 6], [(0, 0), (2, 2)])
        windows = np.lib.stride_tricks.sliding_window_view(prefix, 5, axis=1)
        pooled = windows.max(-1) if config.pooling == "max" else windows.mean(-1)
        heads = pooled.reshape(2, 2, -1).mean(axis=1)
        if config.store == "shared":
            heads = heads.mean(axis=0, keepdims=True)
        full = np.pad(heads, [(0, 0), (0, 6)])
        layers.append([best(head, keep, 4, 6) for head in full])
    return layers


@pytest.mark.parametrize("step", [1, 7, 16, 2048])
@pytest.mark.parametrize("name", CONFIGS)
def test_evicting_equals_the_full_cache_under_the_same_mask(name: str, step: int) -> None:
    model = tiny_llama()
    result = compact_prompt_cache(model, TOKENS, config=config_of(name), prefill_step_size=step)
    kept = [positions_of(layer) for layer in result.cache]
    assert kept == right_positions(name, model)
    masks = [evicted_mask(len(TOKENS) + len(NEXT), heads, len(TOKENS)) for heads in kept]
    masks = [np.broadcast_to(mask, (2, *mask.shape[1:])) for mask in masks]
    right = numpy_llama(model, [*TOKENS, *NEXT], np.stack(masks))[len(TOKENS) :]
    logits = np.concatenate([logits_of(model, result.cache, [token]) for token in NEXT[:2]])
    logits = np.concatenate([logits, logits_of(model, result.cache, NEXT[2:])])
    np.testing.assert_allclose(logits, right, rtol=1e-4, atol=1e-4)
    exact = numpy_llama(model, [*TOKENS, *NEXT], np.tril(np.ones((2, 1, 65, 65), bool)))
    assert np.abs(exact[len(TOKENS) :] - right).max() > 0.01  # the mask does matter


@pytest.mark.parametrize("step", [7, 2048])
@pytest.mark.parametrize("name", CONFIGS)
def test_kept_rows_are_bit_equal_to_the_exact_ones(name: str, step: int) -> None:
    model = tiny_llama()
    exact = prefilled(model, TOKENS, step)
    result = compact_prompt_cache(model, TOKENS, config=config_of(name), prefill_step_size=step)
    for layer, whole in zip(result.cache, exact, strict=True):
        heads = positions_of(layer)
        for rows, source in zip(layer.keys_and_values(), whole.keys_and_values(), strict=True):
            for head in range(2):
                index = mx.array(heads[head % len(heads)])
                np.testing.assert_array_equal(
                    np.asarray(rows[0, head]), np.asarray(source[0, head][index])
                )


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_prompt_gives_the_same_cache(name: str) -> None:
    first, second = (
        compact_prompt_cache(tiny_llama(), TOKENS, config=config_of(name)).cache for _ in range(2)
    )
    assert [repr(c) for c in cache_bytes(first)] == [repr(c) for c in cache_bytes(second)]


def test_the_fields_of_a_result() -> None:
    model = tiny_llama()
    result = compact_prompt_cache(model, TOKENS, config=config_of("snapkv"))
    row = 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, head dim, float32
    assert (result.evicted, result.true_offset) == (True, 60)
    assert (result.retained_tokens, result.original_tokens, result.kv_layers) == (16, 60, 2)
    assert (result.compact_cache_nbytes, result.exact_cache_nbytes) == (16 * row, 60 * row)
    assert result.compact_cache_nbytes == sum(layer.nbytes for layer in result.cache)
    assert all(type(layer) is PositionPreservingKVCache for layer in result.cache)
    assert [(layer.offset, layer.size()) for layer in result.cache] == [(60, 16)] * 2
    assert result.times.prefill > 0
    assert result.times.score > 0
    assert result.times.compact > 0


@pytest.mark.parametrize("step", [7, 23, 2048])
def test_a_model_that_calls_mx_fast_itself_is_compacted_and_decodes(step: int) -> None:
    model, tokens = tiny_bare_model(), random_tokens(260)
    result = compact_prompt_cache(model, tokens, budget=48, prefill_step_size=step)
    assert (result.evicted, result.true_offset, result.retained_tokens) == (True, 260, 48)
    assert [(layer.offset, layer.size()) for layer in result.cache] == [(260, 48)] * 2
    weights = [window_weights(q, k, 24) for q, k in attention_inputs(model, tokens)]
    scores = np.asarray(sum(w.sum(axis=(0, 1)) for w in weights))
    assert positions_of(result.cache[0]) == [best(scores, 48, 4, 6)]
    _, logits = greedy(model, result.cache, 5, 6)
    assert np.isfinite(logits).all()
    assert [(layer.offset, layer.size()) for layer in result.cache] == [(266, 54)] * 2


@pytest.mark.parametrize("step", [7, 2048])
def test_a_partly_seen_model_is_scored_over_all_its_layers(step: int) -> None:
    model = PartlySeenModel(seen=[True, False, True], sliding=[False] * 3)
    install()
    result = compact_prompt_cache(
        model, TOKENS, config=config_of("snapkv-d"), prefill_step_size=step
    )
    weights = [window_weights(q, k, 6) for q, k in attention_inputs(model, TOKENS)]
    for some in (weights[1:2], weights[::2]):  # the layers of either kind alone keep others
        assert best(np.asarray(sum(w.sum(axis=(0, 1)) for w in some)), 16, 4, 2) != list(
            result.cache[0].positions
        )
    total = np.asarray(sum(w.sum(axis=(0, 1)) for w in weights))
    assert [list(layer.positions) for layer in result.cache] == [best(total, 16, 4, 2)] * 3


@pytest.mark.parametrize(
    ("length", "budget", "min_tokens"), [(60, 16, 60), (128, 16, 128), (60, 60, 0), (60, 900, 0)]
)
@pytest.mark.parametrize("name", ["snapkv", "snapkv-d"])
def test_short_prompts_are_kept_whole_in_stock_caches(
    name: str, length: int, budget: int, min_tokens: int
) -> None:
    model, tokens = tiny_llama(), random_tokens(length)
    result = compact_prompt_cache(
        model, tokens, config=config_of(name, budget, min_tokens=min_tokens), prefill_step_size=16
    )
    assert (result.evicted, result.kv_layers) == (False, 0)
    assert (result.retained_tokens, result.original_tokens, result.true_offset) == (length,) * 3
    assert result.compact_cache_nbytes == result.exact_cache_nbytes == cache_nbytes(result.cache)
    assert [type(layer) for layer in result.cache] == [KVCache, KVCache]
    assert cache_bytes(result.cache) == cache_bytes(prefilled(model, tokens, 16))


def test_the_seeds_defaults() -> None:
    model = tiny_llama()
    assert not compact_prompt_cache(model, random_tokens(128), budget=16).evicted
    result = compact_prompt_cache(model, random_tokens(129), budget=16)
    (positions,) = positions_of(result.cache[0])
    assert len(positions) == 16
    assert positions[:4] == [0, 1, 2, 3]
    assert positions[-2:] == [127, 128]
    explicit = EvictionConfig(policy="snapkv-d", budget=Budget(16), window=24)
    again = compact_prompt_cache(model, random_tokens(129), config=explicit)
    assert positions_of(again.cache[0]) == [positions]
    replaced = compact_prompt_cache(model, random_tokens(129), budget=20, config=explicit)
    assert replaced.retained_tokens == 20


def test_keywords_reach_the_selection() -> None:
    result = compact_prompt_cache(
        tiny_llama(), TOKENS, budget=16, sink_tokens=2, recent_tokens=9, min_tokens=0, window=6
    )
    (positions,) = positions_of(result.cache[0])
    assert positions[:2] == [0, 1]
    assert positions[-9:] == list(range(51, 60))
    loose = config_of("snapkv-d", guarantee_sinks=False, recent_tokens=0, sink_tokens=16)
    result = compact_prompt_cache(tiny_llama(), TOKENS, config=loose)
    assert len(positions_of(result.cache[0])[0]) == 16
    assert positions_of(result.cache[0])[0] != list(range(16))


@pytest.mark.parametrize("name", CONFIGS)
def test_protected_ranges_stay(name: str) -> None:
    protect = ((20, 26), (24, 29), (57, 400))
    result = compact_prompt_cache(tiny_llama(), TOKENS, config=config_of(name, protect=protect))
    for layer in result.cache:
        for positions in positions_of(layer):
            assert len(positions) == 16
            assert {*range(20, 29), *range(57, 60)} <= {*positions}
            assert positions[:4] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["snapkv", "snapkv-d"])
@pytest.mark.parametrize(
    ("budget", "rows"), [("25%", 15), (0.5, 30), ("1%", 1), (1, 1), ("99%", 59)]
)
def test_shares_and_tiny_budgets(name: str, budget: Any, rows: int) -> None:
    result = compact_prompt_cache(tiny_llama(), TOKENS, config=config_of(name, budget))
    assert (result.retained_tokens, result.true_offset) == (rows, 60)
    assert [layer.size() for layer in result.cache] == [rows, rows]
    assert np.isfinite(greedy(tiny_llama(), result.cache, 5, 3)[1]).all()


@pytest.mark.parametrize("spare", [0, 1, 511])
@pytest.mark.parametrize("name", CONFIGS)
def test_byte_budgets_are_met_from_below(name: str, spare: int) -> None:
    row = 2 * 2 * 2 * 16 * 4
    budget = f"{20 * row + spare}B"
    result = compact_prompt_cache(tiny_llama(), TOKENS, config=config_of(name, budget))
    assert result.compact_cache_nbytes == 20 * row
    assert sum(a.nbytes for layer in result.cache for a in layer.keys_and_values()) == 20 * row


def test_a_byte_budget_is_for_the_whole_cache_of_a_hybrid() -> None:
    model = tiny_model("gemma3_text")
    fixed = 2 * 2 * 16 * 16 * 4  # two sliding layers, K and V, 16 rows of 16 float32
    row = 2 * 2 * 16 * 4
    for budget, rows in ((fixed + 20 * row, 20), (fixed + 21 * row - 1, 20), (fixed + row, 1)):
        result = compact_prompt_cache(
            model, TOKENS, config=config_of("snapkv", f"{budget}B"), prefill_step_size=1
        )
        assert result.retained_tokens == rows
        assert result.compact_cache_nbytes == cache_nbytes(result.cache) == fixed + rows * row


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("name", CONFIGS)
def test_sliding_layers_stay_as_they_are_and_global_ones_are_evicted(
    name: str, model_type: str
) -> None:
    model = tiny_model(model_type)
    exact = prefilled(model, TOKENS, 25)
    result = compact_prompt_cache(model, TOKENS, config=config_of(name), prefill_step_size=25)
    assert (result.kv_layers, result.retained_tokens) == (2, 16)
    for index in (0, 2):
        assert type(result.cache[index]) is RotatingKVCache
        assert repr(cache_bytes([result.cache[index]])) == repr(cache_bytes([exact[index]]))
    assert [result.cache[i].size() for i in (1, 3)] == [16, 16]
    assert np.isfinite(greedy(model, result.cache, 5, 30)[1]).all()
    assert [layer.offset for layer in result.cache] == [90] * 4


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss"])
def test_a_hybrid_that_evicts_nothing_decodes_bit_equal(model_type: str) -> None:
    model = tiny_model(model_type)
    exact = prefilled(model, TOKENS, 25)
    every = LayerSelection((np.arange(60),) * (1 if model_type == "gemma3_text" else 2))
    compact = evict_selection(exact, Selection(60, {1: every, 3: every})).cache
    assert type(compact[1]) is PositionPreservingKVCache
    # Sliding layers are shared between the two lists: one run on each would disturb the other.
    right = greedy(model, prefilled(model, TOKENS, 25), 5, 30)
    tokens, logits = greedy(model, compact, 5, 30)
    assert tokens == right[0]
    np.testing.assert_array_equal(logits, right[1])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gemma2", r"computes attention on its own in 2 of 2 layers"),
        ("kimi_linear", r"adds positional scores to its attention through the mask"),
        ("mamba", r"has no layer with a plain KV cache.*got ArraysCache.*nothing to evict"),
    ],
)
def test_models_that_cannot_be_evicted_are_refused_before_the_prompt_is_computed(
    model_type: str, reason: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, evaluations = tiny_model(model_type), []
    monkeypatch.setattr(mx, "eval", lambda *arrays: evaluations.append(arrays))
    with pytest.raises(UnsupportedModelError, match=rf"'{model_type}'.*{reason}"):
        compact_prompt_cache(model, TOKENS, config=config_of(name))
    assert evaluations == []


@pytest.mark.parametrize("length", [200, 512])  # a buffer with room, and a full one
def test_nothing_holds_the_exact_layers_when_they_are_stored(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = tiny_llama(), []
    exact: list[weakref.ref[Any]] = []

    def storing(layers: list[Any], selection: Selection, store: str) -> Any:
        exact.extend(weakref.ref(layer) for layer in layers)
        return store_selection(layers, selection, store)

    cache = make_prompt_cache(model)
    monkeypatch.setattr(compaction, "store_selection", storing)
    compaction.prefill_and_compact(model, random_tokens(length), cache, config_of("snapkv"))
    assert len(exact) == 2 and [layer() for layer in exact] == [None, None]


def test_at_most_one_layer_exists_twice() -> None:
    rows = 4096
    cache: list[Any] = [KVCache() for _ in range(8)]
    for index in range(8):  # a loop over the layers would go on holding the last one
        cache[index].update_and_fetch(*(mx.random.normal((1, 2, rows, 64)) for _ in "kv"))
    mx.eval([layer.state for layer in cache])
    one_layer = cache[0].nbytes
    kept = LayerSelection((np.arange(0, rows, 2), np.arange(1, rows, 2)))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    store_selection(cache, Selection(rows, dict.fromkeys(range(8), kept)))
    assert mx.get_peak_memory() - before < 1.1 * one_layer
    assert mx.get_active_memory() - before < -3.9 * one_layer


def test_the_exact_cache_can_be_kept_beside_the_compact_one() -> None:
    model = tiny_llama()
    cache = make_prompt_cache(model)
    result = prefill_and_compact(model, TOKENS, cache, config_of("snapkv"), keep_exact=True)
    assert cache_bytes(cache) == cache_bytes(prefilled(model, TOKENS))
    assert [layer.size() for layer in result.cache] == [16, 16]
