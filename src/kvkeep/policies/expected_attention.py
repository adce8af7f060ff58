"""Expected attention: what queries of the near future will pay, from how queries lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np

from kvkeep.errors import ConfigError
from kvkeep.policies.accumulate import Accumulator, Chunk, gathered
from kvkeep.policies.base import Need, Policy, Scope
from kvkeep.policies.pieces import by_position, spans, squares
from kvkeep.policies.window import PIECE_BYTES
from kvkeep.spec import LayerView, Rope


@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """Softmax of mu.k * scale + k^T Sigma k * scale^2 / 2, group mean, times ||v||.

    mu and Sigma are the mean and the covariance (divisor: their number) of a query head's
    queries before rotation, those of the first `sink_tokens` positions left out, then turned
    by the mean rotation R of the next `n_future` positions: R mu and R Sigma R^T. The softmax
    runs over the rows after the first `sink_tokens`, which hold the layer's maximum + 1.

    Queries that the prefill on top of an older cache did not see do not count. Attention
    sinks of the model share the softmax (kvpress knows no such models).

    Source: Devoto et al., "Expected Attention", arXiv:2510.00636; kvpress 0.5.5
    expected_attention_press.py. Query-agnostic.

    Attributes:
        sink_tokens: first positions, which rank above all.
        n_future: positions ahead that the rotation is averaged over.
        covariance: whether Sigma counts.
        value_norm: whether scores are multiplied by the length of the value.
        epsilon: added to attention before that.

    Raises:
        ConfigError: an option is out of range.
    """

    sink_tokens: int = 4
    n_future: int = 512
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0

    name: ClassVar[str] = "expected_attention"
    needs: ClassVar[frozenset[Need]] = frozenset({"attention", "keys", "values", "rope"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = False
    summary: ClassVar[str] = "attention expected from queries to come, times the value's length"
    source: ClassVar[str] = "Expected Attention, arXiv:2510.00636"

    def accumulator(self) -> Accumulator:
        """Mean and covariance of the queries before rotation."""
        return QueryMoments(self.sink_tokens)

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32.

        Raises:
            ConfigError: the view has nothing from the accumulator, or no rotation.
        """
        kv_heads, length, dim = view.keys.shape
        sinks = min(self.sink_tokens, length)
        if sinks == length:
            return mx.ones((kv_heads, length))
        if view.rope is None:
            raise ConfigError("no rotation for a policy that needs it", expected="a view with rope")
        ahead = int(view.row_positions()[:, -1].max()) + 1  # the newest row is always held
        turn = _mean_rotation(view.rope, ahead, self.n_future, dim)
        mean = (gathered(view, "mean") @ turn).reshape(kv_heads, -1, 1, dim) * view.scale
        spread = turn.T @ gathered(view, "covariance") @ turn * (view.scale**2 / 2)
        spread = spread.reshape(kv_heads, -1, dim, dim)
        keys = view.keys[:, sinks:]
        scores = mx.zeros((kv_heads, length - sinks))
        for member in range(mean.shape[1]):  # one of the group at a time: pieces stay small
            logits = by_position(keys, _logits(mean[:, member], self._of(spread, member)))
            total = mx.logsumexp(logits, axis=1, keepdims=True)
            if view.sinks is not None:
                own = view.sinks.astype(mx.float32).reshape(kv_heads, -1)[:, member : member + 1]
                total = mx.logaddexp(total, own)
            scores = scores + mx.exp(logits - total) / mean.shape[1]
        if self.value_norm:
            lengths = by_position(view.values[:, sinks:], lambda rows: mx.sqrt(squares(rows)))
            scores = (scores + self.epsilon) * lengths
        first = mx.broadcast_to(scores.max() + 1, (kv_heads, sinks))
        return mx.concatenate([first, scores], axis=1)

    def _of(self, spread: mx.array, member: int) -> mx.array | None:
        return spread[:, member] if self.covariance else None


class QueryMoments(Accumulator):
    """Gives "mean" [H_q, D] and "covariance" [H_q, D, D] of unrotated queries, float32.

    Both are 0 where no query counts.

    Args:
        skip: positions below this do not count.
    """

    def __init__(self, skip: int) -> None:
        self._skip = skip
        self._count = 0
        self._mean = self._squares = mx.array(0.0)

    def add(self, chunk: Chunk) -> None:
        """Merge each piece's moments, centred on its own mean, with those so far."""
        if chunk.rope is None:
            raise ConfigError("no rotation for a policy that needs it", expected="a layer's rope")
        heads, count, dim = chunk.queries.shape
        if self._count == 0:
            self._mean, self._squares = mx.zeros((heads, dim)), mx.zeros((heads, dim, dim))
        queries = chunk.queries[:, min(max(self._skip - chunk.first, 0), count) :]
        first = chunk.first + count - queries.shape[1]
        for start, stop in spans(queries):
            positions = np.arange(first + start, first + stop)
            rows = chunk.rope.unrotate(queries[:, start:stop], positions)
            new, held = stop - start, self._count
            mean = rows.mean(axis=1)
            rows = rows - mean[:, None]
            step = mean - self._mean
            between = step[:, :, None] * step[:, None] * (held * new / (held + new))
            self._squares = self._squares + rows.swapaxes(1, 2) @ rows + between
            self._mean = self._mean + step * (new / (held + new))
            self._count += new
            mx.eval(self._mean, self._squares)

    def finish(self) -> Mapping[str, mx.array]:
        """The covariance's divisor is the number of queries."""
        return {"mean": self._mean, "covariance": self._squares / max(self._count, 1)}


def _mean_rotation(rope: Rope, start: int, count: int, dim: int) -> mx.array:
    """[D, D] float32, to be multiplied from the right: mean over positions from `start` on."""
    step = max(PIECE_BYTES // (4 * dim * dim), 1)
    total = mx.zeros((dim, dim))
    for first in range(0, count, step):
        positions = np.arange(start + first, start + min(first + step, count))
        axes = mx.broadcast_to(mx.eye(dim)[:, None], (dim, len(positions), dim))
        total = total + rope.rotate(axes, positions).sum(axis=1)
        mx.eval(total)
    return total / count


def _logits(mean: mx.array, spread: mx.array | None) -> Callable[[mx.array], mx.array]:
    """Keys [H_kv, t, D] to their expected logits [H_kv, t], for one query head of each group."""

    def of(keys: mx.array) -> mx.array:
        logits = (keys * mean).sum(axis=-1)
        return logits if spread is None else logits + ((keys @ spread) * keys).sum(axis=-1)

    return of
