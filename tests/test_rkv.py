"""R-KV's scores against the formula in float64."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import kvkeep.policies.pieces as pieces_module
from golden import golden_view
from kvkeep.policies import RKV
from test_policies import slow_pool, window_softmax


def redundancy(keys: np.ndarray) -> np.ndarray:
    """Softmax of the mean over all T of the cosines, a key's own left out: [H, T]."""
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    cosines = unit @ unit.swapaxes(1, 2)
    for head in cosines:
        np.fill_diagonal(head, 0)
    mean = np.exp(cosines.mean(axis=-1))
    return mean / mean.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("window", [1, 8, 64])
@pytest.mark.parametrize("mix", [0.0, 0.07, 1.0])
@pytest.mark.parametrize("pieces", [False, True])
def test_scores_equal_the_formula(
    window: int, mix: float, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pieces:
        monkeypatch.setattr(pieces_module, "PIECE_BYTES", 4 * 2 * 16 * 30)
    view, prefix = golden_view(1, window), 200 - window
    attention = window_softmax(view)[:, :, :prefix].mean(axis=1).reshape(2, 3, -1).mean(axis=1)
    likeness = redundancy(np.asarray(view.keys, np.float64))[:, :prefix]
    right = mix * slow_pool(attention, 7, "max") - (1 - mix) * likeness
    scores = np.asarray(RKV(window, 7, mix).score(view))
    np.testing.assert_allclose(scores[:, :prefix], right, atol=1e-5 * np.abs(right).max())
    np.testing.assert_allclose(scores[:, prefix:], right.max() + 1, rtol=1e-6)


def test_a_row_that_repeats_others_goes_first() -> None:
    view = golden_view(0, 8)
    keys = np.array(view.keys)
    keys[:, 50:80] = keys[:, 50:51]  # thirty times the same key
    view = replace(view, keys=mx.array(keys), queries=mx.zeros((6, 8, 16)))  # no attention to tell
    for row in np.asarray(RKV().score(view)):
        lowest = np.argsort(row)[:25]
        assert ((lowest >= 50) & (lowest < 80)).all()
