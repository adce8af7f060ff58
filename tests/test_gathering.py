"""Accumulators fed by a real prefill, against float64 NumPy over the whole attention matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from bare_models import attention_inputs, cache_bytes, tiny_model
from kvkeep import EvictionConfig, LayerSelection, Selection, evict_selection, get_policy
from kvkeep.attention import Observation, WindowObserver, observed_prefill
from kvkeep.attention.gathering import Gathering, query_heads
from kvkeep.caches import RowGroup, row_groups
from kvkeep.compaction import compact_prompt_cache
from kvkeep.errors import UnsupportedModelError
from kvkeep.policies import Chunk, Policy
from kvkeep.policies.observed_attention import ObservedAttention
from kvkeep.views import layer_view
from oracles import causal_weights, logits_of, prefilled, rotated
from tiny_models import random_tokens, tiny_bare_model, tiny_llama

TOKENS = random_tokens(90)
STEPS = pytest.mark.parametrize("step", [1, 7, 64, 2048])
BASE = 10_000.0


def prefill(
    model: Any, policy: Policy, cache: list[Any], tokens: list[int], step: int = 2048
) -> Observation:
    layers = list(range(len(cache)))
    window = policy.observation_window
    return observed_prefill(
        model, tokens, cache, layers, window=window, policy=policy.name, scorer=policy, step=step
    )


def scores_of(policy: Policy, cache: list[Any], seen: Observation, keep: int = 30) -> np.ndarray:
    """[L, H_kv, T]."""
    rows = []
    for layer, entry in enumerate(cache):
        (group,) = row_groups(entry)
        view = layer_view(group, layer, seen, n_layers=len(cache), keep=keep)
        rows.append(np.asarray(policy.score(view)))
    return np.stack(rows)


def group_mean(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(2, -1, *rows.shape[1:]).mean(axis=1)


def observed(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    weights = causal_weights(queries, keys)
    return group_mean(weights.sum(axis=1) / np.count_nonzero(weights, axis=1).clip(1))


def turned_back(rows: np.ndarray) -> np.ndarray:
    """Rows [H, T, D] of positions 0 … T - 1 before rotation: the inverse of an orthogonal map."""
    length, dim = rows.shape[1:]
    axes = rotated(np.repeat(np.eye(dim)[:, None], length, axis=1), BASE)  # [axis, T, D]
    return np.einsum("htd,atd->hta", rows.astype(np.float64), axes)


def expected(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int = 4
) -> np.ndarray:
    """By the definition: the average logit of a Gaussian query at each position to come."""
    before = turned_back(queries)[:, first:]
    length, dim = keys.shape[1:]
    axes = rotated(np.repeat(np.eye(dim)[:, None], length + 512, axis=1), BASE)
    turn = axes[:, length:].mean(axis=1)
    mean = before.mean(axis=1) @ turn
    logits = []
    for head, rows in enumerate(before):
        spread = turn.T @ np.cov(rows.T, bias=True) @ turn
        key = keys[head // 2, 4:].astype(np.float64)
        logits.append(key @ mean[head] / dim**0.5 + ((key @ spread) * key).sum(-1) / (2 * dim))
    shares = np.exp(np.stack(logits) - np.max(logits, axis=1, keepdims=True))
    shares = group_mean(shares / shares.sum(axis=1, keepdims=True))
    scores = shares * np.linalg.norm(values[:, 4:].astype(np.float64), axis=-1)
    return np.pad(scores, [(0, 0), (4, 0)], constant_values=scores.max() + 1)


def non_causal(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, size: int = 32
) -> np.ndarray:
    length = keys.shape[1]
    mass = np.zeros((4, length))
    for start in range(0, length, size):
        stop = min(start + size, length)
        wide = [np.zeros((4, size, 16)), np.zeros((4, size, 16))]
        wide[0][:, : stop - start] = queries[:, start:stop]
        wide[1][:, : stop - start] = np.repeat(keys[:, start:stop], 2, axis=0)
        weights = np.exp(wide[0] @ wide[1].swapaxes(1, 2))
        weights /= weights.sum(axis=-1, keepdims=True)
        mass[:, start:stop] = weights.sum(axis=1)[:, : stop - start]
    rows = group_mean(mass) * np.linalg.norm(values.astype(np.float64), axis=-1)
    padded = np.pad(rows, [(0, 0), (1, 1)])
    rows = (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3
    return (rows - rows.mean()) / rows.std(ddof=1)


@STEPS
def test_observed_attention_over_the_whole_matrix(step: int) -> None:
    model, policy = tiny_llama(), get_policy("observed_attention")
    cache = make_prompt_cache(model)
    scores = scores_of(policy, cache, prefill(model, policy, cache, TOKENS, step))
    for layer, rows in enumerate(attention_inputs(model, TOKENS)):
        np.testing.assert_allclose(scores[layer], observed(*rows), rtol=2e-4, atol=1e-7)


@STEPS
def test_expected_attention_over_all_queries(step: int) -> None:
    model, policy = tiny_llama(sharpness=1.0), get_policy("expected_attention")
    cache = make_prompt_cache(model)
    scores = scores_of(policy, cache, prefill(model, policy, cache, TOKENS, step))
    for layer, (queries, keys) in enumerate(attention_inputs(model, TOKENS)):
        values = np.asarray(cache[layer].keys_and_values()[1])[0]
        right = expected(queries, keys, values)
        np.testing.assert_allclose(scores[layer], right, rtol=2e-4, atol=1e-6)


@STEPS
def test_non_causal_attention_over_all_blocks(step: int) -> None:
    model = tiny_llama(sharpness=1.0)
    policy = get_policy("non_causal_attn", chunk_size=32)
    cache = make_prompt_cache(model)
    scores = scores_of(policy, cache, prefill(model, policy, cache, TOKENS, step))
    for layer, (queries, keys) in enumerate(attention_inputs(model, TOKENS)):
        values = np.asarray(cache[layer].keys_and_values()[1])[0]
        np.testing.assert_allclose(scores[layer], non_causal(queries, keys, values), atol=2e-4)


@pytest.mark.parametrize("name", ["observed_attention", "expected_attention", "compactor"])
@pytest.mark.parametrize("step", [7, 64])
def test_the_models_rows_keep_their_bits(name: str, step: int) -> None:
    model, policy = tiny_llama(), get_policy(name)
    cache, twin = make_prompt_cache(model), prefilled(model, TOKENS, step)
    prefill(model, policy, cache, TOKENS, step)
    assert cache_bytes(cache) == cache_bytes(twin)
    np.testing.assert_array_equal(logits_of(model, cache, [5, 6]), logits_of(model, twin, [5, 6]))


def test_without_an_accumulator_nothing_is_gathered() -> None:
    for name in ("snapkv", "knorm", "leverage", "kvzip"):
        model, policy = tiny_llama(), get_policy(name)
        seen = prefill(model, policy, make_prompt_cache(model), TOKENS)
        assert seen.gatherings == {}
        assert all(observer.gathering is None for observer in seen.observers.values())


@pytest.mark.parametrize("step", [7, 2048])
def test_a_second_turn_counts_its_own_queries(step: int) -> None:
    model, policy = tiny_llama(), get_policy("observed_attention")
    cache = prefilled(model, TOKENS[:60])
    scores = scores_of(policy, cache, prefill(model, policy, cache, TOKENS[60:], step))
    for layer, (queries, keys) in enumerate(attention_inputs(model, TOKENS)):
        right = observed(queries[:, 60:], keys)
        np.testing.assert_allclose(scores[layer], right, rtol=2e-4, atol=1e-7)


def test_expected_attention_of_a_second_turn() -> None:
    model, policy = tiny_llama(sharpness=1.0), get_policy("expected_attention")
    cache = prefilled(model, TOKENS[:60])
    scores = scores_of(policy, cache, prefill(model, policy, cache, TOKENS[60:], 7))
    for layer, (queries, keys) in enumerate(attention_inputs(model, TOKENS)):
        values = np.asarray(cache[layer].keys_and_values()[1])[0]
        right = expected(queries, keys, values, first=60)
        np.testing.assert_allclose(scores[layer], right, rtol=2e-4, atol=1e-6)


def test_non_causal_attention_of_a_second_turn_scores_its_own_rows() -> None:
    model = tiny_llama(sharpness=1.0)
    policy = get_policy("non_causal_attn", chunk_size=32)
    cache = prefilled(model, TOKENS[:60])
    scores = scores_of(policy, cache, prefill(model, policy, cache, TOKENS[60:], 7))
    assert (scores[..., :60] == 0).all()
    for layer, (queries, keys) in enumerate(attention_inputs(model, TOKENS)):
        values = np.asarray(cache[layer].keys_and_values()[1])[0, :, 60:]
        right = non_causal(queries[:, 60:], keys[:, 60:], values)
        np.testing.assert_allclose(scores[layer][:, 60:], right, atol=2e-4)


@pytest.mark.parametrize("by_head", [False, True])
def test_leverage_of_a_compact_cache_turns_rows_back_from_their_positions(by_head: bool) -> None:
    model, policy = tiny_llama(), get_policy("leverage")
    random = np.random.default_rng(3)
    kept = [np.sort(random.choice(90, 50, replace=False)) for _ in range(2 if by_head else 1)]
    exact = prefilled(model, TOKENS)
    chosen = Selection(90, dict.fromkeys((0, 1), LayerSelection(tuple(kept))))
    compact = evict_selection(exact, chosen).cache
    seen = prefill(model, policy, compact, [1])
    scores = scores_of(policy, compact, seen)
    rope = seen.parts[0].rope
    assert rope is not None
    for layer, entry in enumerate(compact):
        keys = np.asarray(entry.keys_and_values()[0])[0]
        before = turned_back(np.asarray(exact[layer].keys_and_values()[0])[0])
        for head in range(2):
            held = kept[head if by_head else 0]
            mine = np.asarray(rope.unrotate(mx.array(keys[head : head + 1, :50]), held))
            np.testing.assert_allclose(mine[0], before[head, held], atol=2e-5)
        (group,) = row_groups(entry)
        plain = layer_view(group, layer, seen, n_layers=2)
        assert not np.allclose(
            scores[layer], np.asarray(policy.score(replace(plain, positions=None))), atol=1e-2
        )


@pytest.mark.parametrize("heads", [(0,), (1,), (0, 1)])
def test_groups_of_heads_have_accumulators_of_their_own(
    heads: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a layer whose heads hold unequal numbers of rows."""
    random = np.random.default_rng(0)
    queries = mx.array(random.normal(size=(1, 6, 20, 8)).astype(np.float32))
    rows = mx.array(random.normal(size=(2, 30, 8)).astype(np.float32))
    members = np.array(heads)
    group = RowGroup(members, rows[list(heads)], rows[list(heads)], np.arange(30)[None], 2)
    monkeypatch.setattr("kvkeep.attention.gathering.row_groups", lambda cache: (group,))

    class Cache:
        offset = 30

    policy = ObservedAttention()
    observer = WindowObserver(0, gathering=Gathering(policy.accumulator))
    observer.observe(queries, 0.5, "causal", None, Cache())
    assert observer.gathering is not None
    found = np.asarray(observer.gathering.of(group)["attention"])
    whole = policy.accumulator()
    whole.add(Chunk(queries[0], rows, rows, 0.5, 10))
    right = np.asarray(whole.finish()["attention"]).reshape(2, 3, 30)[list(heads)]
    np.testing.assert_allclose(found, right.reshape(-1, 30), rtol=1e-6)
    other = RowGroup(np.array([5]), rows, rows, np.arange(30)[None], 2)
    assert observer.gathering.of(other) == {}
    assert query_heads(queries[0], group).shape == (3 * len(heads), 20, 8)


