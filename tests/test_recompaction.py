"""Compacting a cache that goes on: later turns, and what is left after a refusal."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

import kvkeep
from bare_models import cache_bytes
from kvkeep import EvictionConfig
from kvkeep.compaction import prefill_and_compact
from kvkeep.errors import (
    BudgetError,
    CacheError,
    KvkeepError,
    SelectionError,
    UnsupportedModelError,
)
from kvkeep.evictable import full_attention_layers
from oracles import logits_of, numpy_llama, prefilled
from tiny_models import random_tokens, tiny_bare_model, tiny_llama
from zoo import build

FIRST, SECOND = random_tokens(60, seed=1), random_tokens(30, seed=2)
POLICIES = ["snapkv", "snapkv-d"]


def config_of(policy: str = "snapkv", **settings: Any) -> EvictionConfig:
    return EvictionConfig.parse(
        {"policy": policy, "budget": 24, "window": 6, "min_tokens": 0, **settings}
    )


def compacted(model: Any, config: EvictionConfig, tokens: list[int] = FIRST) -> list[Any]:
    cache = make_prompt_cache(model)
    prefill_and_compact(model, tokens, cache, config)
    return cache


def heads_of(layer: Any) -> list[np.ndarray]:
    heads = [np.array(head, int) for head in layer.head_positions]
    return heads if len(heads) == 2 else heads * 2


@pytest.mark.parametrize("step", [4, 2048])
@pytest.mark.parametrize(
    "settings",
    [{}, {"policy": "snapkv-d"}, {"store": "shared"}, {"budget": "30%"}, {"pooling": "max"}],
    ids=repr,
)
def test_a_second_turn_is_compacted_exactly(settings: dict[str, Any], step: int) -> None:
    model, config = tiny_llama(), config_of(**settings)
    cache = compacted(model, config)
    after_first = [heads_of(layer) for layer in cache]
    result = prefill_and_compact(model, SECOND, cache, config, step=step)
    after_second = [heads_of(layer) for layer in cache]
    keep = config.limit.rows(90)
    assert (result.evicted, result.true_offset, result.retained_tokens) == (True, 90, keep)
    assert result.cache is cache
    mask = np.zeros((2, 2, 93, 93), bool)
    for layer in range(2):
        for head in range(2):
            first, second = after_first[layer][head], after_second[layer][head]
            assert len(second) == keep
            held = {*first.tolist(), *range(60, 90)}
            assert {*second.tolist()} <= held
            assert second[:4].tolist() == [0, 1, 2, 3]
            recent = 6 if config.policy == "snapkv" else keep // 8
            assert second[-recent:].tolist() == list(range(90 - recent, 90))
            mask[layer, head] = np.tril(np.ones((93, 93), bool))
            mask[layer, head, 60:90, :60] &= np.isin(np.arange(60), first)
            mask[layer, head, 90:, :90] &= np.isin(np.arange(90), second)
    right = numpy_llama(model, [*FIRST, *SECOND, 5, 6, 7], mask)[90:]
    np.testing.assert_allclose(logits_of(model, cache, [5, 6, 7]), right, rtol=1e-4, atol=1e-4)


def test_rows_of_a_second_turn_are_bit_equal_to_those_before_it() -> None:
    model, config = tiny_llama(), config_of()
    cache, twin = compacted(model, config), compacted(model, config)
    prefill_and_compact(model, SECOND, cache, config)
    logits_of(model, twin, SECOND)
    for layer, whole in zip(cache, twin, strict=True):
        for head in range(2):
            rows = np.searchsorted(whole.head_positions[head], layer.head_positions[head])
            for ours, theirs in zip(layer.keys_and_values(), whole.keys_and_values(), strict=True):
                np.testing.assert_array_equal(
                    np.asarray(ours[0, head]), np.asarray(theirs[0, head])[rows]
                )


@pytest.mark.parametrize("policy", POLICIES)
def test_protected_positions_outlive_every_turn(policy: str) -> None:
    config = config_of(policy, budget=20, protect="10:18,61:66", recent_tokens=7)
    model = tiny_llama()
    cache = compacted(model, config)
    for turn in range(3):
        prefill_and_compact(model, random_tokens(30, seed=turn), cache, config)
        for layer in cache:
            for head in heads_of(layer):
                assert len(head) == 20
                assert {*range(10, 18), *range(61, 66)} <= {*head.tolist()}


def test_a_range_protected_late_keeps_what_each_head_still_has_of_it() -> None:
    model = tiny_llama()
    cache = compacted(model, config_of())
    before = [heads_of(layer) for layer in cache]
    counts = {len(np.intersect1d(h, range(20, 40))) for layer in before for h in layer}
    assert len(counts) > 1, "the heads should differ, else this shows nothing"
    prefill_and_compact(model, SECOND, cache, config_of(protect="20:40"))
    for layer, heads in zip(cache, before, strict=True):
        for head, held in zip(heads_of(layer), heads, strict=True):
            kept = np.intersect1d(head, range(20, 40))
            np.testing.assert_array_equal(kept, np.intersect1d(held, range(20, 40)))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_turn_that_still_fits_evicts_nothing_more(policy: str) -> None:
    model = tiny_llama()
    cache, twin = (compacted(model, config_of(policy)) for _ in range(2))
    result = prefill_and_compact(model, SECOND, cache, config_of(policy, budget=54))
    logits_of(model, twin, SECOND)
    assert (result.evicted, result.retained_tokens) == (True, 54)  # rows of the first turn
    assert (result.kv_layers, result.true_offset) == (0, 90)
    assert [layer.size() for layer in cache] == [54, 54]
    assert [repr(c) for c in cache_bytes(cache)] == [repr(c) for c in cache_bytes(twin)]


def test_a_captured_model_goes_on_too() -> None:
    model, config = tiny_bare_model(), config_of("snapkv-d")
    cache = compacted(model, config)
    result = prefill_and_compact(model, SECOND, cache, config, step=7)
    assert (result.retained_tokens, result.true_offset) == (24, 90)
    assert cache[0].positions == cache[1].positions
    assert cache[0].positions[:4] == (0, 1, 2, 3)


# -- refusals --------------------------------------------------------------------------


def expect_refused(
    model: Any, cache: list[Any], config: EvictionConfig, error: type[KvkeepError], text: str
) -> None:
    """The call is refused, and neither the list nor a layer of it is changed."""
    before, entries = [repr(c) for c in cache_bytes(cache)], list(cache)
    with pytest.raises(error, match=text):
        prefill_and_compact(model, SECOND, cache, config, step=8)
    assert all(a is b for a, b in zip(cache, entries, strict=True))
    assert [repr(c) for c in cache_bytes(cache)] == before


def no_forward(*_: Any, **__: Any) -> Any:
    raise AssertionError("the prompt was computed")


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({}, {"store": "shared"}, "store 'shared' keeps one set of rows for all heads"),
        ({}, {"policy": "snapkv-d"}, "policy 'snapkv-d' keeps one set of rows for the whole"),
        ({"store": "shared"}, {"policy": "snapkv-d"}, "policy 'snapkv-d' keeps one set"),
    ],
    ids=repr,
)
def test_one_set_of_rows_for_all_is_refused_where_rows_differ_already(
    first: dict[str, Any], second: dict[str, Any], text: str
) -> None:
    cache = compacted(tiny_llama(), config_of(**first))
    expect_refused(no_forward, cache, config_of(**second), CacheError, text)


@pytest.mark.parametrize("store", ["auto", "ragged", "union"])
def test_heads_left_uneven_by_a_trim_are_compacted_again(store: str) -> None:
    model = tiny_llama()
    cache = compacted(model, config_of())
    for layer in cache:
        layer.trim(20)
    assert not cache[0]._ledger.even
    held = [[{*head} for head in layer.head_positions] for layer in cache]
    offset = cache[0].offset
    result = prefill_and_compact(model, SECOND, cache, config_of(budget=8, store=store))
    assert result.true_offset == offset + len(SECOND)
    for layer, before in zip(result.cache, held, strict=True):
        heads = layer.head_positions  # one entry where all heads hold the same
        for head, had in zip(heads * (len(before) // len(heads)), before, strict=True):
            assert len(head) == 8
            assert {*head} <= had | {*range(offset, offset + len(SECOND))}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (config_of(protect="0:20,30:35"), r"24 rows cannot hold 25 protected.*at least 25 rows"),
        (config_of(budget="30%", protect="0:29"), r"27 rows cannot hold 29 protected.*30% of 90"),
    ],
)
def test_a_budget_below_what_is_protected_is_refused_before_the_prompt_is_computed(
    config: EvictionConfig, text: str
) -> None:
    expect_refused(no_forward, prefilled(tiny_llama(), FIRST), config, BudgetError, text)


def test_protection_that_is_not_needed_is_no_reason_to_refuse() -> None:
    config = config_of(budget=100, protect="0:1000")
    assert not prefill_and_compact(
        tiny_llama(), SECOND, prefilled(tiny_llama(), FIRST), config
    ).evicted


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        (config_of(budget="10B"), BudgetError, r"holds no row; expected at least 512 bytes"),
        (
            config_of(budget="6KB", protect="0:50"),
            BudgetError,
            r"11 rows cannot hold the \d+ protected",
        ),
    ],
)
@pytest.mark.parametrize("compact", [False, True])
def test_what_only_shows_after_the_prefill_leaves_the_cache_as_it_was(
    compact: bool, config: EvictionConfig, error: type[KvkeepError], text: str
) -> None:
    model = tiny_llama()
    cache = compacted(model, config_of(budget=40)) if compact else prefilled(model, FIRST)
    expect_refused(model, cache, config, error, text)
    expect_refused(model, cache, config, error, text)  # and it can be tried again


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("model_type", ["gemma2", "kimi_linear"])
def test_a_model_that_cannot_be_seen_leaves_the_cache_as_it_was(
    model_type: str, filled: bool
) -> None:
    model = build(model_type)
    cache = prefilled(model, FIRST) if filled else make_prompt_cache(model)
    expect_refused(model, cache, config_of(), UnsupportedModelError, model_type)
    if not filled:
        assert all(layer.empty() for layer in cache)


def test_scores_that_are_not_finite_leave_every_layer_as_it_was() -> None:
    model = tiny_llama()
    cache = prefilled(model, FIRST)
    model.layers[1].self_attn.q_proj.weight = model.layers[1].self_attn.q_proj.weight * mx.nan
    expect_refused(model, cache, config_of(), SelectionError, "scores are not finite")


def test_a_sliding_layer_is_put_back_too() -> None:
    model = tiny_llama(sliding_layers=[0], sliding_window=16)
    cache = prefilled(model, FIRST, 1)  # one by one: the window is written in place
    expect_refused(model, cache, config_of(budget="10B"), BudgetError, "holds no row")
    np.testing.assert_array_equal(
        logits_of(model, cache, [1]), logits_of(model, prefilled(model, FIRST, 1), [1])
    )


def test_a_failing_callback_leaves_the_cache_as_it_was() -> None:
    model = tiny_llama()
    cache, twin = compacted(model, config_of()), compacted(model, config_of())

    def stop(done: int, total: int) -> None:
        if done > 10:
            raise RuntimeError("cancelled")

    with pytest.raises(RuntimeError, match="cancelled"):
        prefill_and_compact(model, SECOND, cache, config_of(), step=8, progress=stop)
    assert [repr(c) for c in cache_bytes(cache)] == [repr(c) for c in cache_bytes(twin)]


def test_layers_at_different_positions_are_refused() -> None:
    model = tiny_llama()
    cache = prefilled(model, FIRST)
    cache[1].trim(3)
    expect_refused(model, cache, config_of(), CacheError, r"layer 1.*offset 90; got offset 87")


def test_quantised_and_batched_layers_are_refused() -> None:
    model = tiny_llama(head_dim=32)
    compact = compacted(model, config_of())
    quantised = [layer.to_quantized(group_size=32, bits=8) for layer in compact]
    batch = [KVCache.merge([a]) for a in prefilled(model, FIRST)]
    mixed = [kvkeep.PositionPreservingKVCache.merge([a]) for a in compact]
    for cache in (quantised, batch, mixed):
        with pytest.raises(CacheError, match=type(cache[0]).__name__):
            full_attention_layers(model, cache)
