"""CAKE's token scores against its formula in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from golden import golden_view
from kvkeep import EvictionConfig
from kvkeep.policies import Cake, SnapKV, policy_of, window_mass, window_moments
from oracles import raw
from test_policies import slow_pool, window_softmax


@pytest.mark.parametrize("window", [1, 2, 16, 64])
@pytest.mark.parametrize("pooling", ["avg", "max", "none"])
@pytest.mark.parametrize("gamma", [0.0, 3.0, 200.0])
def test_scores_equal_the_formula(window: int, pooling: str, gamma: float) -> None:
    view = golden_view(1, window)
    weights = window_softmax(view)[:, :, : 200 - window]
    variance = weights.var(axis=1, ddof=1) if window > 1 else 0
    right = weights.mean(axis=1) + gamma * variance
    right = right if pooling == "none" else slow_pool(right, 5, pooling)
    right = right.reshape(2, 3, -1).mean(axis=1)
    scores = np.asarray(Cake(window, gamma, 5, pooling).score(view))
    np.testing.assert_allclose(scores[:, : 200 - window], right, rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(scores[:, 200 - window :], right.max() + 1, rtol=1e-6)


def test_without_the_variance_it_is_snapkv() -> None:
    view = golden_view(0, 16)
    snapkv = SnapKV(16, 5).score(view)
    np.testing.assert_allclose(np.asarray(Cake(16, 0.0).score(view)), np.asarray(snapkv), rtol=1e-6)
    assert np.abs(np.asarray(Cake(16).score(view) - snapkv)).max() > 0.01


@pytest.mark.parametrize("chunk", [1, 3, 16, 100])
def test_moments_come_from_one_pass_over_few_queries_at_a_time(chunk: int) -> None:
    view = golden_view(2, 16, chunk)
    weights = window_softmax(view)
    moments = np.asarray(window_moments(view))
    np.testing.assert_allclose(moments[0], weights.sum(axis=1), rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(moments[1], (weights**2).sum(axis=1), rtol=5e-5, atol=1e-9)
    assert raw(window_moments(view)[0]) == raw(window_mass(view))


def test_a_constant_attention_has_no_variance() -> None:
    view = golden_view(0, 16)
    flat = type(view)(view.keys, view.values, mx.zeros((6, 16, 16)), 1.0, layer=0, n_layers=1)
    scores = np.asarray(Cake(16, pooling="none").score(flat))[:, :184]
    # Each query spreads over the keys it sees: 185 to 200 of them, so hardly any variance.
    mean = np.mean(1 / np.arange(185, 201))
    np.testing.assert_allclose(scores, mean, rtol=2e-2)


def test_gamma_reaches_it() -> None:
    assert policy_of(EvictionConfig(policy="cake", gamma=2)) == Cake(gamma=2)
