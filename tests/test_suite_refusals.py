"""The suite refuses what it cannot do, says why, and leaves the cache alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache

from kvkeep import (
    attention_window_scores,
    select_cache,
    select_positions,
)
from kvkeep.errors import (
    BudgetError,
    CacheError,
    ConfigError,
    KvkeepError,
    PromptError,
    SelectionError,
    UnsupportedModelError,
)
from oracles import prefilled
from refusals import compact_cache, expect_refused
from tiny_models import random_tokens, tiny_bare_model, tiny_llama

T = 90
PROMPT, WINDOW = random_tokens(T), random_tokens(6, seed=5)


def empty_cache() -> list[Any]:
    return make_prompt_cache(tiny_llama())


def two_requests() -> list[Any]:
    model = tiny_llama()
    cache = make_prompt_cache(model)
    model(mx.array([PROMPT[:9], PROMPT[9:18]]), cache=cache)
    return cache


def stock_batch() -> list[Any]:
    model = tiny_llama()
    pairs = zip(prefilled(model, PROMPT[:9]), prefilled(model, PROMPT[:5]), strict=True)
    batch = [KVCache.merge(pair) for pair in pairs]
    assert isinstance(batch[0], BatchKVCache)
    return batch


def quantised_cache() -> list[Any]:
    return [layer.to_quantized(32, 8) for layer in prefilled(tiny_llama(head_dim=32), PROMPT)]


def uneven_offsets() -> list[Any]:
    cache = prefilled(tiny_llama(), PROMPT)
    cache[1].trim(3)
    return cache


@pytest.mark.parametrize(
    ("indices", "error", "parts"),
    [
        ([[0, 1]], SelectionError, ("another number of layers", "2 entries", "got 1")),
        ([[0, 1]] * 3, SelectionError, ("another number of layers", "got 3")),
        ([[0, 1], [5, 3]], SelectionError, ("not sorted and unique", "5 followed by 3")),
        ([[0, 1], [5, 5]], SelectionError, ("not sorted and unique",)),
        ([[0, 1], [0, T]], SelectionError, ("out of range in layer 1", "below 90", "got 90")),
        ([[-1, 1], [0, 1]], SelectionError, ("negative position",)),
        ([[0.5], [1.0]], SelectionError, ("unreadable positions", "float64")),
        ([0, 1], SelectionError, ("unreadable positions", "[R], or [H_kv][R]")),
        (None, SelectionError, ("unreadable positions", "NoneType")),
        (["ab", "c"], SelectionError, ("unreadable positions",)),
        ([{0: 1}, {1: 1}], SelectionError, ("unreadable positions",)),
        ([[[[0], [1, 2]]], [[0]]], SelectionError, ("unreadable positions",)),
        ([[[0], [1], [2]], [0]], CacheError, ("does not fit the layer", "2 (KV heads)", "3")),
    ],
)
def test_bad_positions(indices: Any, error: type[KvkeepError], parts: tuple[str, ...]) -> None:
    cache = prefilled(tiny_llama(), PROMPT)
    expect_refused(cache, lambda c: select_positions(c, indices), error, *parts)


BAD_CACHES = pytest.mark.parametrize(
    ("make", "parts"),
    [
        (empty_cache, ("layer 0 is empty", "Run the prompt")),
        (two_requests, ("a batch where one request is meant", "batch 2")),
        (stock_batch, ("layer 0 holds a batch", "BatchKVCache", "extract()")),
        (compact_cache, ("layer 0 cannot be evicted", "PositionPreservingKVCache")),
        (quantised_cache, ("layer 0 cannot be evicted", "QuantizedKVCache")),
        (uneven_offsets, ("different positions", "[87, 90]")),
        (list, ("no layer to select rows from", "no caches")),
    ],
)


def select_with(model: Any, policy: str, cache: list[Any]) -> Any:
    return select_cache(model, cache, policy, 0.5, WINDOW)


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("observed_attention", "attention"),
        ("expected_attention", "attention"),
        ("non_causal_attn", "attention"),
        ("compactor", "attention"),
        ("kvzip", "replay"),
        ("lookahead", "draft"),
    ],
)
def test_policies_that_watch_more_than_a_window(name: str, needs: str) -> None:
    expect_refused(
        prefilled(tiny_llama(), PROMPT),
        lambda c: select_with(tiny_llama(), name, c),
        ConfigError,
        f"{name!r} needs {needs}, which select_cache",
        "compact_prompt_cache",
    )


@BAD_CACHES
def test_bad_caches(make: Callable[[], list[Any]], parts: tuple[str, ...]) -> None:
    model, cache = tiny_llama(), make()
    expect_refused(cache, lambda c: select_positions(c, [[0], [0]]), CacheError, *parts)
    expect_refused(cache, lambda c: attention_window_scores(model, c, WINDOW), CacheError, *parts)
    for policy in ("sink_recent", "attention", "snapkv"):
        expect_refused(cache, partial(select_with, model, policy), CacheError, *parts)


class NeedsMore:
    """A policy that asks for what only a prefill can give."""

    name, needs = "replayed", frozenset({"queries", "replay"})


@pytest.mark.parametrize(
    ("change", "error", "parts"),
    [
        ({"policy": "atention"}, ConfigError, ("unknown policy", "Did you mean 'attention'?")),
        ({"policy": "snapkvd"}, ConfigError, ("unknown policy", "Did you mean 'snapkv")),
        ({"policy": ""}, ConfigError, ("expected one of attention, ", "pyramid, random")),
        ({"policy": 3}, ConfigError, ("unreadable policy", "a name or a Policy", "int")),
        ({"policy": NeedsMore()}, ConfigError, ("'replayed' needs replay", "compact_prompt_cache")),
        ({"keep_frac": 0}, BudgetError, ("keep_frac", "more than 0 and at most 1", "0")),
        ({"keep_frac": -0.5}, BudgetError, ("keep_frac",)),
        ({"keep_frac": 1.01}, BudgetError, ("keep_frac", "1.01")),
        ({"keep_frac": float("nan")}, BudgetError, ("keep_frac", "nan")),
        ({"keep_frac": True}, BudgetError, ("keep_frac", "True")),
        ({"keep_frac": "25%"}, BudgetError, ("keep_frac", "'25%'")),
        ({"window_token_ids": None}, ConfigError, ("'attention' needs window_token_ids",)),
        (
            {"policy": "pyramid", "window_token_ids": None},
            ConfigError,
            ("'pyramid' needs window_token_ids", "'sink_recent' or 'random'"),
        ),
        (
            {"policy": "snapkv", "window_token_ids": None, "keep_frac": 1.0},
            ConfigError,
            ("'snapkv' needs window_token_ids",),
        ),
        ({"window_token_ids": []}, PromptError, ("empty prompt",)),
        ({"window_token_ids": [[1, 2]]}, PromptError, ("unreadable prompt",)),
        ({"pool_kernel": 4}, ConfigError, ("pool_kernel", "odd")),
        ({"pool_kernel": None}, ConfigError, ("pool_kernel",)),
        ({"pooling": "sum"}, ConfigError, ("pooling", "avg, max, none")),
        ({"pooling": None}, ConfigError, ("pooling",)),
        ({"sinks": -1}, ConfigError, ("sinks", "-1")),
        ({"window_keep": 1.5}, ConfigError, ("window_keep", "1.5")),
        ({"seed": -1}, ConfigError, ("seed",)),
    ],
)
def test_bad_settings(
    change: dict[str, Any], error: type[KvkeepError], parts: tuple[str, ...]
) -> None:
    model = tiny_llama()
    cache = prefilled(model, PROMPT)
    setting = {"policy": "attention", "keep_frac": 0.5, "window_token_ids": WINDOW, **change}
    expect_refused(cache, lambda c: select_cache(model, c, **setting), error, *parts)


def test_a_model_that_shows_no_queries_is_refused_where_they_are_needed() -> None:
    model = tiny_bare_model()
    cache = prefilled(model, PROMPT)
    for policy in ("attention", "pyramid", "snapkv"):
        expect_refused(
            cache,
            partial(select_with, model, policy),
            UnsupportedModelError,
            "'bare' computes attention on its own",
        )
    _, info = select_cache(model, cache, "sink_recent", 0.5)
    assert info["layer_budgets"] == [45, 45]
