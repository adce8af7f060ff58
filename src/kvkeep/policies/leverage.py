"""Leverage: keys that the other keys do not span stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np

from kvkeep.errors import ConfigError
from kvkeep.policies.base import Need, Policy, Scope
from kvkeep.policies.non_causal_attn import z_scores
from kvkeep.policies.pieces import spans
from kvkeep.spec import LayerView

SKETCH = 48  # random directions that keys are projected on
_RIDGE = 0.01


@dataclass(frozen=True)
class Leverage(Policy):
    """Ridge leverage of the keys before rotation, less their mean, in a random sketch.

    With X = (K - mean) S / sqrt(48), S of 48 normal columns per KV head, a row's leverage is
    x (X^T X + 0.01 I)^-1 x^T, at least 0; then a z-score over all heads and positions of the
    layer. The seed and the layer's index determine S (NumPy's PCG64).

    Source: the leverage half of Chari et al., "Compactor", arXiv:2507.08143; kvpress 0.5.5
    leverage_press.py. Query-agnostic.

    Attributes:
        seed: of the sketch, a whole number >= 0.

    Raises:
        ConfigError: the seed is out of range.
    """

    seed: int = 0

    name: ClassVar[str] = "leverage"
    needs: ClassVar[frozenset[Need]] = frozenset({"keys", "rope"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = False
    summary: ClassVar[str] = "keys, before rotation, that the others do not span"
    source: ClassVar[str] = "Compactor, arXiv:2507.08143"

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32, either sign.

        Raises:
            ConfigError: the view has no rotation.
        """
        return leverage_scores(view, sketch_of(view, self.seed), 0, view.keys.shape[1])


def sketch_of(view: LayerView, seed: int) -> mx.array:
    """Normal draws [H_kv, D, 48] float32."""
    heads, _, dim = view.keys.shape
    draws = np.random.default_rng((seed, view.layer)).standard_normal((heads, dim, SKETCH))
    return mx.array(draws.astype(np.float32))


def leverage_scores(view: LayerView, sketch: mx.array, start: int, stop: int) -> mx.array:
    """Z-scored leverage of rows [start, stop) among themselves: [H_kv, stop - start] float32.

    Three passes over the keys (mean, Gram matrix, scores), each of which rotates them back:
    nothing of the size of the layer is held.

    Args:
        sketch: [H_kv, D, n].

    Raises:
        ConfigError: the view has no rotation.
    """
    mean = mx.zeros((view.keys.shape[0], 1, view.keys.shape[2]))
    for keys in _unrotated(view, start, stop):
        mean = mean + keys.sum(axis=1, keepdims=True) / (stop - start)
        mx.eval(mean)
    gram = mx.zeros((mean.shape[0], mean.shape[2], mean.shape[2]))
    for keys in _unrotated(view, start, stop):
        rows = keys - mean
        gram = gram + rows.swapaxes(1, 2) @ rows
        mx.eval(gram)
    kernel = mx.array(_kernel(np.asarray(gram, np.float64), np.asarray(sketch, np.float64)))
    pieces = []
    for keys in _unrotated(view, start, stop):
        rows = keys - mean
        pieces.append(mx.maximum(((rows @ kernel) * rows).sum(axis=-1), 0))
        mx.eval(pieces[-1])
    return z_scores(mx.concatenate(pieces, axis=1))


def _kernel(gram: np.ndarray, sketch: np.ndarray) -> np.ndarray:
    """What lies between a key and its transpose: S (S^T G S + 0.01 I)^-1 S^T, [H_kv, D, D].

    In float64 and in the keys' own space. Sketched rows lie in fewer dimensions than the sketch
    has columns where D is small, and the ridge's inverse would blow up their rounding.
    """
    sketch = sketch / sketch.shape[-1] ** 0.5
    turned = sketch.swapaxes(1, 2)
    ridge = turned @ gram @ sketch + _RIDGE * np.eye(sketch.shape[-1])
    return (sketch @ np.linalg.inv(ridge) @ turned).astype(np.float32)


def _unrotated(view: LayerView, start: int, stop: int) -> Iterator[mx.array]:
    """Keys [H_kv, t, D] float32 before rotation, a piece at a time."""
    if view.rope is None:
        raise ConfigError("no rotation for a policy that needs it", expected="a view with rope")
    keys, positions = view.keys[:, start:stop], view.row_positions()[:, start:stop]
    for first, last in spans(keys):
        yield view.rope.unrotate(keys[:, first:last], positions[:, first:last])
