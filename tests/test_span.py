"""The span policy, against float64 NumPy from its formula."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from golden import DIM, golden_view
from kvkeep import LayerView, get_policy
from kvkeep.errors import ConfigError
from kvkeep.policies import window_cubes
from kvkeep.policies.span import Span


def right_scores(view: Any, kernel: int, pooling: str, group: str) -> np.ndarray:
    """[H_kv, T] float64, computed position by position."""
    q, k = np.asarray(view.queries, np.float64), np.asarray(view.keys, np.float64)
    heads, width, _ = q.shape
    length = k.shape[1]
    cubed = np.zeros((heads, length))
    for head in range(heads):
        for row in range(width):
            position = length - width + row
            logits = k[head // 3, : position + 1] @ q[head, row] * DIM**-0.5
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            far = max(position - 16 + 1, 0)
            cubed[head, :far] += (row + 1) / sum(range(width + 1)) * weights[:far] ** 3
    pooled, side = np.zeros_like(cubed), kernel // 2
    for at in range(length):
        near = cubed[:, max(at - side, 0) : at + side + 1]
        pooled[:, at] = near.sum(1) / kernel if pooling == "avg" else near.max(1)
    pooled = pooled.reshape(2, 3, -1)
    return pooled.max(1) if group == "max" else pooled.mean(1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 8, "pool_kernel": 5, "pooling": "max", "group": "mean"},
        {"window": 150, "pool_kernel": 1},
    ],
)
@pytest.mark.parametrize("layer", range(3))
def test_scores_are_the_formula(layer: int, options: dict[str, Any]) -> None:
    policy = Span(**options)
    view = golden_view(layer, policy.observation_window)
    right = right_scores(view, policy.pool_kernel, policy.pooling, policy.group)
    np.testing.assert_allclose(np.asarray(policy.score(view)), right, rtol=3e-4, atol=1e-10)


def test_the_window_does_not_fill_the_budget() -> None:
    assert Span().default_recent(1000) == 32 < Span().observation_window == 64


def test_one_query_that_asks_is_heard() -> None:
    """One query of 32 looks sharply at a row, the others faintly at another one."""
    keys, queries = np.zeros((1, 200, 8)), np.zeros((1, 32, 8))
    keys[0, 10, 0] = keys[0, 60, 1] = 1
    queries[0, :, 1], queries[0, 5] = 2, [5.5, *[0] * 7]
    view = LayerView(
        keys=mx.array(keys, mx.float32),
        values=mx.zeros((1, 200, 8)),
        queries=mx.array(queries, mx.float32),
        scale=1.0,
        layer=0,
        n_layers=1,
    )
    span, snapkv = (get_policy(name, window=32, pool_kernel=1) for name in ("span", "snapkv"))
    assert int(mx.argmax(span.score(view)[0, :168])) == 10
    assert int(mx.argmax(snapkv.score(view)[0, :168])) == 60


@pytest.mark.parametrize("chunk", [1, 3, 32])
def test_how_many_queries_at_once_makes_no_difference(chunk: int) -> None:
    at_once, apart = (window_cubes(golden_view(1, 32, size), 16) for size in (32, chunk))
    np.testing.assert_allclose(np.asarray(apart), np.asarray(at_once), rtol=1e-4, atol=1e-9)


def test_later_queries_weigh_more() -> None:
    """Each of two rows is looked at by one query, as sharply: the later look wins."""
    keys, queries = np.zeros((1, 200, 8)), np.zeros((1, 32, 8))
    keys[0, 10, 0] = keys[0, 60, 1] = 1
    queries[0, 5, 0] = queries[0, 25, 1] = 5
    view = LayerView(
        keys=mx.array(keys, mx.float32),
        values=mx.zeros((1, 200, 8)),
        queries=mx.array(queries, mx.float32),
        scale=1.0,
        layer=0,
        n_layers=1,
    )
    scores = np.asarray(get_policy("span", pool_kernel=1).score(view)[0, :168])
    assert scores.argmax() == 60
    assert np.argsort(scores)[-2] == 10


@pytest.mark.parametrize("option", [{"group": "sum"}, {"pool_kernel": 4}, {"window": 0}])
def test_bad_options(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        get_policy("span", **option)
