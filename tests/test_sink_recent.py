"""The two base lines: sinks and recency, and random rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from golden import assert_same_rows, golden_view, scores_of
from kvkeep import EvictionConfig, compact_prompt_cache, get_policy, sink_recent_indices
from kvkeep.policies import policy_of
from kvkeep.selection import select_rows
from tiny_models import random_tokens, tiny_llama


def test_rows_of_kvpress() -> None:
    scores = scores_of(get_policy("sink_recent"))
    assert assert_same_rows("streaming_llm_T200", scores, sinks=4) == 24


@pytest.mark.parametrize("keep", [1, 3, 4, 5, 30, 199, 200])
@pytest.mark.parametrize("sinks", [0, 1, 4, 16])
@pytest.mark.parametrize("recent", [0, 7])
def test_selection_keeps_the_first_and_the_last(keep: int, sinks: int, recent: int) -> None:
    scores = np.asarray(get_policy("sink_recent").score(golden_view(0, 0)))
    kept = select_rows(scores, keep, sinks=sinks, recent=recent)
    np.testing.assert_array_equal(kept, [sink_recent_indices(200, keep, sinks)] * 2)


@pytest.mark.parametrize(
    ("settings", "first"), [({}, 4), ({"sink_tokens": 1}, 1), ({"guarantee_sinks": False}, 2)]
)
def test_a_prompt_keeps_the_first_and_the_last(settings: dict[str, int], first: int) -> None:
    config = EvictionConfig.parse(
        {"policy": "sink_recent", "budget": 16, "min_tokens": 0, **settings}
    )
    result = compact_prompt_cache(tiny_llama(), random_tokens(60), config=config)
    for layer in result.cache:
        for positions in layer.head_positions:
            assert list(positions) == sink_recent_indices(60, 16, first).tolist()


def test_random_rows_follow_the_seed_layer_and_head() -> None:
    def drawn(seed: int, layer: int) -> np.ndarray:
        policy = policy_of(EvictionConfig(policy="random", seed=seed))
        return np.asarray(policy.score(replace(golden_view(0, 0), layer=layer)))

    one = drawn(5, 1)
    np.testing.assert_array_equal(drawn(5, 1), one)
    for other in (drawn(6, 1), drawn(5, 2), one[::-1]):
        assert np.abs(other - one).max() > 0.5
    assert drawn(0, 0).min() >= 0
    assert drawn(0, 0).max() < 1
    # Uniform over positions: each tenth of them gets about a tenth of the best tenth.
    best = np.concatenate([np.argsort(row)[-20:] for i in range(50) for row in drawn(i, 0)])
    share = np.bincount(best // 20, minlength=10) / len(best)
    assert np.abs(share - 0.1).max() < 0.03


def test_the_seed_of_the_config_reaches_the_kept_rows() -> None:
    def kept(seed: int) -> list[list[int]]:
        config = EvictionConfig(policy="random", budget=16, min_tokens=0, seed=seed)
        cache = compact_prompt_cache(tiny_llama(), random_tokens(60), config=config).cache
        return [list(head) for layer in cache for head in layer.head_positions]

    assert kept(1) == kept(1) != kept(2)
    assert len({tuple(head) for head in kept(1)}) == 4  # two layers of two heads
