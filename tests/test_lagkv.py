"""LagKV against kvpress's numbers, and where it divides by nothing."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import kvkeep.policies.lagkv as lagkv_module
from golden import assert_same_rows, assert_same_scores, golden, golden_view, scores_of
from kvkeep import get_policy


@pytest.mark.parametrize(
    ("name", "lag", "length", "exact"),
    [
        ("lagkv_lag128", 128, 200, 24),  # fewer than two partitions: the latest rows
        ("lagkv_lag32", 32, 200, 18),
        ("lagkv_lag32_cross", 32, 200, 17),
        ("lagkv_lag128", 128, 1500, 6),
        ("lagkv_lag128_cross", 128, 1500, 15),
    ],
)
def test_scores_and_rows_of_kvpress(name: str, lag: int, length: int, exact: int) -> None:
    scores = scores_of(get_policy("lagkv", lag=lag, cross="cross" in name), length)
    assert_same_scores(scores, golden(f"{name}_T{length}")["scores"])
    assert assert_same_rows(f"{name}_T{length}", scores) == exact


@pytest.mark.parametrize("cross", [False, True])
def test_many_pieces_score_as_one(cross: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, view = get_policy("lagkv", lag=32, cross=cross), golden_view(0, 0, length=1500)
    whole = np.asarray(policy.score(view))
    monkeypatch.setattr(lagkv_module, "PIECE_BYTES", 3 * 4 * 2 * 32 * 16)
    np.testing.assert_array_equal(np.asarray(policy.score(view)), whole)


@pytest.mark.parametrize("cross", [False, True])
def test_channels_that_do_not_vary_are_not_divided(cross: bool) -> None:
    view = golden_view(0, 0)
    keys = np.array(view.keys)
    keys[:, :, 3] = 0.25  # constant everywhere: no effect on the deviation but one channel less
    keys[:, 68:100, 5] = 1.0  # constant in the third partition alone
    policy = get_policy("lagkv", lag=32, cross=cross)
    scores = np.asarray(policy.score(replace(view, keys=mx.array(keys))))
    assert np.isfinite(scores).all()
    part, ahead = keys[:, 36:68].astype(np.float64), keys[:, 68:100].astype(np.float64)
    low, extent = ahead.min(1, keepdims=True), np.ptp(ahead, axis=1, keepdims=True)
    extent[extent == 0] = 1
    spread = ((part - low) / extent).std(-1, ddof=1)
    value = np.asarray(view.values).astype(np.float64)
    low, extent = value[:, 68:100].min(1), np.ptp(value[:, 68:100], axis=1)
    other = ((value[:, 36:68] - low[:, None]) / extent[:, None]).std(-1, ddof=1)
    first, second = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (spread, other))
    right = (first + second) / 2
    if not cross:
        right = right.argsort(-1).argsort(-1) / 32
    np.testing.assert_allclose(scores[:, 36:68], right, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 67, 68, 69, 99])
def test_short_prompts(length: int) -> None:
    view = golden_view(0, 0)
    view = replace(view, keys=view.keys[:, :length], values=view.values[:, :length])
    scores = np.asarray(get_policy("lagkv", lag=32).score(view))
    assert scores.shape == (2, length)
    assert (scores[:, :4] == 1).all()
    if length < 68:
        assert (np.diff(scores[:, 4:]) > 0).all()
        assert (scores[:, 4:] < 1).all()
    else:
        assert (scores[:, 36:] == 1).all()
        assert (np.sort(scores[:, 4:36]) == np.arange(32) / 32).all()


def test_equal_rows_rank_by_position() -> None:
    ones = mx.ones((1, 100, 8))
    view = replace(golden_view(0, 0), keys=ones, values=ones)
    scores = np.asarray(get_policy("lagkv", lag=32).score(view))[0]
    np.testing.assert_array_equal(scores[4:36], np.arange(32) / 32)
