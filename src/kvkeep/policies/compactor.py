"""Compactor: leverage and non-causal attention, mixed by how much is evicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.errors import ConfigError
from kvkeep.policies.accumulate import Accumulator
from kvkeep.policies.base import Need, Policy, Scope
from kvkeep.policies.leverage import leverage_scores, sketch_of
from kvkeep.policies.non_causal_attn import BlockSums, non_causal_scores
from kvkeep.spec import LayerView

FIRST, LAST = 8, 4  # tokens that are not scored


@dataclass(frozen=True)
class Compactor(Policy):
    """r * leverage + non-causal attention, r the share of rows to evict.

    Both are as in `leverage` and `non_causal_attn`, without the first 8 and the last 4 rows,
    which hold the layer's maximum. Rows that a cache held before the prefill get 0 for
    attention, its mean.

    Source: Chari et al., "Compactor", arXiv:2507.08143; kvpress 0.5.5 compactor_press.py.
    Query-agnostic.

    Attributes:
        chunk_size: positions that attend to each other.
        seed: of the sketch.

    Raises:
        ConfigError: an option is out of range.
    """

    chunk_size: int = 256
    seed: int = 0

    name: ClassVar[str] = "compactor"
    needs: ClassVar[frozenset[Need]] = frozenset({"attention", "keys", "values", "rope"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = False
    budget_aware: ClassVar[bool] = True
    summary: ClassVar[str] = "leverage of keys and unmasked attention, mixed by the budget"
    source: ClassVar[str] = "Compactor, arXiv:2507.08143"

    def accumulator(self) -> Accumulator:
        """As for `non_causal_attn`, from the ninth position to the fourth last."""
        return BlockSums(self.chunk_size, FIRST, LAST)

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32, either sign.

        Raises:
            ConfigError: the view lacks what the accumulator gathered, the rotation, or the
                number of rows to keep.
        """
        return compactor_scores(view, sketch_of(view, self.seed))


def compactor_scores(view: LayerView, sketch: mx.array) -> mx.array:
    """The scores [H_kv, T] with a given sketch [H_kv, D, n]."""
    kv_heads, length, _ = view.keys.shape
    if view.keep is None:
        raise ConfigError("scores that depend on the budget", expected="a view with keep")
    stop = length - LAST
    if stop <= FIRST:
        return mx.ones((kv_heads, length))
    evicted = max(1 - view.keep / length, 0.0)
    scores = evicted * leverage_scores(view, sketch, FIRST, stop)
    scores = scores + non_causal_scores(view, view.values[:, FIRST:stop])
    ends = (mx.broadcast_to(scores.max(), (kv_heads, count)) for count in (FIRST, LAST))
    first, last = ends
    return mx.concatenate([first, scores, last], axis=1)
