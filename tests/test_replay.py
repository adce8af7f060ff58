"""Replay sees what observing saw, and leaves the cache as it found it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvkeep
from bare_models import attention_inputs, cache_bytes, tiny_model
from kvkeep.attention import observed_prefill, replay_queries
from kvkeep.attention.observe import observer_of
from kvkeep.errors import CacheError, PromptError, UnsupportedModelError
from oracles import logits_of, prefilled
from tiny_models import random_tokens, tiny_llama

TOKENS = random_tokens(90)


def replay(model: Any, cache: list[Any], width: int, layers: list[int] | None = None) -> Any:
    layers = list(range(len(cache))) if layers is None else layers
    return replay_queries(model, cache, TOKENS[-width:], layers, policy="snapkv")


@pytest.mark.parametrize("width", [1, 8, 24, 89, 90])
@pytest.mark.parametrize("step", [7, 2048])
def test_replay_gives_the_queries_that_observing_gives(step: int, width: int) -> None:
    model = tiny_llama()
    cache = make_prompt_cache(model)
    seen = observed_prefill(
        model, TOKENS, cache, [0, 1], window=width, policy="snapkv", step=step
    ).observers
    again = replay(model, cache, width)
    for layer, (queries, _) in enumerate(attention_inputs(model, TOKENS)):
        replayed = np.asarray(again[layer].queries)
        np.testing.assert_allclose(replayed, np.asarray(seen[layer].queries), rtol=0, atol=3e-5)
        np.testing.assert_allclose(replayed[0], queries[:, -width:], rtol=0, atol=3e-5)
        assert again[layer].scale == seen[layer].scale


@pytest.mark.parametrize("width", [1, 8, 90])
@pytest.mark.parametrize("step", [7, 2048])
def test_the_cache_is_bit_equal_before_and_after(step: int, width: int) -> None:
    model = tiny_llama()
    cache, twin = prefilled(model, TOKENS, step), prefilled(model, TOKENS, step)
    replay(model, cache, width)
    assert cache_bytes(cache) == cache_bytes(twin)
    np.testing.assert_array_equal(logits_of(model, cache, [1, 2]), logits_of(model, twin, [1, 2]))
    assert all(observer_of(layer) is None for layer in cache)


def other_caches(kind: str) -> tuple[Any, list[Any], list[int]]:
    """A model, a cache list that is not all plain `KVCache`, and the layers to observe."""
    if kind == "sliding":  # not yet full: it can still be trimmed
        model = tiny_llama(sliding_layers=[0], sliding_window=128)
        return model, prefilled(model, TOKENS, 40), [1]
    model = tiny_llama(head_dim=32)
    config = kvkeep.EvictionConfig(policy="snapkv", budget=kvkeep.Budget(20), min_tokens=0)
    cache = kvkeep.compact_prompt_cache(model, TOKENS[:-5], config=config).cache
    logits_of(model, cache, TOKENS[-5:])
    if kind == "quantised":
        cache[0] = cache[0].to_quantized(group_size=32, bits=8)
    return model, cache, [1]


@pytest.mark.parametrize("width", [3, 5, 8])  # of the last 8 tokens, 3 come before the appended
@pytest.mark.parametrize("kind", ["sliding", "compact", "quantised"])
def test_other_layers_are_put_back_too(kind: str, width: int) -> None:
    model, cache, layers = other_caches(kind)
    _, twin, _ = other_caches(kind)
    objects = list(cache)
    seen = replay(model, cache, width, layers)
    assert seen[1].queries.shape[2] == width
    assert all(a is b for a, b in zip(cache, objects, strict=True))
    assert [repr(c) for c in cache_bytes(cache)] == [repr(c) for c in cache_bytes(twin)]
    np.testing.assert_array_equal(logits_of(model, cache, [1, 2]), logits_of(model, twin, [1, 2]))


@pytest.mark.parametrize("when", ["first", "last"])
def test_a_failing_model_leaves_the_cache_as_it_was(when: str) -> None:
    model = tiny_llama()
    cache, twin = prefilled(model, TOKENS), prefilled(model, TOKENS)

    def failing(tokens: mx.array, cache: list[Any]) -> None:
        if when == "last":
            model(tokens, cache=cache)
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        replay(failing, cache, 8)
    assert cache_bytes(cache) == cache_bytes(twin)
    assert all(observer_of(layer) is None for layer in cache)


@pytest.mark.parametrize("width", [0, 91])
def test_windows_that_the_cache_does_not_hold_are_refused(width: int) -> None:
    model = tiny_llama()
    cache, twin = prefilled(model, TOKENS), prefilled(model, TOKENS)
    tokens = [0] * width
    with pytest.raises(PromptError, match=rf"between 1 and 90 tokens.*got {width} tokens"):
        replay_queries(model, cache, tokens, [0, 1], policy="snapkv")
    assert cache_bytes(cache) == cache_bytes(twin)


def test_layers_that_cannot_be_trimmed_are_refused_by_name() -> None:
    model = tiny_model("gemma3_text")  # its sliding windows of 16 are full
    cache, twin = prefilled(model, TOKENS), prefilled(model, TOKENS)
    with pytest.raises(CacheError, match=r"got RotatingKVCache.*Observe during the prefill"):
        replay(model, cache, 8, [1, 3])
    assert [repr(c) for c in cache_bytes(cache)] == [repr(c) for c in cache_bytes(twin)]


def test_a_model_that_cannot_be_seen_is_refused_with_its_cache_unchanged() -> None:
    model = tiny_model("gemma2")
    cache, twin = prefilled(model, TOKENS), prefilled(model, TOKENS)
    with pytest.raises(UnsupportedModelError, match="'gemma2'"):
        replay(model, cache, 8)
    assert cache_bytes(cache) == cache_bytes(twin)


def test_replay_copies_only_the_window_of_a_plain_cache() -> None:
    model = tiny_llama(layers=1, heads=1, kv_heads=1, head_dim=128, hidden=32)
    tokens = random_tokens(12_000)
    cache = make_prompt_cache(model)
    rows = mx.random.normal((1, 1, len(tokens), 128))
    cache[0].update_and_fetch(rows, rows)
    mx.eval(cache[0].state)
    held = cache[0].nbytes
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    replay_queries(model, cache, tokens[-8:], [0], policy="snapkv")
    # The model reads all rows; a second copy of the keys alone would be half of `held`.
    assert mx.get_peak_memory() - before < held / 4
