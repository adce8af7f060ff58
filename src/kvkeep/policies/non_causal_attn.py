"""Non-causal attention: what rows get from all queries near them, later ones or earlier."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.accumulate import Accumulator, Chunk, gathered
from kvkeep.policies.base import Need, Policy, Scope
from kvkeep.policies.pieces import by_position, squares
from kvkeep.policies.window import PIECE_BYTES, pooled
from kvkeep.spec import LayerView


@dataclass(frozen=True)
class NonCausalAttention(Policy):
    """Column sums of softmax(q k^T) in chunks of positions, group mean, times ||v||.

    The products are not scaled, and each query sees its whole chunk. Then average pooling
    over 3 positions and a z-score over all heads and positions of the layer. As in kvpress, a
    chunk that is too short counts as filled up with keys and queries of zero, which take
    their share of the softmax. Rows that a cache held before the prefill have no queries to
    be scored by and get 0, the mean.

    Source: the attention half of Chari et al., "Compactor", arXiv:2507.08143; kvpress 0.5.5
    non_causal_attention_press.py. Query-agnostic.

    Attributes:
        chunk_size: positions per chunk.

    Raises:
        ConfigError: the option is out of range.
    """

    chunk_size: int = 256

    name: ClassVar[str] = "non_causal_attn"
    needs: ClassVar[frozenset[Need]] = frozenset({"attention", "values"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = False
    summary: ClassVar[str] = "unmasked attention inside chunks, times the value's length"
    source: ClassVar[str] = "Compactor, arXiv:2507.08143"

    def accumulator(self) -> Accumulator:
        """Sums the columns of each chunk's attention."""
        return BlockSums(self.chunk_size)

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32, either sign.

        Raises:
            ConfigError: the view has nothing from the accumulator.
        """
        return non_causal_scores(view, view.values)


def non_causal_scores(view: LayerView, values: mx.array) -> mx.array:
    """Z-scores of the last rows among `values` [H_kv, n, D_v], 0 for those before: [H_kv, n]."""
    mass = gathered(view, "mass")
    kv_heads, length, _ = values.shape
    scored = mass.shape[1]
    mass = mass.reshape(kv_heads, -1, scored).mean(axis=1)
    lengths = by_position(values[:, length - scored :], lambda rows: mx.sqrt(squares(rows)))
    scores = z_scores(pooled(mass * lengths, 3, "avg"))
    return mx.pad(scores, [(0, 0), (length - scored, 0)])


def z_scores(scores: mx.array) -> mx.array:
    """Scores less their mean, over their deviation (divisor: number - 1, at least 1e-6)."""
    centred = scores - scores.mean()
    deviation = mx.sqrt(mx.square(centred).sum() / max(scores.size - 1, 1))
    return centred / mx.maximum(deviation, 1e-6)


class BlockSums(Accumulator):
    """Gives "mass" [H_q, n] float32, each key's weights summed over its block's queries.

    Args:
        block: positions per block, counted from the first that is not left out.
        skip_first: positions below this are left out.
        skip_last: so many of the last tokens are left out.
    """

    def __init__(self, block: int, skip_first: int = 0, skip_last: int = 0) -> None:
        self._block, self._skip_first, self._skip_last = block, skip_first, skip_last
        self._queries: mx.array | None = None  # of tokens whose block is not complete
        self._keys: mx.array | None = None
        self._mass: list[mx.array] = []

    def add(self, chunk: Chunk) -> None:
        """Score the blocks that are complete; hold back what the last tokens may be cut from."""
        heads, count, _ = chunk.queries.shape
        own = chunk.keys[:, chunk.keys.shape[1] - count :]
        if not self._mass:
            self._mass.append(mx.zeros((heads, 0)))
        at = min(max(self._skip_first - chunk.first, 0), count)
        while at < count:
            held = 0 if self._queries is None else self._queries.shape[1]
            until = min(at + self._block + self._skip_last - held, count)
            queries = _joined(self._queries, chunk.queries[:, at:until])
            keys = _joined(self._keys, own[:, at:until])
            if queries.shape[1] == self._block + self._skip_last:
                self._score(queries[:, : self._block], keys[:, : self._block])
                queries, keys = queries[:, self._block :], keys[:, self._block :]
            self._queries, self._keys = mx.contiguous(queries), mx.contiguous(keys)
            mx.eval(self._queries, self._keys)
            at = until

    def finish(self) -> Mapping[str, mx.array]:
        """Score the last block, which may be short."""
        if self._queries is not None and self._keys is not None:
            left = self._queries.shape[1] - self._skip_last
            if left > 0:
                self._score(self._queries[:, :left], self._keys[:, :left])
        return {"mass": mx.concatenate(self._mass, axis=1)}

    def _score(self, queries: mx.array, keys: mx.array) -> None:
        heads, count, dim = queries.shape
        kv_heads = keys.shape[0]
        turned = keys.astype(mx.float32).swapaxes(1, 2)[:, None]
        filled = self._block - count
        mass = mx.zeros((heads, count))
        step = max(PIECE_BYTES // (4 * heads * count), 1)
        for start in range(0, count, step):
            piece = queries[:, start : start + step].astype(mx.float32)
            logits = piece.reshape(kv_heads, heads // kv_heads, -1, dim) @ turned
            total = mx.logsumexp(logits, axis=-1, keepdims=True)
            if filled:
                total = mx.logaddexp(total, math.log(filled))
            mass = mass + mx.exp(logits - total).sum(axis=2).reshape(heads, count)
            mx.eval(mass)
        self._mass.append(mass + filled / self._block)
        mx.eval(self._mass[-1])


def _joined(held: mx.array | None, new: mx.array) -> mx.array:
    return new if held is None else mx.concatenate([held, new], axis=1)
