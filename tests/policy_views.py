"""Random views that have whatever a policy needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from kvkeep import LayerView
from kvkeep.attention import Rotary
from kvkeep.policies import Chunk, Replayed
from kvkeep.spec import Drafted


def view_of(
    policy: Any,
    length: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
) -> LayerView:
    """Random rows, as many queries as the policy observes, and what else it needs."""
    random = np.random.default_rng(seed)
    rows = [
        mx.array(random.normal(size=(kv_heads, length, d)).astype(np.float32)).astype(dtype)
        for d in (dim, dim + 2)  # values may be of another size
    ]
    window = min(policy.observation_window, length)
    queries = None
    if window:
        queries = mx.array(2 * random.normal(size=(heads, window, dim)).astype(np.float32))
        queries = queries.astype(dtype)
    weights = mx.array(random.normal(size=(heads, dim + 2, 5)).astype(np.float32))
    view = LayerView(
        rows[0],
        rows[1],
        queries,
        dim**-0.5,
        layer=1,
        n_layers=3,
        keep=max(length // 3, 1),
        rope=rope_of(dim) if "rope" in policy.needs else None,
        output_weights=(lambda head: weights[head]) if "output_weights" in policy.needs else None,
    )
    if policy.draft_length:
        said = [
            mx.array(random.normal(size=(h, 5, dim)).astype(np.float32)).astype(dtype)
            for h in (heads, kv_heads)
        ]
        view = replace(view, draft=Drafted(2 * said[0], said[1]))
    fed = mx.array(2 * random.normal(size=(heads, length, dim)).astype(np.float32)).astype(dtype)
    return replace(view, seen=gathered(policy, view, fed))


def rope_of(dim: int) -> Rotary:
    """A rotation of as many channels as make pairs."""

    def refuse(reason: str) -> NoReturn:
        raise AssertionError(reason)

    module = nn.RoPE(dim // 2 * 2) if dim > 1 else lambda x, offset: x
    return Rotary(module, refuse)


def gathered(policy: Any, view: LayerView, queries: mx.array) -> Any:
    """What the policy's accumulator makes of queries [H_q, T, D] and the view's rows."""
    accumulator = policy.accumulator()
    assert (accumulator is not None) == bool(policy.needs & {"attention", "replay"})
    if accumulator is None:
        return {}
    length, replayed = queries.shape[1], "replay" in policy.needs
    for start in range(0, length, 100):
        stop = min(start + 100, length)
        keys, values = view.keys[:, :stop], view.values[:, :stop]
        if replayed:  # the rows stand for those of a prompt and for those of its repetition
            keys = mx.concatenate([view.keys, keys], axis=1)
            values = mx.concatenate([view.values, values], axis=1)
        chunk = Chunk(
            queries[:, start:stop],
            keys,
            values,
            view.scale,
            start + length * replayed,
            rope=view.rope,
            replayed=Replayed(length, 0, length) if replayed else None,
        )
        accumulator.add(chunk)
    return accumulator.finish()
