"""What caches, files and models that cannot be evicted get: a typed error or the documented
no-op; the caller's cache is unchanged either way."""

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
)

from bare_models import tiny_model
from kvkeep import (
    Budget,
    EvictionConfig,
    LayerSelection,
    PositionPreservingKVCache,
    Selection,
    evict_prompt_cache,
    evict_selection,
    load_prompt_cache,
    save_prompt_cache,
    stream_generate,
)
from kvkeep.compaction import prefill_and_compact
from kvkeep.errors import (
    CacheError,
    CacheFileError,
    ConfigError,
    SelectionError,
    TrimError,
    UnsupportedModelError,
)
from oracles import prefilled
from refusals import TOKENS, compact_cache, exact_cache, expect_refused, snapshot
from tiny_models import tiny_llama, tiny_tokenizer


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

    expect_refused(make(), evict, CacheError, *parts)


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
    expect_refused(
        cache, lambda c: evict_selection(c, chosen), SelectionError, "layer 0", "KVCache"
    )


@pytest.mark.parametrize("make", [quantised_cache, batch_of_two], ids=["quantised", "B=2"])
def test_caches_that_cannot_be_continued(make: Callable[[], list[Any]]) -> None:
    expect_refused(
        make(),
        lambda cache: next(
            stream_generate(tiny_llama(), tiny_tokenizer(), TOKENS, prompt_cache=cache)
        ),
        CacheError,
        "expected",
        "got",
    )


# -- files -----------------------------------------------------------------------------


def parts_of(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    arrays, metadata = mx.load(str(path), return_metadata=True)
    return dict(arrays), metadata  # type: ignore[arg-type,return-value]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def foreign(path: Path) -> None:
    mx.save_safetensors(str(path), {"model.weight": mx.ones((3, 3))})


def of_an_unknown_class(path: Path) -> None:
    arrays, metadata = parts_of(path)
    names = {k: "SomeOtherCache" if k.startswith("1.") else v for k, v in metadata.items()}
    mx.save_safetensors(str(path), arrays, names)


def without_an_array(path: Path) -> None:
    arrays, metadata = parts_of(path)
    del arrays["0.2"]
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
    expect_refused(cache, lambda _: load_prompt_cache(path), CacheFileError, "expected", "got")
    with pytest.raises(CacheFileError, match=r"cache\.safetensors"):
        load_prompt_cache(path)


# -- models ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["snapkv", "snapkv-d"])
@pytest.mark.parametrize("model_type", ["gemma2", "kimi_linear", "mamba"])
def test_a_model_whose_attention_cannot_be_seen(model_type: str, policy: str) -> None:
    model = tiny_model(model_type)
    config = EvictionConfig(policy=policy, budget=Budget(16), min_tokens=0)
    expect_refused(
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
        ({"policy": "snapkw"}, ("'snapkw'", "one of cake", "Did you mean 'snapkv'?")),
        ({"allocation": "unifrom"}, ("allocation", "Did you mean 'uniform'?")),
        ({"pooling": "max"}, ("'snapkv-d' has no option 'pooling'",)),
    ],
)
def test_an_unknown_policy_allocation_or_option(
    settings: dict[str, Any], parts: tuple[str, ...]
) -> None:
    config = EvictionConfig.parse(settings)
    expect_refused(
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
    expect_refused(cache, lambda layers: layers[0].trim(n), TrimError, *parts)
