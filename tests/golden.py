"""Numbers that kvpress 0.5.5 produced (`fixtures/`), the views they came from, and comparing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from kvkeep import LayerView
from kvkeep.attention import Rotary
from kvkeep.policies import Chunk
from kvkeep.selection import select_rows
from oracles import rotated

FIXTURES = Path(__file__).parent / "fixtures"
LAYERS, HEADS, KV_HEADS, DIM = 3, 6, 2, 16
RATIOS = ("r25", "r50", "r75", "r90")


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    """All arrays of one file."""
    with np.load(FIXTURES / f"{name}.npz", allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


def golden_view(layer: int, window: int, chunk: int = 8, length: int = 200) -> LayerView:
    """One layer of the model that kvpress ran, with its last `window` queries."""
    inputs = golden(f"inputs_T{length}")
    return LayerView(
        keys=mx.array(inputs["keys"][layer]),
        values=mx.array(inputs["values"][layer]),
        queries=mx.array(inputs["queries_last64"][layer, :, 64 - window :]) if window else None,
        scale=DIM**-0.5,
        layer=layer,
        n_layers=LAYERS,
        score_chunk_size=chunk,
    )


def golden_rope() -> Rotary:
    """The rotation of that model, as mlx has it."""

    def refuse(reason: str) -> NoReturn:
        raise AssertionError(reason)

    return Rotary(nn.RoPE(DIM, traditional=False, base=10_000), refuse)


def golden_weights(layer: int) -> Any:
    """Output weights [D, hidden] of that model by query head."""
    weight = golden("model")["o_proj_weight"][layer]
    return lambda head: mx.array(weight[:, head * DIM : (head + 1) * DIM].T)


def full_view(
    policy: Any, layer: int, length: int = 200, keep: int | None = None, step: int = 2048
) -> LayerView:
    """A `golden_view` with everything that a policy may need, `step` queries accumulated at once.

    The queries are rotated in float64 NumPy.
    """
    view = golden_view(layer, policy.observation_window, length=length)
    seen, rope = {}, golden_rope()
    if (accumulator := policy.accumulator()) is not None:
        queries = rotated(golden(f"inputs_T{length}")["queries_prerope"][layer], 10_000)
        for start in range(0, length, step):
            stop = min(start + step, length)
            chunk = mx.array(queries[:, start:stop].astype(np.float32))
            rows = (view.keys[:, :stop], view.values[:, :stop])
            accumulator.add(Chunk(chunk, *rows, view.scale, start, rope=rope))
        seen = accumulator.finish()
    weights = golden_weights(layer)
    return replace(view, keep=keep, seen=seen, rope=rope, output_weights=weights)


def scores_of(
    policy: Any, length: int = 200, keep: int | None = None, step: int = 2048
) -> np.ndarray:
    """[L, H_kv, T] float32."""
    views = [full_view(policy, i, length, keep, step) for i in range(LAYERS)]
    scores = np.stack([np.asarray(policy.score(view)) for view in views])
    assert scores.dtype == np.float32
    return scores


def assert_same_scores(mine: np.ndarray, theirs: np.ndarray, *, signed: bool = False) -> None:
    """Equal to 1e-4 of each score (of the largest for signed ones, which come near 0).

    Sentinels, the highest score where several positions hold it, must be equal and do not
    count as the largest: they would hide errors of the others.
    """
    for ours, layer in zip(mine, theirs, strict=True):
        top = layer == layer.max()
        top &= np.count_nonzero(top) > 1
        np.testing.assert_allclose(ours[top], layer[top], rtol=1e-4)
        ours, layer = ours[~top], layer[~top]
        scale = np.abs(layer).max()
        floor = scale if signed else np.maximum(np.abs(layer), 1e-3 * scale)
        assert (np.abs(ours - layer) / floor).max() < 1e-4


def assert_same_rows(name: str, scores: np.ndarray, *, sinks: int = 0, recent: int = 0) -> int:
    """Kept sets equal those of the press, or are as good where a tie makes them ambiguous.

    Returns:
        How many sets were compared exactly.
    """
    press, compared = golden(name), 0
    for ratio in RATIOS:
        theirs = press[f"kept_{ratio}"]
        for layer, heads in enumerate(scores):
            kept = select_rows(heads, theirs.shape[-1], sinks=sinks, recent=recent)
            assert kept.shape == theirs[layer].shape
            for head, rows in enumerate(kept):
                if press[f"exact_{ratio}"][layer, head]:
                    np.testing.assert_array_equal(rows, theirs[layer, head])
                    compared += 1
                else:
                    gone = np.setdiff1d(np.arange(heads.shape[1]), rows)
                    assert heads[head, rows].min() >= heads[head, gone].max() - 1e-6
    return compared
