"""CriticalKV against kvpress's numbers, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import kvkeep.policies.criticalkv as criticalkv_module
from golden import LAYERS, full_view, golden, scores_of
from kvkeep import get_policy
from kvkeep.errors import ConfigError
from kvkeep.selection import select_rows

KEEPS = {"r25": 150, "r50": 100, "r75": 50, "r90": 19}


@pytest.mark.parametrize("window", [16, 64])
@pytest.mark.parametrize("ratio", KEEPS)
def test_scores_and_rows_of_kvpress(window: int, ratio: str) -> None:
    press, keep = golden(f"criticalkv_snapkv_w{window}_T200"), KEEPS[ratio]
    scores = scores_of(get_policy("criticalkv", window=window, pool_kernel=5), keep=keep)
    theirs = press[f"scores_{ratio}"]
    promoted = theirs > 1e38
    clear = keep // 2 > window  # else kvpress promotes arbitrary rows of the window
    for layer in range(LAYERS):
        top = scores[layer] == scores[layer].max()
        assert (top.sum(axis=1) == keep // 2).all()
        if clear:
            np.testing.assert_array_equal(top, promoted[layer])
        rest = ~top & ~promoted[layer]
        np.testing.assert_allclose(scores[layer][rest], theirs[layer][rest], rtol=1e-4)
        for head, rows in enumerate(select_rows(scores[layer], keep)):
            if clear and press[f"exact_{ratio}"][layer, head]:
                np.testing.assert_array_equal(rows, press[f"kept_{ratio}"][layer, head])


@pytest.mark.parametrize(("share", "count"), [(0.0, 1), (0.1, 5), (0.999, 49), (1.0, 50)])
def test_the_first_stage_takes_its_share(share: float, count: int) -> None:
    policy = get_policy("criticalkv", window=4, stage_share=share)
    base = scores_of(get_policy("snapkv", window=4))
    for layer, scores in enumerate(scores_of(policy, keep=50)):
        top = scores == scores.max()
        assert (top.sum(axis=1) == count).all()
        for head in range(2):
            (rows,) = select_rows(base[layer, head : head + 1], count)
            np.testing.assert_array_equal(np.flatnonzero(top[head]), rows)


def test_small_pieces_score_as_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = get_policy("criticalkv")
    whole = scores_of(policy, keep=50)
    monkeypatch.setattr(criticalkv_module, "PIECE_BYTES", 4 * 96 * 7)
    np.testing.assert_allclose(scores_of(policy, keep=50), whole, rtol=1e-6)


@pytest.mark.parametrize("missing", ["keep", "output_weights", "queries"])
def test_a_view_without_what_is_needed_is_refused(missing: str) -> None:
    policy = get_policy("criticalkv")
    view = replace(full_view(policy, 0, keep=50), **{missing: None})
    with pytest.raises(ConfigError, match="a view with queries, keep and output_weights"):
        policy.score(view)
