"""Policies against numbers that kvpress produced, against NumPy, and their registry."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import kvkeep.policies.grouping as grouping_module
from golden import assert_same_rows, golden, scores_of
from kvkeep import EvictionConfig, LayerView, get_policy
from kvkeep.errors import ConfigError
from kvkeep.policies import SnapKV, SnapKVD, policy_of, pooled


def random_view(
    length: int, window: int, *, heads: int = 4, kv_heads: int = 2, dim: int = 8, **more: Any
) -> LayerView:
    random = np.random.default_rng(length + window)
    keys = mx.array(random.normal(size=(kv_heads, length, dim)).astype(np.float32))
    queries = mx.array(2 * random.normal(size=(heads, window, dim)).astype(np.float32))
    return LayerView(keys, keys, queries, dim**-0.5, layer=0, n_layers=1, **more)


def window_softmax(view: LayerView) -> np.ndarray:
    """Float64 weights [H_q, W, T], row by row."""
    assert view.queries is not None
    keys, queries = np.asarray(view.keys, np.float64), np.asarray(view.queries, np.float64)
    heads, window, _ = queries.shape
    length = keys.shape[1]
    weights = np.zeros((heads, window, length))
    for head in range(heads):
        for row in range(window):
            seen = length - window + row + 1
            logits = keys[head // (heads // len(keys)), :seen] @ queries[head, row] * view.scale
            logits = np.exp(logits - logits.max())
            weights[head, row, :seen] = logits / logits.sum()
    return weights


def slow_pool(scores: np.ndarray, kernel: int, kind: str) -> np.ndarray:
    out = np.empty_like(scores)
    for at in range(scores.shape[1]):
        near = scores[:, max(at - kernel // 2, 0) : at + kernel // 2 + 1]
        out[:, at] = near.max(1) if kind == "max" else near.sum(1) / kernel
    return out


@pytest.mark.parametrize("window", [16, 64])
def test_snapkv_gives_the_scores_of_kvpress(window: int) -> None:
    expected = golden(f"snapkv_w{window}_T200")["scores"]
    np.testing.assert_allclose(scores_of(SnapKV(window, pool_kernel=5)), expected, rtol=1e-4)


@pytest.mark.parametrize(("window", "exact"), [(16, 23), (64, 12)])
def test_snapkv_keeps_what_kvpress_keeps(window: int, exact: int) -> None:
    scores = scores_of(SnapKV(window, pool_kernel=5))
    assert assert_same_rows(f"snapkv_w{window}_T200", scores, recent=window) == exact


@pytest.mark.parametrize("pooling", ["avg", "max", "none"])
@pytest.mark.parametrize("kernel", [1, 5, 31])
def test_snapkv_pools_before_it_takes_the_mean_of_the_group(pooling: str, kernel: int) -> None:
    view = random_view(90, 7, heads=6, kv_heads=2)
    mean = window_softmax(view).mean(axis=1)[:, :83]
    right = mean if pooling == "none" else slow_pool(mean, kernel, pooling)
    right = right.reshape(2, 3, 83).mean(axis=1)
    scores = np.asarray(SnapKV(7, kernel, pooling).score(view))
    np.testing.assert_allclose(scores[:, :83], right, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(scores[:, 83:], right.max() + 1, rtol=1e-6)
    if pooling == "max" and kernel > 1:
        swapped = slow_pool(mean.reshape(2, 3, 83).mean(axis=1), kernel, "max")
        assert np.abs(scores[:, :83] - swapped).max() > 1e-3  # the order matters here


def test_snapkv_scores_a_few_heads_at_a_time_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    view = random_view(120, 5, heads=10, kv_heads=5)
    whole = np.asarray(SnapKV(5, 7).score(view))
    monkeypatch.setattr(grouping_module, "PIECE_BYTES", 16 * 2 * 120 * 2)  # two heads of five
    np.testing.assert_array_equal(np.asarray(SnapKV(5, 7).score(view)), whole)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_snapkv_d_sums_over_the_window_and_the_group(kv_heads: int) -> None:
    view = random_view(60, 11, heads=4, kv_heads=kv_heads)
    scores = np.asarray(SnapKVD(11).score(view))
    expected = window_softmax(view).sum(axis=1).reshape(kv_heads, -1, 60).sum(axis=1)
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-7)
    assert scores.sum() == pytest.approx(4 * 11, rel=1e-5)  # every query spends 1


@pytest.mark.parametrize("policy", [SnapKV(window=8), SnapKVD(window=8)])
@pytest.mark.parametrize("length", [8, 9, 1])
def test_prompts_no_longer_than_the_window_are_scored(policy: Any, length: int) -> None:
    scores = np.asarray(policy.score(random_view(length, min(8, length))))
    assert scores.shape == (2, length)
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("policy", [SnapKV(window=8), SnapKVD(window=8)])
def test_queries_that_do_not_fit_are_refused(policy: Any) -> None:
    view = random_view(20, 8)
    for queries, what in ((None, "no window queries"), (mx.zeros((4, 21, 8)), "do not fit")):
        other = LayerView(view.keys, view.values, queries, view.scale, layer=0, n_layers=1)
        with pytest.raises(ConfigError, match=what):
            policy.score(other)


def test_default_recent_windows() -> None:
    assert SnapKV(window=12).default_recent(5) == 12
    assert [SnapKVD().default_recent(budget) for budget in (1, 8, 80)] == [1, 1, 10]


def test_options_reach_the_policy_and_none_leaves_its_default() -> None:
    assert get_policy("snapkv", window=16, pool_kernel=None) == SnapKV(window=16)
    config = EvictionConfig(policy="snapkv", window=3, pooling="max")
    assert policy_of(config) == SnapKV(window=3, pooling="max")
    assert policy_of(EvictionConfig()) == SnapKVD(window=24)


def test_an_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'snap-kv'.*one of .*snapkv.*Did you mean 'snapkv"):
        get_policy("snap-kv")
    with pytest.raises(ConfigError, match="expected one of"):
        get_policy("xyzzy")


def test_an_option_of_another_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'snapkv-d' has no option 'pooling'.*window"):
        get_policy("snapkv-d", pooling="max")
    with pytest.raises(ConfigError, match="pool_kernel"):
        policy_of(EvictionConfig(pool_kernel=5))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("snapkv", {"window": 0}),
        ("snapkv", {"window": 2.5}),
        ("snapkv", {"pool_kernel": 4}),
        ("snapkv", {"pool_kernel": 0}),
        ("snapkv", {"pooling": "mean"}),
        ("snapkv-d", {"window": -1}),
        ("chunkkv", {"chunk_size": 0}),
        ("lagkv", {"lag": 0}),
        ("lagkv", {"lag": 12.5}),
        ("lagkv", {"cross": 1}),
        ("lagkv", {"sink_tokens": -1}),
        ("cur", {"sink_tokens": -1}),
        ("cake", {"gamma": -0.5}),
        ("cake", {"gamma": float("nan")}),
        ("cake", {"gamma": float("inf")}),
        ("cake", {"gamma": "much"}),
        ("rkv", {"mix": 1.5}),
        ("rkv", {"mix": True}),
        ("random", {"seed": -1}),
        ("leverage", {"seed": 0.5}),
        ("compactor", {"chunk_size": 0}),
        ("non_causal_attn", {"chunk_size": -5}),
        ("kvzip", {"chunk_size": 0}),
        ("expected_attention", {"n_future": 0}),
        ("expected_attention", {"covariance": 1}),
        ("expected_attention", {"value_norm": "yes"}),
        ("expected_attention", {"epsilon": -0.1}),
        ("criticalkv", {"epsilon": float("inf")}),
        ("criticalkv", {"stage_share": 1.01}),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"bad value for {next(iter(options))}"):
        get_policy(name, **options)


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize("kernel", [1, 3, 5, 7, 15, 31])
@pytest.mark.parametrize("length", [1, 2, 4, 30, 31, 100])
def test_pooling_equals_numpy(kind: str, kernel: int, length: int) -> None:
    scores = np.random.default_rng(length).random((3, length)).astype(np.float32)
    expected = slow_pool(scores.astype(np.float64), kernel, kind)
    result = np.asarray(pooled(mx.array(scores), kernel, kind))
    assert result.shape == (3, length)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(pooled(mx.array(scores), kernel, "none")), scores)


def test_pooling_of_nothing_is_nothing() -> None:
    for kind in ("avg", "max", "none"):
        assert pooled(mx.zeros((3, 0)), 5, kind).shape == (3, 0)
