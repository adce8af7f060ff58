"""Policies that look at keys and values only: knorm, keydiff, cur."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import kvkeep.policies.pieces as pieces_module
from golden import assert_same_rows, assert_same_scores, golden, golden_view, scores_of
from kvkeep import EvictionConfig, LayerView, get_policy
from kvkeep.policies import policy_of

NAMES = pytest.mark.parametrize("name", ["knorm", "keydiff", "cur"])


@NAMES
@pytest.mark.parametrize("length", [200, 1500])
def test_scores_and_rows_of_kvpress(name: str, length: int) -> None:
    scores = scores_of(get_policy(name), length)
    assert_same_scores(scores, golden(f"{name}_T{length}")["scores"], signed=name == "keydiff")
    assert assert_same_rows(f"{name}_T{length}", scores) >= 23


@NAMES
def test_many_pieces_score_as_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, view = get_policy(name), golden_view(0, 0, length=1500)
    whole = np.asarray(policy.score(view))
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", 4 * 2 * 16 * 100)
    spans = list(pieces_module.spans(view.keys, 16))
    assert spans[:2] == [(0, 96), (96, 192)]  # whole blocks of 16
    assert spans[-1][1] == 1500
    assert [stop - start for start, stop in pieces_module.spans(view.keys)] == [100] * 15
    error = np.abs(np.asarray(policy.score(view)) - whole).max()
    assert error <= 2e-6 * np.abs(whole[whole < 1]).max()


def test_knorm_prefers_short_keys_and_keydiff_rare_directions() -> None:
    keys = np.ones((1, 6, 4), np.float32)
    keys[0, 2] *= 0.1  # short
    keys[0, 4] = [5, -5, 5, -5]  # at right angles
    view = LayerView(mx.array(keys), mx.array(keys), None, 1.0, layer=0, n_layers=1)
    assert np.asarray(get_policy("knorm").score(view))[0].argmax() == 2
    assert np.asarray(get_policy("keydiff").score(view))[0].argmax() == 4


def test_zero_rows_score_finitely() -> None:
    zeros = mx.zeros((2, 40, 8))
    view = LayerView(zeros, zeros, None, 1.0, layer=0, n_layers=1)
    for name in ("knorm", "keydiff"):
        np.testing.assert_array_equal(np.asarray(get_policy(name).score(view)), 0)
    scores = np.asarray(get_policy("cur").score(view))
    np.testing.assert_array_equal(scores[:, :4], 1)
    np.testing.assert_array_equal(scores[:, 4:], 0)


@pytest.mark.parametrize("sinks", [0, 1, 9, 500])
def test_cur_lifts_the_sinks_of_the_config(sinks: int) -> None:
    policy = policy_of(EvictionConfig(policy="cur", sink_tokens=sinks))
    scores = np.asarray(policy.score(golden_view(2, 0)))
    assert (scores[:, :sinks] == 1).all()
    assert (scores[:, sinks:] < 1).all()
