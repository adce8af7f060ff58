"""CUR: rows of large keys and values among their neighbours stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.base import Need, Policy, Scope
from kvkeep.policies.pieces import by_position, squares
from kvkeep.spec import LayerView

BLOCK = 16  # positions that leverage is relative to


@dataclass(frozen=True)
class Cur(Policy):
    """||k||^2 times ||v||^2, each as a share of its block of 16 positions, over their sum.

    The last block may be shorter, which lifts its rows. A block of zeros has shares 0. The
    first positions hold 1, above all others.

    Source: Sengupta et al., "CurDKV", arXiv:2509.15038, in the form of kvpress 0.5.5
    cur_press.py (product of key and value leverage, local approximation). Query-agnostic.

    Attributes:
        sink_tokens: first positions that rank above all.

    Raises:
        ConfigError: the option is out of range.
    """

    sink_tokens: int = 4

    name: ClassVar[str] = "cur"
    needs: ClassVar[frozenset[Need]] = frozenset({"keys", "values"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = False
    summary: ClassVar[str] = "large keys and values among their neighbours"
    source: ClassVar[str] = "CurDKV, arXiv:2509.15038"

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32, between 0 and 1."""
        keys, values = (by_position(rows, _shares, BLOCK) for rows in (view.keys, view.values))
        product = keys * values
        scores = product / mx.maximum(product.sum(axis=1, keepdims=True), _LEAST)
        first = mx.arange(scores.shape[1]) < self.sink_tokens
        return mx.where(first, 1.0, scores)


_LEAST = 1e-30


def _shares(rows: mx.array) -> mx.array:
    """Each row's squared length over the sum in its block: [H, t, D] to [H, t]."""
    energy = squares(rows)
    heads, length = energy.shape
    blocks = mx.pad(energy, [(0, 0), (0, -length % BLOCK)]).reshape(heads, -1, BLOCK)
    shares = blocks / mx.maximum(blocks.sum(axis=-1, keepdims=True), _LEAST)
    return shares.reshape(heads, -1)[:, :length]
