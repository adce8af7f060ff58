"""KVzip: rows that the model looks at when it repeats the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.accumulate import Accumulator, Chunk, gathered
from kvkeep.policies.base import Need, Policy, Scope
from kvkeep.policies.window import window_attention
from kvkeep.spec import LayerView

_QUERIES = 256  # at once


@dataclass(frozen=True)
class KVzip(Policy):
    """Highest softmax attention that a row gets while the prompt is read a second time.

    After the prefill the model reads an instruction to repeat and then `chunk_size` tokens of
    the prompt again, chunk by chunk, over the exact cache; what this appends is taken off
    again. In each chunk's pass the softmax runs over the first `sink_tokens` rows, the chunk's
    own rows, and the replayed tokens so far; a row's score is the maximum over the pass's
    queries and over the group. The first `sink_tokens` rows hold the layer's maximum + 1.

    The prompt's rows must be exact and all that the cache holds, so a second turn over a
    compacted cache is refused. The prefill takes two to three times as long. The authors and
    kvpress then compare scores over all layers and heads; here the allocation decides.

    Source: Kim et al., "KVzip", arXiv:2505.23416; kvpress 0.5.5 kvzip_press.py. Query-agnostic.

    Attributes:
        sink_tokens: first rows, which every pass sees and which rank above all.
        chunk_size: tokens of the prompt that are read again at once.

    Raises:
        ConfigError: an option is out of range.
    """

    sink_tokens: int = 4
    chunk_size: int = 2048

    name: ClassVar[str] = "kvzip"
    needs: ClassVar[frozenset[Need]] = frozenset({"replay"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = False
    summary: ClassVar[str] = "highest attention while the prompt is read a second time"
    source: ClassVar[str] = "KVzip, arXiv:2505.23416"

    def accumulator(self) -> Accumulator:
        """Keeps the highest attention of each row."""
        return ReplayMaximum(self.sink_tokens)

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32.

        Raises:
            ConfigError: the view has nothing from a replay.
        """
        scores = gathered(view, "attention")
        first = mx.arange(scores.shape[1]) < self.sink_tokens
        return mx.where(first, scores.max() + 1, scores)


class ReplayMaximum(Accumulator):
    """Gives "attention" [H_kv, T] float32, the maximum over replayed queries and the group.

    Args:
        sink_tokens: first rows that every pass sees.
    """

    def __init__(self, sink_tokens: int) -> None:
        self._sink_tokens = sink_tokens
        self._scores: mx.array | None = None

    def add(self, chunk: Chunk) -> None:
        """Take in replayed queries, whose own keys are the last ones that are held."""
        part = chunk.replayed
        assert part is not None  # a policy that needs "replay" is fed by one alone
        kv_heads, held, _ = chunk.keys.shape
        count = chunk.queries.shape[1]
        if self._scores is None:
            self._scores = mx.zeros((kv_heads, part.length))
        sinks = min(self._sink_tokens, part.start)
        pieces = (slice(0, sinks), slice(part.start, part.stop), slice(part.length, held))
        keys = mx.concatenate([chunk.keys[:, piece] for piece in pieces], axis=1)
        best = self._scores[:, part.start : part.stop]
        for start in range(0, count, _QUERIES):
            stop = min(start + _QUERIES, count)
            weights = window_attention(
                chunk.queries[:, start:stop],
                keys[:, : keys.shape[1] - (count - stop)],
                chunk.scale,
                lambda weights: weights.max(axis=(1, 2)),
                sinks=chunk.sinks,
            )
            best = mx.maximum(best, weights[:, sinks : sinks + part.stop - part.start])
            mx.eval(best)
        self._scores[:, part.start : part.stop] = best
        mx.eval(self._scores)

    def finish(self) -> Mapping[str, mx.array]:
        """The maxima."""
        assert self._scores is not None  # a prompt has a token
        return {"attention": self._scores}
