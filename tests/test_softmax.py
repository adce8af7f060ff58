"""The exponential that scoring uses on a CPU, against NumPy in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.policies.softmax import exp, softmax


def test_it_is_the_exponential() -> None:
    x = np.concatenate([np.linspace(-87, 0, 200_001), -np.logspace(-9, 1.9, 1000)])
    x = x.astype(np.float32)
    mine = np.asarray(exp(mx.array(x)), np.float64)
    np.testing.assert_allclose(mine, np.exp(x.astype(np.float64)), rtol=1e-5)
    assert np.asarray(exp(mx.array([0.0]))).tolist() == [1.0]


@pytest.mark.parametrize("low", [-np.inf, -1e30, -200.0, -90.0])
def test_what_is_too_small_is_nothing(low: float) -> None:
    assert np.asarray(exp(mx.array([low, 0.0]))).tolist() == [0.0, 1.0]


@given(st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=40), st.integers(0, 39))
def test_softmax_sums_to_one(logits: list[float], masked: int) -> None:
    row = np.array(logits, np.float32)
    if masked < len(row) - 1:
        row[masked] = -np.inf
    exact = np.exp(row.astype(np.float64) - row.max())
    mine = np.asarray(softmax(mx.array(row)[None]))[0]
    np.testing.assert_allclose(mine, exact / exact.sum(), rtol=1e-5, atol=1e-12)
    assert (mine[np.isneginf(row)] == 0).all()
