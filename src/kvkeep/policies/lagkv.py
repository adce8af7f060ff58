"""LagKV: rows that vary most, measured by what comes after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np

from kvkeep.policies.base import Need, Policy, Scope
from kvkeep.policies.window import PIECE_BYTES
from kvkeep.spec import LayerView

# Channels whose range in the next partition is below this are not divided by it.
_LEAST_RANGE = 1e-6


@dataclass(frozen=True)
class LagKV(Policy):
    """Spread over channels of keys and values, in units of the next partition's ranges.

    After the sinks, positions form partitions of `lag`. Each but the last is scored:
    (x - min) / (max - min) with the next partition's minimum and maximum of each channel,
    standard deviation over channels (divisor D - 1), softmax inside the partition; the mean
    of keys and values; then its rank in the partition over `lag`, or with `cross` the value
    itself, which compares partitions. Sinks, the last partition and what is left after it
    hold 1, above all others. With fewer than two partitions the later positions rank higher.

    Ranks tie across partitions. Of rows with equal values in one partition the later one
    ranks higher. A channel that does not vary in the next partition is not divided (kvpress
    divides by zero there).

    Source: Liang et al., "LagKV", arXiv:2504.04704, section 3; kvpress 0.5.5
    lagkv_press.py. Query-agnostic.

    Attributes:
        sink_tokens: first positions, which are not scored.
        lag: positions per partition.
        cross: compare values across partitions instead of ranks.

    Raises:
        ConfigError: an option is out of range.
    """

    sink_tokens: int = 4
    lag: int = 128
    cross: bool = False

    name: ClassVar[str] = "lagkv"
    needs: ClassVar[frozenset[Need]] = frozenset({"keys", "values"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = False
    summary: ClassVar[str] = "spread of keys and values relative to the next partition"
    source: ClassVar[str] = "LagKV, arXiv:2504.04704"

    def default_recent(self, budget: int) -> int:
        """None has to be forced: the last partition ranks on top, the later the higher."""
        return 0

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32, between 0 and 1."""
        kv_heads, length, _ = view.keys.shape
        sinks = min(self.sink_tokens, length)
        partitions = (length - sinks) // self.lag
        first = mx.ones((kv_heads, sinks))
        if partitions < 2:
            ramp = mx.arange(length - sinks) / max(length - sinks, 1)
            ramp = mx.broadcast_to(ramp, (kv_heads, length - sinks))
            return mx.concatenate([first, ramp.astype(mx.float32)], axis=1)
        scored = partitions - 1
        keys, values = (
            _spread(rows[:, sinks:], self.lag, scored) for rows in (view.keys, view.values)
        )
        scores = (keys + values) / 2
        if not self.cross:
            scores = _ranks(scores) / self.lag
        last = mx.ones((kv_heads, length - sinks - scored * self.lag))
        return mx.concatenate([first, scores.reshape(kv_heads, -1), last], axis=1)


def _spread(rows: mx.array, lag: int, count: int) -> mx.array:
    """Scores [H, count, lag] of the first `count` partitions of rows [H, T, D]."""
    heads, _, dim = rows.shape
    step = max(PIECE_BYTES // (4 * heads * lag * dim), 1)
    pieces = []
    for start in range(0, count, step):
        stop = min(start + step, count)
        piece = rows[:, start * lag : (stop + 1) * lag].astype(mx.float32)
        piece = piece.reshape(heads, -1, lag, dim)
        ahead = piece[:, 1:]
        low = ahead.min(axis=2, keepdims=True)
        extent = ahead.max(axis=2, keepdims=True) - low
        scaled = (piece[:, :-1] - low) / mx.where(extent > _LEAST_RANGE, extent, 1.0)
        centred = scaled - scaled.mean(axis=-1, keepdims=True)
        deviation = mx.sqrt(mx.square(centred).sum(axis=-1) / max(dim - 1, 1))
        pieces.append(mx.softmax(deviation, axis=-1))
        mx.eval(pieces[-1])
    return mx.concatenate(pieces, axis=1)


def _ranks(scores: mx.array) -> mx.array:
    """Rank of each entry along the last axis, 0 the lowest; ties rise with the index."""
    order = np.argsort(np.asarray(scores), axis=-1, kind="stable")
    return mx.array(np.argsort(order, axis=-1, kind="stable").astype(np.float32))