def test_attention_sinks_share_the_softmax() -> None:
    model = tiny_model("gpt_oss")
    policy = get_policy("observed_attention")
    cache = make_prompt_cache(model)
    full = [i for i, layer in enumerate(cache) if hasattr(layer, "keys_and_values")]
    full = [i for i in full if type(cache[i]).__name__ == "KVCache"]
    seen = observed_prefill(
        model, TOKENS[:12], cache, full, window=0, policy=policy.name, scorer=policy, step=5
    )
    inputs = attention_inputs(model, TOKENS[:12])
    for layer in full:
        (group,) = row_groups(cache[layer])
        scores = policy.score(layer_view(group, layer, seen, n_layers=len(full)))
        queries, keys = (rows.astype(np.float64) for rows in inputs[layer])
        sinks = np.asarray(model.layers[layer].self_attn.sinks, np.float64)
        logits = queries @ np.repeat(keys, 2, axis=0).swapaxes(1, 2) * keys.shape[-1] ** -0.5
        logits[:, np.triu(np.ones((12, 12), bool), 1)] = -np.inf
        weights = np.exp(logits)
        weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks)[:, None, None]
        right = group_mean(weights.sum(axis=1) / np.arange(12, 0, -1))
        np.testing.assert_allclose(np.asarray(scores), right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["observed_attention", "expected_attention", "non_causal_attn", "compactor", "kvzip"]
)
def test_models_that_nobody_sees_are_refused(name: str) -> None:
    config = EvictionConfig(policy=name, budget=20, min_tokens=0)
    for model in (tiny_bare_model(), tiny_model("gemma2")):
        with pytest.raises(UnsupportedModelError, match=f"policy '{name}' cannot see its queries"):
            compact_prompt_cache(model, TOKENS, config=config, prefill_step_size=10)
