"""TOVA against kvpress's numbers, and its own corners."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from golden import assert_same_rows, assert_same_scores, golden, golden_view, scores_of
from kvkeep import get_policy
from kvkeep.errors import ConfigError


@pytest.mark.parametrize("length", [200, 1500])
def test_scores_and_rows_of_kvpress(length: int) -> None:
    scores = scores_of(get_policy("tova"), length)
    assert_same_scores(scores, golden(f"tova_T{length}")["scores"])
    assert assert_same_rows(f"tova_T{length}", scores) == 24


def test_only_the_last_query_counts() -> None:
    policy = get_policy("tova")
    one, many = golden_view(1, 1), golden_view(1, 64)
    np.testing.assert_array_equal(np.asarray(policy.score(many)), np.asarray(policy.score(one)))
    with pytest.raises(ConfigError, match="no window queries"):
        policy.score(replace(one, queries=None))
