"""Observed attention: the mean attention that a row got from the queries that saw it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.accumulate import Accumulator, Chunk, gathered
from kvkeep.policies.base import Need, Policy, Scope
from kvkeep.policies.window import window_attention
from kvkeep.spec import LayerView

_QUERIES = 256  # at once: fewer make thin matrix products, more make narrow pieces of keys


@dataclass(frozen=True)
class ObservedAttention(Policy):
    """Column sums of causal attention over the queries that can see the row; group mean.

    Every query of the prompt counts alike, so the question weighs no more than the rest. The
    sums take as many products as a second prefill's attention. Where a cache held rows before
    (another turn, a compact cache), the new tokens' queries count alone, and those rows'
    sums are divided by their number.

    Source: after Zhang et al., "H2O", arXiv:2306.14048, in the form of kvpress 0.5.5
    observed_attention_press.py, which scores once after the prompt. Query-agnostic.
    """

    name: ClassVar[str] = "observed_attention"
    needs: ClassVar[frozenset[Need]] = frozenset({"attention"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = False
    summary: ClassVar[str] = "mean attention from all queries of the prompt that see the row"
    source: ClassVar[str] = "after H2O, arXiv:2306.14048"

    def accumulator(self) -> Accumulator:
        """Sums the columns of the attention matrix."""
        return ColumnSums()

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32, between 0 and 1.

        Raises:
            ConfigError: the view has nothing from the accumulator.
        """
        kv_heads, length, _ = view.keys.shape
        return gathered(view, "attention").reshape(kv_heads, -1, length).mean(axis=1)


class ColumnSums(Accumulator):
    """Gives "attention" [H_q, T] float32, each key's mean weight from queries that see it."""

    def __init__(self) -> None:
        self._queries = 0
        self._sums: mx.array | None = None

    def add(self, chunk: Chunk) -> None:
        """Add the chunk's softmax weights, causal, over all rows held."""
        heads, count, _ = chunk.queries.shape
        rows = chunk.keys.shape[1]
        sums = mx.zeros((heads, rows)) if self._sums is None else _padded(self._sums, rows)
        for start in range(0, count, _QUERIES):
            stop = min(start + _QUERIES, count)
            visible = rows - (count - stop)
            part = window_attention(
                chunk.queries[:, start:stop],
                chunk.keys[:, :visible],
                chunk.scale,
                lambda weights: weights.sum(axis=2),
                sinks=chunk.sinks,
            )
            sums = sums + _padded(part.reshape(heads, visible), rows)
            mx.eval(sums)
        self._sums = sums
        self._queries += count

    def finish(self) -> Mapping[str, mx.array]:
        """Divide by the number of queries: those before a key do not see it."""
        assert self._sums is not None  # a prompt has a token
        rows = self._sums.shape[1]
        seen_by = mx.minimum(rows - mx.arange(rows), self._queries)
        return {"attention": self._sums / seen_by}


def _padded(columns: mx.array, length: int) -> mx.array:
    return mx.pad(columns, [(0, 0), (0, length - columns.shape[1])])
