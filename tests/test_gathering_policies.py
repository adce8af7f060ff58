"""Policies that see every query of the prefill, against kvpress's numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import kvkeep.policies.compactor as compactor_module
import kvkeep.policies.expected_attention as expected_module
import kvkeep.policies.leverage as leverage_module
import kvkeep.policies.non_causal_attn as non_causal_module
import kvkeep.policies.pieces as pieces_module
import kvkeep.policies.window as window_module
from golden import LAYERS, assert_same_rows, assert_same_scores, full_view, golden, scores_of
from kvkeep import get_policy
from kvkeep.errors import ConfigError
from kvkeep.policies.compactor import compactor_scores
from kvkeep.policies.leverage import leverage_scores, sketch_of
from kvkeep.selection import select_rows

PLAIN = {"covariance": False, "value_norm": False}
KEEPS = {"r25": 150, "r50": 100, "r75": 50, "r90": 20}


@pytest.mark.parametrize("length", [200, 1500])
@pytest.mark.parametrize(
    ("fixture", "name", "options"),
    [
        ("observed_attention", "observed_attention", {}),
        ("expected_attention", "expected_attention", {}),
        ("expected_attention_nocov_novnorm", "expected_attention", PLAIN),
        ("non_causal_attn", "non_causal_attn", {}),
    ],
)
def test_scores_and_rows_of_kvpress(
    fixture: str, name: str, options: dict[str, Any], length: int
) -> None:
    scores = scores_of(get_policy(name, **options), length)
    signed = name == "non_causal_attn"
    assert_same_scores(scores, golden(f"{fixture}_T{length}")["scores"], signed=signed)
    assert assert_same_rows(f"{fixture}_T{length}", scores) >= 17


def test_leverage_with_the_sketch_of_kvpress() -> None:
    press, policy = golden("leverage_T200"), get_policy("leverage")
    views = [full_view(policy, i) for i in range(LAYERS)]
    scores = np.stack(
        [
            np.asarray(leverage_scores(view, mx.array(press["sketch"][i]), 0, 200))
            for i, view in enumerate(views)
        ]
    )
    assert_same_scores(scores, press["scores"], signed=True)
    assert assert_same_rows("leverage_T200", scores) >= 17


@pytest.mark.parametrize("ratio", KEEPS)
def test_compactor_with_the_sketch_of_kvpress(ratio: str) -> None:
    press, policy = golden("compactor_T200"), get_policy("compactor")
    scores = np.stack(
        [
            np.asarray(compactor_scores(full_view(policy, i, keep=KEEPS[ratio]), mx.array(sketch)))
            for i, sketch in enumerate(press["sketch"])
        ]
    )
    assert_same_scores(scores, press[f"scores_{ratio}"], signed=True)
    theirs = press[f"kept_{ratio}"]
    assert press[f"exact_{ratio}"].all()
    for mine, right in zip(scores, theirs, strict=True):
        np.testing.assert_array_equal(select_rows(mine, theirs.shape[-1]), right)


@pytest.mark.parametrize("step", [1, 7, 64, 256])
@pytest.mark.parametrize(
    "name", ["observed_attention", "expected_attention", "non_causal_attn", "compactor"]
)
@pytest.mark.parametrize("chunk_size", [None, 16])
def test_chunk_borders_do_not_matter(name: str, step: int, chunk_size: int | None) -> None:
    if chunk_size is not None and name in ("observed_attention", "expected_attention"):
        chunk_size = None
    policy = get_policy(name, chunk_size=chunk_size)
    whole, pieces = scores_of(policy, keep=50), scores_of(policy, keep=50, step=step)
    np.testing.assert_allclose(pieces, whole, rtol=0, atol=3e-6 * np.abs(whole).max())


@pytest.mark.parametrize(
    "name", ["observed_attention", "expected_attention", "non_causal_attn", "leverage", "compactor"]
)
def test_small_pieces_score_as_large_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = get_policy(name)
    whole = scores_of(policy, 1500, keep=300)
    for module in (pieces_module, window_module, non_causal_module, expected_module):
        monkeypatch.setattr(module, "PIECE_BYTES", 4 * 2 * 16 * 100)
    np.testing.assert_allclose(
        scores_of(policy, 1500, keep=300), whole, rtol=0, atol=1e-5 * np.abs(whole).max()
    )


def test_the_sketch_comes_from_seed_and_layer() -> None:
    views = [full_view(get_policy("leverage"), layer) for layer in (0, 1)]
    draws = [np.asarray(sketch_of(view, seed)) for view in views for seed in (0, 1)]
    assert len({draw.tobytes() for draw in draws}) == 4
    np.testing.assert_array_equal(sketch_of(views[0], 0), draws[0])
    assert abs(draws[0].std() - 1) < 0.05


def test_views_without_what_is_needed_are_refused() -> None:
    for name in ("observed_attention", "expected_attention", "non_causal_attn", "compactor"):
        view = full_view(get_policy(name), 0, keep=50)
        with pytest.raises(ConfigError, match="accumulates during the prefill got nothing"):
            get_policy(name).score(replace(view, seen={}))
    for name in ("expected_attention", "leverage", "compactor"):
        view = full_view(get_policy(name), 0, keep=50)
        with pytest.raises(ConfigError, match="no rotation"):
            get_policy(name).score(replace(view, rope=None))
    with pytest.raises(ConfigError, match="depend on the budget"):
        get_policy("compactor").score(full_view(get_policy("compactor"), 0))


def test_first_and_last_rows_of_compactor_are_not_scored() -> None:
    scores = scores_of(get_policy("compactor"), keep=50)
    for layer in scores:
        ends = np.concatenate([layer[:, : compactor_module.FIRST], layer[:, -4:]], axis=1)
        assert (ends == layer.max()).all()
    assert leverage_module.SKETCH == 48
