"""Observers see the model's own window queries, of the right request, and nothing else."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from bare_models import attention_inputs
from kvkeep.attention import (
    Observation,
    WindowObserver,
    model_name,
    observed_prefill,
    observing,
    require_visible,
)
from kvkeep.attention.observe import observer_of
from kvkeep.errors import UnsupportedModelError
from tiny_models import random_tokens, tiny_llama

W = 16


def prefill(model: Any, tokens: list[int], cache: list[Any], step: int = 2048) -> Observation:
    layers = list(range(len(cache)))
    return observed_prefill(model, tokens, cache, layers, window=W, policy="snapkv", step=step)


def queries_of(seen: Observation) -> list[np.ndarray]:
    return [np.asarray(seen.observers[layer].queries)[0] for layer in sorted(seen.observers)]


@pytest.mark.parametrize("step", [1, 3, 7, W - 1, W, W + 1, 64])
@pytest.mark.parametrize("length", [1, W - 1, W, W + 1, 75])
def test_the_window_is_the_models_own_post_rope_queries(length: int, step: int) -> None:
    model, tokens = tiny_llama(), random_tokens(length)
    chunked, whole = attention_inputs(model, tokens, step), attention_inputs(model, tokens)
    seen = queries_of(prefill(model, tokens, make_prompt_cache(model), step))
    for layer, queries in enumerate(seen):
        assert queries.shape == (4, min(W, length), 16)
        np.testing.assert_array_equal(queries, chunked[layer][0][:, -W:])
        np.testing.assert_allclose(queries, whole[layer][0][:, -W:], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("step", [3, 64])
def test_a_second_prefill_sees_the_second_prompt(step: int) -> None:
    model, tokens = tiny_llama(), random_tokens(60)
    cache = make_prompt_cache(model)
    prefill(model, tokens[:40], cache, step)
    seen = queries_of(prefill(model, tokens[40:], cache, step))
    for layer, (queries, _) in enumerate(attention_inputs(model, tokens)):
        np.testing.assert_allclose(seen[layer], queries[:, -W:], atol=2e-5, rtol=2e-5)
    seen = queries_of(prefill(model, [1, 2, 3], cache, step))
    for layer, (queries, _) in enumerate(attention_inputs(model, [*tokens, 1, 2, 3])):
        np.testing.assert_allclose(seen[layer], queries[:, -3:], atol=2e-5, rtol=2e-5)


def test_what_else_an_observer_notes() -> None:
    model = tiny_llama(head_dim=16)
    seen = prefill(model, random_tokens(30), make_prompt_cache(model), 10)
    for observer in seen.observers.values():
        assert observer.scale == pytest.approx(0.25)
        assert observer.sinks is None
        assert (observer.calls, observer.seen) == (3, 30)
        assert not observer.additive_mask


def test_chunks_before_the_window_are_not_held() -> None:
    observer = WindowObserver(window=4, end=20)
    rows = mx.random.normal((1, 2, 8, 4))
    assert observer.observe(rows, 1.0, "causal", None) is rows
    assert observer.observe(rows, 1.0, "causal", None) is rows
    assert observer.queries is None
    last = observer.observe(rows[:, :, :4], 1.0, "causal", None)
    np.testing.assert_array_equal(np.asarray(last), np.asarray(rows[:, :, :4]))
    np.testing.assert_array_equal(np.asarray(observer.queries), np.asarray(rows[:, :, :4]))


def test_where_the_end_is_unknown_the_last_window_is_held_all_along() -> None:
    observer, rows = WindowObserver(window=3), mx.random.normal((1, 1, 10, 2))
    for start in range(0, 10, 2):
        observer.observe(rows[:, :, start : start + 2], 1.0, "causal", None)
        held = np.asarray(observer.queries)
        right = np.asarray(rows[:, :, max(start - 1, 0) : start + 2])
        np.testing.assert_array_equal(held, right)


def test_a_window_of_zero_observes_nothing() -> None:
    observer, rows = WindowObserver(window=0), mx.zeros((1, 1, 3, 2))
    assert observer.observe(rows, 1.0, "causal", None) is rows
    assert observer.queries is None


def test_observers_are_attached_inside_only() -> None:
    cache = [KVCache(), KVCache(), KVCache()]
    with observing(cache, [0, 2], window=W) as observers:
        assert [observer_of(c) for c in cache] == [observers[0], None, observers[2]]
    assert [observer_of(c) for c in cache] == [None, None, None]
    assert all("_kvkeep_observer" not in vars(c) for c in cache)


def test_observers_are_taken_off_after_an_exception() -> None:
    model = tiny_llama()
    cache = make_prompt_cache(model)

    def fail_late(tokens: Any, cache: Any) -> None:
        model(tokens, cache=cache)
        if cache[0].offset > 10:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        observed_prefill(
            fail_late, random_tokens(30), cache, [0, 1], window=W, policy="snapkv", step=8
        )
    assert [observer_of(c) for c in cache] == [None, None]
    with pytest.raises(IndexError), observing(cache, [0, 7], window=W):
        raise AssertionError("layer 7 does not exist")
    assert observer_of(cache[0]) is None


def test_two_threads_prefill_two_requests_at_once() -> None:
    model = tiny_llama()
    prompts = [random_tokens(200, seed=1), random_tokens(200, seed=2)]
    right = [attention_inputs(model, tokens) for tokens in prompts]
    seen: dict[int, list[np.ndarray]] = {}
    errors: list[BaseException] = []
    start = threading.Barrier(2)

    def work(number: int) -> None:
        try:
            with mx.stream(mx.new_stream(mx.default_device())):
                start.wait()
                cache = make_prompt_cache(model)
                seen[number] = queries_of(prefill(model, prompts[number], cache, step=9))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for number in range(2):
        for layer, (queries, _) in enumerate(right[number]):
            np.testing.assert_allclose(seen[number][layer], queries[:, -W:], atol=2e-5, rtol=2e-5)


def peak_bytes(model: Any, tokens: list[int], observed: bool) -> int:
    cache = make_prompt_cache(model)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    if observed:
        seen = prefill(model, tokens, cache, step=1024)
        assert all(o.queries is not None for o in seen.observers.values())
    else:
        for start in range(0, len(tokens), 1024):
            model(mx.array(tokens[start : start + 1024])[None], cache=cache)
            mx.eval([c.state for c in cache])
            mx.clear_cache()
    return mx.get_peak_memory() - before


def test_observing_does_not_keep_the_chunks_queries_alive() -> None:
    # Of one layer, queries take as much as keys and values together: held for all eight
    # layers until the end of a chunk, they would show.
    model = tiny_llama(layers=8, heads=2, kv_heads=1, head_dim=128, hidden=32)
    tokens = random_tokens(2048)
    # The peak varies by when one layer's arrays are freed: the second runs are steadier.
    stock = max(peak_bytes(model, tokens, observed=False) for _ in range(2))
    observed = min(peak_bytes(model, tokens, observed=True) for _ in range(2))
    assert observed <= 1.03 * stock


def observer(**noted: Any) -> WindowObserver:
    made = WindowObserver(window=W)
    made.calls = 1
    for name, value in noted.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("noted", "reason"),
    [
        ({"calls": 0}, r"computes attention on its own in 1 of 2 layers.*none in layers 1"),
        ({"calls": 2}, r"one layer's cache from several layers.*more in layers 1"),
        ({"additive_mask": True}, r"through the mask.*a float mask in layers 1"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(noted: dict[str, Any], reason: str) -> None:
    model = tiny_llama()
    with pytest.raises(UnsupportedModelError, match=rf"model 'llama'.*{reason}.*eviction off"):
        require_visible({0: observer(), 1: observer(**noted)}, model, "snapkv")
    require_visible({0: observer(), 1: observer()}, model, "snapkv")


def test_many_layers_are_not_all_listed() -> None:
    observers = {layer: observer(calls=0) for layer in range(40)}
    with pytest.raises(UnsupportedModelError, match=r"layers 0, 1, 2, 3, 4, 5, … \(40 in all\)"):
        require_visible(observers, tiny_llama(), "snapkv")


@pytest.mark.parametrize(
    ("mask", "additive"),
    [
        (None, False),
        ("causal", False),
        (mx.ones((3, 3), mx.bool_), False),
        (mx.zeros((3, 3)), True),
        (mx.zeros((3, 3), mx.float16), True),
    ],
)
def test_only_a_float_mask_counts_as_additive(mask: Any, additive: bool) -> None:
    made = WindowObserver(window=W)
    made.observe(mx.zeros((1, 1, 3, 4)), 1.0, mask, None)
    assert made.additive_mask is additive


def test_the_name_of_a_model() -> None:
    assert model_name(tiny_llama()) == "llama"
    assert model_name(type("Mine", (), {"model_type": "mine"})()) == "mine"
    assert model_name(type("Mine", (), {})()) == "Mine"
