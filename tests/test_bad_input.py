"""What bad input gets: a typed error that says what was expected and what came, or the
documented no-op; the caller's cache is unchanged either way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    BatchKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from bare_models import cache_bytes, tiny_model
from kvkeep import (
    Budget,
    EvictionConfig,
    LayerSelection,
    PositionPreservingKVCache,
    Selection,
    compact_prompt_cache,
    evict_prompt_cache,
    evict_selection,
    load_prompt_cache,
    save_prompt_cache,
    snapkv_keep_indices,
    stream_generate,
    topk_indices_per_head,
)
from kvkeep.compaction import prefill_and_compact
from kvkeep.errors import (
    BudgetError,
    CacheError,
    CacheFileError,
    ConfigError,
    KvkeepError,
    PromptError,
    SelectionError,
    TrimError,
    UnsupportedModelError,
)
from oracles import greedy, prefilled
from tiny_models import random_tokens, tiny_llama, tiny_tokenizer

TOKENS = random_tokens(40)


def snapshot(cache: list[Any]) -> list[str]:
    return [repr(layer) for layer in cache_bytes(cache)]


def exact_cache() -> list[Any]:
    return prefilled(tiny_llama(), TOKENS)


def compact_cache() -> list[Any]:
    return evict_prompt_cache(exact_cache(), [0, 1, 20, 39], true_offset=40).cache


def refused(
    cache: list[Any], act: Callable[[list[Any]], Any], error: type[KvkeepError], *parts: str
) -> None:
    """`act` on the cache raises that error with these parts, in order, and changes nothing."""
    before, entries = snapshot(cache), list(cache)
    with pytest.raises(error) as caught:
        act(cache)
    assert type(caught.value) is error
    message, at = str(caught.value), 0
    for part in parts:
        assert part in message[at:], message
        at = message.index(part, at) + len(part)
    assert len(cache) == len(entries)
    assert all(a is b for a, b in zip(cache, entries, strict=True))
    assert snapshot(cache) == before


# -- budgets ---------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, -1, "0", "0%", 0.0, "-3", 1.5, "lots", None, True])
def test_a_budget_below_one_row_or_unreadable(budget: Any) -> None:
    refused(
        make_prompt_cache(tiny_llama()),
        lambda _: compact_prompt_cache(tiny_llama(), TOKENS, budget=budget),
        BudgetError,
        "expected",
        "got",
    )


@pytest.mark.parametrize("budget", [0, -1, 1.5, "8", None, True])
def test_a_budget_of_the_index_functions(budget: Any) -> None:
    for call in (
        lambda: snapkv_keep_indices(300, budget, [0.0] * 300),
        lambda: topk_indices_per_head(np.zeros((2, 300)), budget),
    ):
        with pytest.raises(BudgetError, match=rf">= 1; got {budget!r}"):
            call()


@pytest.mark.parametrize("budget", [40, 41, 10**9, "100%", "1GB"])
@pytest.mark.parametrize("policy", ["snapkv", "snapkv-d"])
def test_a_budget_above_the_prompt_is_a_no_op(policy: str, budget: Any) -> None:
    config = EvictionConfig(policy=policy, budget=Budget.parse(budget), min_tokens=0)
    result = compact_prompt_cache(tiny_llama(), TOKENS, config=config)
    assert (result.evicted, result.retained_tokens) == (False, 40)
    assert [type(layer) for layer in result.cache] == [KVCache, KVCache]
    assert snapshot(result.cache) == snapshot(exact_cache())


@pytest.mark.parametrize("policy", ["snapkv", "snapkv-d"])
@pytest.mark.parametrize("budget", [9, "24%"])
def test_a_budget_below_what_is_protected(policy: str, budget: Any) -> None:
    config = EvictionConfig.parse(
        {"policy": policy, "budget": budget, "min_tokens": 0, "protect": "5:13,30:32"}
    )
    refused(
        make_prompt_cache(tiny_llama()),
        lambda cache: prefill_and_compact(tiny_llama(), TOKENS, cache, config),
        BudgetError,
        "9 rows cannot hold 10 protected positions",
        "at least 10 rows",
        "Raise the budget or protect fewer",
    )


# -- indices ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("indices", "parts"),
    [
        ([3, 1, 2], ("sorted and unique", "got 3 followed by 1 at index 0")),
        ([0, 5, 5], ("sorted and unique", "got 5 followed by 5 at index 1")),
        ([-1, 4], ("negative position", "positions >= 0", "got -1")),
        ([0, 40], ("out of range", "positions below 40", "got 40")),
        ([0, 10**6], ("out of range", "positions below 40", "got 1000000")),
        ([0.0, 1.0], ("unreadable positions", "whole numbers", "float64")),
        ([[0, 1], [2, 3]], ("unreadable positions", "one-dimensional", "2 dimensions")),
        (["0"], ("unreadable positions", "whole numbers")),
    ],
)
@pytest.mark.parametrize("by_layer", [False, True])
def test_bad_indices(indices: Any, parts: tuple[str, ...], by_layer: bool) -> None:
    def evict(cache: list[Any]) -> Any:
        if by_layer:
            kept = LayerSelection((np.array([0, 1]), indices))
            return evict_selection(cache, Selection(40, {1: kept}))
        return evict_prompt_cache(cache, indices, true_offset=40)

    refused(exact_cache(), evict, SelectionError, *parts, ".")


@pytest.mark.parametrize("layer", [-1, 2, 7])
def test_a_selection_of_a_layer_that_is_not_there(layer: int) -> None:
    chosen = Selection(40, {layer: LayerSelection((np.array([0]),))})
    refused(
        exact_cache(),
        lambda cache: evict_selection(cache, chosen),
        SelectionError,
        f"layer {layer} cannot be evicted",
        "filled KVCache layers",
        f"got {layer}",
    )


@pytest.mark.parametrize("heads", [3, 1, 4])
def test_a_selection_that_does_not_fit_the_heads(heads: int) -> None:
    kept = tuple(np.arange(5 + (heads == 1) * head) for head in range(max(heads, 2)))
    chosen = Selection(40, {0: LayerSelection(kept)})
    what = "unequal numbers of rows" if heads == 1 else "does not fit the layer"
    refused(exact_cache(), lambda cache: evict_selection(cache, chosen), CacheError, what)


@pytest.mark.parametrize("offset", [39, 41, 0])
def test_a_wrong_offset(offset: int) -> None:
    refused(
        exact_cache(),
        lambda cache: evict_prompt_cache(cache, [], true_offset=offset),
        CacheError,
        "layer 0",
        f"expected offset {offset}",
        "got offset 40",
    )


# -- scores ----------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("scores", "parts"),
    [
        ([0.5] * 299, ("fewer scores than positions", "at least 300 scores", "got 299")),
        ([], ("fewer scores", "at least 300", "got 0")),
        ([[0.5] * 300], ("wrong shape", "one dimension", "shape (1, 300)")),
        ([0.5] * 299 + [NAN], ("not finite", "1 of 300", "nan", "position 299")),
        ([INF] + [0.5] * 299, ("not finite", "1 of 300", "inf", "position 0")),
        ([-INF] * 300, ("not finite", "300 of 300", "-inf", "position 0")),
        (["a"] * 300, ("unreadable scores", "real numbers")),
    ],
)
def test_bad_scores(scores: Any, parts: tuple[str, ...]) -> None:
    refused([], lambda _: snapkv_keep_indices(300, 16, scores), SelectionError, *parts)


@pytest.mark.parametrize("policy", ["snapkv", "snapkv-d"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_model_whose_scores_are_not_finite(policy: str, bad: float) -> None:
    model = tiny_llama()
    model.layers[1].self_attn.q_proj.weight = model.layers[1].self_attn.q_proj.weight * bad
    config = EvictionConfig(policy=policy, budget=Budget(16), min_tokens=0)
    refused(
        prefilled(tiny_llama(), TOKENS),
        lambda cache: prefill_and_compact(model, TOKENS, cache, config),
        SelectionError,
        "scores are not finite",
        "finite numbers only",
        "got",
    )


# -- prompts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ([], ("empty prompt", "at least one token id", "no tokens")),
        (mx.array([], mx.int32), ("empty prompt", "no tokens")),
        ([[1, 2], [3, 4]], ("unreadable prompt", "flat sequence", "2 dimensions")),
        ([[1, 2], [3]], ("unreadable prompt", "nested")),
        ([1.5, 2.0], ("unreadable prompt", "float64")),
        ([1, -2], ("unreadable prompt", "at least one token id")),
        ("text", ("unreadable prompt", "0 dimensions")),
        (5, ("unreadable prompt", "0 dimensions")),
        (None, ("unreadable prompt", "0 dimensions")),
    ],
)
def test_bad_prompts(prompt: Any, parts: tuple[str, ...]) -> None:
    refused(
        [],
        lambda _: compact_prompt_cache(tiny_llama(), prompt, budget=16),
        PromptError,
        *parts,
    )


@pytest.mark.parametrize("prompt", [[], "", mx.array([], mx.int32)])
def test_an_empty_prompt_to_generate_from(prompt: Any) -> None:
    refused(
        exact_cache(),
        lambda cache: next(
            stream_generate(tiny_llama(), tiny_tokenizer(), prompt, prompt_cache=cache)
        ),
        PromptError,
        "empty prompt",
    )


@pytest.mark.parametrize("policy", ["snapkv", "snapkv-d"])
@pytest.mark.parametrize("min_tokens", [0, 128])
@pytest.mark.parametrize(("length", "budget"), [(1, 1), (2, 1), (2, 2), (5, 3), (8, 4), (9, 1)])
def test_prompts_of_a_few_tokens_shorter_than_the_window(
    length: int, budget: int, min_tokens: int, policy: str
) -> None:
    config = EvictionConfig(
        policy=policy, budget=Budget(budget), min_tokens=min_tokens, window=12
    )
    model = tiny_llama()
    result = compact_prompt_cache(model, TOKENS[:length], config=config)
    evicts = budget < length and not min_tokens
    assert (result.evicted, result.true_offset) == (evicts, length)
    assert result.retained_tokens == (budget if evicts else length)
    assert np.isfinite(greedy(model, result.cache, 5, 3)[1]).all()
    assert [layer.offset for layer in result.cache] == [length + 3] * 2


# -- caches of the wrong kind ----------------------------------------------------------


def quantised_cache() -> list[Any]:
    cache: list[Any] = [QuantizedKVCache(32, 8), QuantizedKVCache(32, 8)]
    for layer in cache:
        layer.update_and_fetch(mx.ones((1, 2, 40, 32)), mx.ones((1, 2, 40, 32)))
    return cache


def batch_of_two() -> list[Any]:
    cache = [KVCache(), KVCache()]
    for layer in cache:
        layer.update_and_fetch(mx.ones((2, 2, 40, 16)), mx.ones((2, 2, 40, 16)))
    return cache


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (quantised_cache, ("layer 0 cannot be evicted", "got QuantizedKVCache", "Evict first")),
        (
            lambda: [a.to_quantized(32, 8) for a in compact_cache_of_32()],
            ("layer 0", "got PositionPreservingQuantizedKVCache", "exact cache"),
        ),
        (compact_cache, ("layer 0", "got PositionPreservingKVCache", "exact cache")),
        (lambda: [exact_cache()[0], compact_cache()[0]], ("layer 1", "PositionPreservingKVCache")),
        (
            lambda: [BatchKVCache.merge([a]) for a in exact_cache()],
            ("layer 0 holds a batch", "cache of one request", "got BatchKVCache", "extract()"),
        ),
        (
            lambda: [PositionPreservingKVCache.merge([a]) for a in compact_cache()],
            ("layer 0 holds a batch", "got BatchPositionPreservingKVCache", "extract()"),
        ),
        (batch_of_two, ("batch where one request is meant", "[1, H_kv, R, D]", "got batch 2")),
    ],
    ids=["quantised", "compact-quantised", "compact", "mixed", "batch", "compact-batch", "B=2"],
)
@pytest.mark.parametrize("by_layer", [False, True])
def test_caches_that_look_evictable_and_are_not(
    make: Callable[[], list[Any]], parts: tuple[str, ...], by_layer: bool
) -> None:
    def evict(cache: list[Any]) -> Any:
        if by_layer:
            return evict_selection(cache, Selection(40, {0: LayerSelection((np.array([0]),))}))
        return evict_prompt_cache(cache, [0, 1], true_offset=40)

    refused(make(), evict, CacheError, *parts)


def compact_cache_of_32() -> list[Any]:
    cache = prefilled(tiny_llama(head_dim=32), TOKENS)
    return evict_prompt_cache(cache, [0, 1], true_offset=40).cache


def test_a_rotating_cache_is_passed_through() -> None:
    cache: list[Any] = [RotatingKVCache(16), RotatingKVCache(16)]
    for layer in cache:
        layer.update_and_fetch(mx.ones((1, 2, 40, 16)), mx.ones((1, 2, 40, 16)))
    before = snapshot(cache)
    result = evict_prompt_cache(cache, [0, 1], true_offset=40)
    assert not result.evicted
    assert all(a is b for a, b in zip(result.cache, cache, strict=True))
    assert snapshot(cache) == before
    chosen = Selection(40, {0: LayerSelection((np.array([0]),))})
    refused(cache, lambda c: evict_selection(c, chosen), SelectionError, "layer 0", "KVCache")


@pytest.mark.parametrize("make", [quantised_cache, batch_of_two], ids=["quantised", "B=2"])
def test_caches_that_cannot_be_continued(make: Callable[[], list[Any]]) -> None:
    refused(
        make(),
        lambda cache: next(
            stream_generate(tiny_llama(), tiny_tokenizer(), TOKENS, prompt_cache=cache)
        ),
        CacheError,
        "expected",
        "got",
    )


# -- files -----------------------------------------------------------------------------


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def foreign(path: Path) -> None:
    mx.save_safetensors(str(path), {"model.weight": mx.ones((3, 3))})


def of_an_unknown_class(path: Path) -> None:
    arrays, metadata = mx.load(str(path), return_metadata=True)  # type: ignore[misc]
    names = {k: "SomeOtherCache" if k.startswith("1.") else v for k, v in metadata.items()}
    mx.save_safetensors(str(path), dict(arrays), names)


def without_an_array(path: Path) -> None:
    arrays, metadata = mx.load(str(path), return_metadata=True)  # type: ignore[misc]
    arrays = {k: v for k, v in dict(arrays).items() if k != "0.2"}
    mx.save_safetensors(str(path), arrays, metadata)


@pytest.mark.parametrize(
    "damage",
    [
        truncated,
        foreign,
        of_an_unknown_class,
        without_an_array,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"not a cache" * 100),
        lambda path: path.unlink(),
    ],
    ids=["truncated", "foreign", "class", "array", "empty", "text", "missing"],
)
def test_a_damaged_or_foreign_file(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    path, cache = tmp_path / "cache.safetensors", compact_cache()
    save_prompt_cache(path, cache, {"model": "tiny"})
    assert snapshot(load_prompt_cache(path)) == snapshot(cache)
    damage(path)
    refused(cache, lambda _: load_prompt_cache(path), CacheFileError, "expected", "got")
    with pytest.raises(CacheFileError, match=r"cache\.safetensors"):
        load_prompt_cache(path)


# -- models ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["snapkv", "snapkv-d"])
@pytest.mark.parametrize("model_type", ["gemma2", "deepseek_v3", "mamba"])
def test_a_model_whose_attention_cannot_be_seen(model_type: str, policy: str) -> None:
    model = tiny_model(model_type)
    config = EvictionConfig(policy=policy, budget=Budget(16), min_tokens=0)
    refused(
        prefilled(model, TOKENS),
        lambda cache: next(
            stream_generate(model, tiny_tokenizer(), TOKENS, config=config, prompt_cache=cache)
        ),
        UnsupportedModelError,
        f"model '{model_type}'",
        "expected",
        "got",
        "Run it with eviction off",
    )


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"policy": "snapkw"}, ("'snapkw'", "one of snapkv", "Did you mean 'snapkv'?")),
        ({"allocation": "unifrom"}, ("allocation", "Did you mean 'uniform'?")),
        ({"pooling": "max"}, ("'snapkv-d' has no option 'pooling'",)),
    ],
)
def test_an_unknown_policy_allocation_or_option(
    settings: dict[str, Any], parts: tuple[str, ...]
) -> None:
    config = EvictionConfig.parse(settings)
    refused(
        exact_cache(),
        lambda cache: prefill_and_compact(tiny_llama(), TOKENS, cache, config),
        ConfigError,
        *parts,
    )


# -- trim ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "parts"),
    [
        (-1, ("negative trim", ">= 0", "got -1")),
        (41, ("more than there is", "at most 40 tokens", "got 41")),
        (1.0, ("unreadable trim", "whole number", "got 1.0")),
        ("3", ("unreadable trim", "whole number", "got '3'")),
        (True, ("unreadable trim", "whole number", "got True")),
    ],
)
@pytest.mark.parametrize("batch", [False, True])
def test_a_trim_of_what_is_not_there(n: Any, parts: tuple[str, ...], batch: bool) -> None:
    cache = compact_cache()
    if batch:
        cache = [PositionPreservingKVCache.merge([layer, layer]) for layer in cache]
    refused(cache, lambda layers: layers[0].trim(n), TrimError, *parts)
