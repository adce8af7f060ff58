"""KVzip's scores against kvpress's, from the queries and keys of its own second reading."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from golden import LAYERS, golden, golden_view
from kvkeep import get_policy
from kvkeep.errors import ConfigError
from kvkeep.policies import Chunk, Replayed


def replayed_scores(layer: int, step: int) -> np.ndarray:
    """Scores [H_kv, T] of the policy over the fixture's replay, `step` queries at once."""
    press, policy = golden("kvzip_chunk64_T200"), get_policy("kvzip", chunk_size=64)
    view, accumulator = golden_view(layer, 0), policy.accumulator()
    assert accumulator is not None
    for index, (start, stop) in enumerate(press["chunk_bounds"].tolist()):
        queries, keys = (press[f"rep_{kind}_c{index}"][layer] for kind in ("queries", "keys"))
        for first in range(0, queries.shape[1], step):
            last = min(first + step, queries.shape[1])
            rows = mx.concatenate([view.keys, mx.array(keys[:, :last])], axis=1)
            chunk = mx.array(queries[:, first:last])
            part = Replayed(200, start, stop)
            accumulator.add(Chunk(chunk, rows, rows, view.scale, 200 + first, replayed=part))
    return np.asarray(policy.score(replace(view, seen=accumulator.finish())))


@pytest.mark.parametrize("step", [1, 7, 512])
def test_scores_of_kvpress(step: int) -> None:
    press = golden("kvzip_chunk64_T200")
    for layer in range(LAYERS):
        scores, raw = replayed_scores(layer, step), press["scores_raw"][layer]
        np.testing.assert_allclose(scores[:, 4:], raw[:, 4:], rtol=1e-4, atol=1e-3 * raw.max())
        error = np.abs(scores[:, 4:] - raw[:, 4:]) / np.maximum(raw[:, 4:], 1e-3 * raw.max())
        assert error.max() < 1e-4
        np.testing.assert_allclose(scores[:, 4:], press["scores"][layer][:, 4:], atol=1e-5)
        np.testing.assert_allclose(scores[:, :4], raw.max() + 1, rtol=1e-6)


def test_a_view_without_a_replay_is_refused() -> None:
    with pytest.raises(ConfigError, match="got nothing"):
        get_policy("kvzip").score(golden_view(0, 0))
