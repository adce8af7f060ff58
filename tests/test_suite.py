"""The suite: scores of a window outside the cache, matched budgets, an input left alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

import kvkeep
from bare_models import attention_inputs, cache_bytes, tiny_model, window_weights
from kvkeep import (
    PositionPreservingKVCache,
    attention_window_scores,
    get_policy,
    pyramid_budgets,
    select_cache,
    select_positions,
)
from kvkeep.policies import POLICIES
from oracles import greedy, logits_of, prefilled
from tiny_models import random_tokens, tiny_llama

T = 90
PROMPT, WINDOW = random_tokens(T), random_tokens(6, seed=5)
FED = {name for name, policy in POLICIES.items() if policy.needs & {"attention", "replay", "draft"}}
NAMES = sorted({"sink_recent", "random", "attention", "pyramid", *POLICIES} - FED)


def positions(cache: list[Any]) -> list[list[list[int]]]:
    """Kept positions by layer and head (one entry where the heads share them)."""
    return [[list(head) for head in layer.head_positions] for layer in cache]


def reference_scores(
    queries: np.ndarray, keys: np.ndarray, kernel: int, pooling: str, sinks: Any = None
) -> np.ndarray:
    """The definition in float64, position by position: [H_kv, T]."""
    (heads, width, dim), (kv_heads, length, _) = queries.shape, keys.shape
    group = heads // kv_heads
    mean = np.zeros((kv_heads, length))
    for head in range(heads):
        for row in range(width):
            logits = keys[head // group].astype(np.float64) @ queries[head, row] * dim**-0.5
            extra = [] if sinks is None else [float(sinks[head])]
            top = max([*logits, *extra])
            weights = np.exp(logits - top)
            total = weights.sum() + sum(np.exp(e - top) for e in extra)
            mean[head // group] += weights / total / (width * group)
    side, out = kernel // 2, np.zeros_like(mean)
    for at in range(length):
        near = [min(max(i, 0), length - 1) for i in range(at - side, at + side + 1)]
        out[:, at] = mean[:, near].max(1) if pooling == "max" else mean[:, near].mean(1)
    return out


# -- scores ---------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "pooling"), [(7, "max"), (7, "avg"), (1, "avg"), (31, "avg")])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_scores_are_the_definition(kernel: int, pooling: str, kv_heads: int) -> None:
    model = tiny_llama(kv_heads=kv_heads, sharpness=2.0)
    scores = attention_window_scores(model, prefilled(model, PROMPT), WINDOW, kernel, pooling)
    assert len(scores) == 2
    inputs = attention_inputs(model, PROMPT + WINDOW)
    for score, (queries, keys) in zip(scores, inputs, strict=True):
        assert (score.shape, score.dtype) == ((kv_heads, T), np.float32)
        expected = reference_scores(queries[:, T:], keys[:, :T], kernel, pooling)
        np.testing.assert_allclose(score, expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_prefix_shorter_than_the_pooling(length: int) -> None:
    model, prompt = tiny_llama(), PROMPT[:length]
    for pooling in ("max", "avg"):
        scores = attention_window_scores(model, prefilled(model, prompt), WINDOW, 7, pooling)
        inputs = attention_inputs(model, prompt + WINDOW)
        for score, (queries, keys) in zip(scores, inputs, strict=True):
            expected = reference_scores(queries[:, length:], keys[:, :length], 7, pooling)
            np.testing.assert_allclose(score, expected, rtol=1e-4, atol=1e-8)


def test_edge_padding_repeats_the_ends() -> None:
    """With zeros around, the first and last averages would be far smaller."""
    model = tiny_llama(sharpness=0.0)  # uniform attention: every mean is 1 / T
    for score in attention_window_scores(model, prefilled(model, PROMPT), WINDOW, 7, "avg"):
        np.testing.assert_allclose(score, 1 / T, rtol=1e-5)


def test_the_windows_own_keys_take_no_share() -> None:
    model = tiny_llama()
    for score in attention_window_scores(model, prefilled(model, PROMPT), WINDOW, 1, "none"):
        np.testing.assert_allclose(score.sum(axis=1), 1, rtol=1e-5)


def test_other_layers_are_left_out_and_attention_sinks_count() -> None:
    model = tiny_model("gpt_oss")
    cache = prefilled(model, PROMPT[:12])
    full = [i for i, layer in enumerate(cache) if type(layer) is KVCache]
    assert 0 < len(full) < len(cache)
    before = cache_bytes(cache)
    scores = attention_window_scores(model, cache, WINDOW[:3])
    assert cache_bytes(cache) == before
    inputs = attention_inputs(model, PROMPT[:12] + WINDOW[:3])
    for score, index in zip(scores, full, strict=True):
        queries, keys = inputs[index]
        sinks = np.asarray(model.layers[index].self_attn.sinks)
        expected = reference_scores(queries[:, 12:], keys[:, :12], 7, "max", sinks)
        np.testing.assert_allclose(score, expected, rtol=1e-3, atol=1e-7)
        bare = reference_scores(queries[:, 12:], keys[:, :12], 7, "max")
        assert np.abs(bare - expected).max() > 1e-3, "the sinks did not matter"


# -- selecting ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", NAMES)
def test_every_policy_keeps_its_count_and_leaves_the_input_alone(policy: str) -> None:
    model = tiny_llama(layers=3)
    cache = prefilled(model, PROMPT)
    before = cache_bytes(cache)
    new, info = select_cache(model, cache, policy, 0.3, WINDOW, window_keep=8)
    assert cache_bytes(cache) == before
    assert [type(layer) for layer in cache] == [KVCache] * 3
    assert not any("_kvkeep_observer" in vars(layer) for layer in cache)
    assert set(info) == {
        "policy", "keep_frac", "T", "keep", "compress_ms", "layer_budgets", "window_tokens"
    }  # fmt: skip
    assert json.loads(json.dumps(info)) == info
    assert (info["policy"], info["keep_frac"], info["T"], info["keep"]) == (policy, 0.3, T, 27)
    assert info["compress_ms"] > 0
    assert sum(info["layer_budgets"]) == 27 * 3
    assert [layer.size() for layer in new] == info["layer_budgets"]
    for layer, kept in zip(new, positions(new), strict=True):
        assert isinstance(layer, PositionPreservingKVCache)
        assert layer.offset == T
        for head in kept:
            assert head == sorted(set(head))
            if policy != "random":
                assert set(range(T - 8, T)) <= set(head)
            if policy not in ("random", "attention", "pyramid"):
                assert head[:4] == [0, 1, 2, 3]
    again, _ = select_cache(model, cache, policy, 0.3, WINDOW, window_keep=8)
    assert cache_bytes(again) == cache_bytes(new)
    logits_of(model, new, WINDOW)  # what happens to the result is not seen in the input
    assert cache_bytes(cache) == before


@pytest.mark.parametrize(
    ("keep_frac", "keep"), [(1e-9, 1), (1 / 90, 1), (0.29, 26), (0.5, 45), (np.float32(0.5), 45)]
)
def test_the_share_rounds_down_to_whole_rows(keep_frac: float, keep: int) -> None:
    model = tiny_llama()
    new, info = select_cache(model, prefilled(model, PROMPT), "sink_recent", keep_frac)
    assert (info["keep"], new[0].size(), info["window_tokens"]) == (keep, keep, 0)


@pytest.mark.parametrize("policy", NAMES)
def test_the_whole_share_is_a_copy_of_the_exact_cache(policy: str) -> None:
    model = tiny_llama()
    cache = prefilled(model, PROMPT)
    new, info = select_cache(model, cache, policy, 1, WINDOW)
    assert (info["keep"], info["layer_budgets"], info["window_tokens"]) == (T, [T, T], 0)
    assert cache_bytes(new) == cache_bytes(cache)
    assert all(a is not b for a, b in zip(new, cache, strict=True))


def test_sink_recent_and_random_are_the_seeds_functions() -> None:
    model = tiny_llama()
    cache = prefilled(model, PROMPT)
    new, _ = select_cache(model, cache, "sink_recent", 0.1, sinks=2)
    assert positions(new) == [[[0, 1, *range(T - 7, T)]]] * 2
    new, _ = select_cache(model, cache, "random", 0.1, seed=3)
    assert positions(new) == [[kvkeep.random_indices(T, 9, 3).tolist()]] * 2
    other, _ = select_cache(model, cache, "random", 0.1, seed=4)
    assert positions(other) != positions(new)


def highest(score: np.ndarray, keep: int, forced: Sequence[int]) -> list[int]:
    """`forced`, then the best of the rest by a plain sort."""
    rest = sorted(set(range(len(score))) - set(forced), key=lambda p: (score[p], p))
    return sorted([*forced, *rest[len(rest) - (keep - len(forced)) :]])


@pytest.mark.parametrize("policy", ["attention", "pyramid"])
def test_attention_keeps_the_best_of_each_head_and_the_last(policy: str) -> None:
    model = tiny_llama(layers=3)
    cache = prefilled(model, PROMPT)
    new, info = select_cache(
        model, cache, policy, 0.3, mx.array(WINDOW), pool_kernel=3, pooling="avg", window_keep=5
    )
    budgets = [27] * 3 if policy == "attention" else pyramid_budgets(27, 3, 5)
    assert (info["layer_budgets"], info["window_tokens"]) == (budgets, 6)
    assert len(set(budgets)) == (1 if policy == "attention" else 3)
    inputs = attention_inputs(model, PROMPT + WINDOW)
    for kept, keep, (queries, keys) in zip(positions(new), budgets, inputs, strict=True):
        scores = reference_scores(queries[:, T:], keys[:, :T], 3, "avg")
        assert kept == [highest(score, keep, range(T - 5, T)) for score in scores]


def test_a_window_beyond_the_budget_shrinks_to_it() -> None:
    model = tiny_llama()
    new, _ = select_cache(model, prefilled(model, PROMPT), "attention", 0.1, WINDOW)
    assert positions(new) == [[list(range(T - 9, T))] * 2] * 2


@pytest.mark.parametrize("keep_frac", [0.45, 0.6, 0.8, 0.95, 0.99])
def test_a_pyramid_wider_than_the_prompt_hands_its_surplus_on(keep_frac: float) -> None:
    model = tiny_llama(layers=4)
    cache = prefilled(model, PROMPT)
    new, info = select_cache(model, cache, "pyramid", keep_frac, WINDOW, window_keep=4)
    budgets = info["layer_budgets"]
    assert sum(budgets) == 4 * info["keep"] == 4 * int(keep_frac * T)
    assert budgets == sorted(budgets, reverse=True)
    assert max(budgets) <= T
    assert [layer.size() for layer in new] == budgets
    if keep_frac >= 0.6:
        assert budgets[0] == T


def test_a_registered_policy_sees_the_window_after_the_prefix() -> None:
    model = tiny_llama(sharpness=2.0)
    cache = prefilled(model, PROMPT)
    policy = get_policy("snapkv", window=4, pooling="none")
    new, info = select_cache(model, cache, policy, 0.3, WINDOW, sinks=2, window_keep=3)
    assert (info["policy"], info["window_tokens"]) == ("snapkv", 6)
    forced = [0, 1, T - 3, T - 2, T - 1]
    inputs = attention_inputs(model, PROMPT + WINDOW)
    for kept, (queries, keys) in zip(positions(new), inputs, strict=True):
        weights = window_weights(queries, keys, 4)[:, :, :T].mean(1)
        scores = weights.reshape(2, 2, T).mean(1)
        assert kept == [highest(score, 27, forced) for score in scores]
    new, _ = select_cache(model, cache, "snapkv-d", 0.3, WINDOW, sinks=2, window_keep=3)
    total = sum(window_weights(q, k, 6)[:, :, :T].sum((0, 1)) for q, k in inputs)
    assert positions(new) == [[highest(np.asarray(total), 27, forced)]] * 2


def test_layers_without_full_attention_are_copied() -> None:
    model = tiny_model("gemma3_text")
    cache = prefilled(model, PROMPT)
    before = cache_bytes(cache)
    new, info = select_cache(model, cache, "attention", 0.3, WINDOW, window_keep=8)
    others = [i for i, layer in enumerate(cache) if type(layer) is not KVCache]
    assert 0 < len(others) == len(cache) - len(info["layer_budgets"])
    after = cache_bytes(new)
    for index in others:
        assert new[index] is not cache[index]
        assert after[index] == before[index]
    greedy(model, new, 3, 20)
    assert cache_bytes(cache) == before


# -- select_positions -----------------------------------------------------------------


@pytest.mark.parametrize(
    "form", [list, tuple, np.array, mx.array], ids=["list", "tuple", "numpy", "mlx"]
)
def test_positions_in_any_form_are_bit_equal_rows(form: Callable[[Any], Any]) -> None:
    model = tiny_llama()
    cache = prefilled(model, PROMPT)
    before = cache_bytes(cache)
    new = select_positions(cache, [form([0, 5, 89]), form([[1, 2], [3, 88]])])
    assert cache_bytes(cache) == before
    assert positions(new) == [[[0, 5, 89]], [[1, 2], [3, 88]]]
    for layer, source in zip(new, cache, strict=True):
        for mine, whole in zip(layer.keys_and_values(), source.keys_and_values(), strict=True):
            heads = layer.head_positions * (2 // len(layer.head_positions))
            right = np.stack([np.asarray(whole)[0, h, list(p)] for h, p in enumerate(heads)])
            np.testing.assert_array_equal(np.asarray(mine)[0], right)
