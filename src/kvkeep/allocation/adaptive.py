"""Ada-KV: heads of a layer compete for its rows; and the same over the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvkeep.allocation.base import Allocation, Demand, Scored, Sight
from kvkeep.errors import BudgetError, ConfigError


@dataclass(frozen=True)
class Adaptive(Allocation):
    """Each head gets `alpha` of its even part; the layer's highest scores get the rest.

    The guaranteed rows are the head's forced ones and then its best, as many as
    alpha * keep. The layer's total stays keep * H_kv. Before they compete, a head's scores
    are taken from its lowest one and divided by their sum over the rows that are not forced:
    heads of equal attention outside the ends then stand alike.

    Source: Feng et al., "Ada-KV", arXiv:2407.11550, algorithm 1; kvpress 0.5.5
    adakv_press.py. Both compare raw scores, which head_scale "none" does too; alpha is 0.2 in
    kvpress and 0.5 in the paper's code, the default here.

    Attributes:
        alpha: share of the even part that every head gets.
        head_scale: "sum", or "none" for raw scores.

    Raises:
        ConfigError: `alpha` is not between 0 and 1.
    """

    alpha: float = 0.5
    head_scale: str = "sum"

    name: ClassVar[str] = "adaptive"
    sight: ClassVar[Sight] = "layer"
    by_head: ClassVar[bool] = True
    summary: ClassVar[str] = "heads of a layer compete for its rows by their scores"
    source: ClassVar[str] = "Ada-KV, arXiv:2407.11550"

    def counts(self, demand: Demand) -> list[np.ndarray]:
        """[H_kv] counts per layer; each layer's sum is keep * H_kv."""
        return [
            competing_counts(
                scaled(layer, self.head_scale), demand.keep * heads, self.alpha * demand.keep
            )
            for layer, heads in zip(_scored(demand, self.name), demand.heads, strict=True)
        ]


@dataclass(frozen=True)
class Global(Allocation):
    """As `adaptive`, over all heads of all layers together.

    Raw scores must mean the same in every layer and head: KVzip's do, attention hardly.
    Source: Kim et al., "KVzip", arXiv:2505.23416, section 3.3 (non-uniform head budgets);
    kvpress 0.5.5 kvzip_press.py (alpha 0, sinks aside; the default here keeps a tenth).

    Attributes:
        alpha: share of the even part that every head gets.
        head_scale: "none" for raw scores, or "sum" as in `adaptive`.

    Raises:
        ConfigError: `alpha` is not between 0 and 1.
    """

    alpha: float = 0.1
    head_scale: str = "none"

    name: ClassVar[str] = "global"
    sight: ClassVar[Sight] = "model"
    by_head: ClassVar[bool] = True
    summary: ClassVar[str] = "all heads of all layers compete by their scores"
    source: ClassVar[str] = "KVzip, arXiv:2505.23416"

    def counts(self, demand: Demand) -> list[np.ndarray]:
        """[H_kv] counts per layer; the sum over the model is keep times all heads."""
        layers = [scaled(layer, self.head_scale) for layer in _scored(demand, self.name)]
        everyone = Scored(
            tuple(scores for layer in layers for scores in layer.scores),
            tuple(forced for layer in layers for forced in layer.forced),
        )
        flat = competing_counts(everyone, demand.total, self.alpha * demand.keep)
        return np.split(flat, np.cumsum([len(layer.scores) for layer in layers])[:-1])


def scaled(scored: Scored, how: str) -> Scored:
    """Scores whose free rows sum to 1 in each head, counted from the lowest of them.

    Args:
        how: "sum", or "none" for the scores as they are.
    """
    if how == "none":
        return scored
    shares = map(_share, scored.scores, scored.forced)
    return Scored(tuple(shares), scored.forced)


def _share(scores: np.ndarray, forced: np.ndarray) -> np.ndarray:
    free = scores[~forced].astype(np.float64)
    if not len(free):
        return scores
    total = (free - free.min()).sum()
    return (scores - free.min()) / total if total > 0 else np.zeros(len(scores))


def competing_counts(scored: Scored, total: int, guaranteed: float) -> np.ndarray:
    """How many rows each of N heads keeps when their rows compete.

    Args:
        scored: N heads' scores and forced rows.
        total: rows to keep in all heads together.
        guaranteed: rows that each head keeps at least (rounded down, at least 1), its forced
            ones among them; less where the total does not hold them.

    Returns:
        [N] int64, the sum being `total`, or all rows where that is less. Of equal scores
        those of the earlier head stay.

    Raises:
        BudgetError: `total` does not hold the forced rows.
    """
    held = np.array([len(scores) for scores in scored.scores], np.int64)
    forced = np.array([np.count_nonzero(mask) for mask in scored.forced], np.int64)
    if forced.sum() > total:
        raise BudgetError(
            "the budget does not hold what always stays",
            expected=f"at least {int(forced.sum())} rows over {len(held)} heads",
            received=f"{total}",
            remedy="Raise the budget, or keep fewer sinks, recent or protected positions.",
        )
    counts = np.minimum(np.maximum(forced, max(1, int(guaranteed))), held)
    if counts.sum() > total:
        counts = forced
    left = min(total, int(held.sum())) - int(counts.sum())
    if left <= 0:
        return counts
    rivals = []
    for scores, mask, kept in zip(scored.scores, scored.forced, counts - forced, strict=True):
        free = scores[~mask]
        cut = len(free) - int(kept)  # the guaranteed ones are the best and do not compete
        rivals.append(np.partition(free, cut)[:cut] if 0 < cut < len(free) else free[:cut])
    return counts + _won(rivals, left)


def _won(rivals: Sequence[np.ndarray], places: int) -> np.ndarray:
    """[N]: how many of the `places` highest of all rivals each head has."""
    pool = np.concatenate(rivals)
    if places >= len(pool):
        return np.array([len(r) for r in rivals], np.int64)
    threshold = np.partition(pool, len(pool) - places)[len(pool) - places]
    above = np.array([np.count_nonzero(r > threshold) for r in rivals], np.int64)
    tied = np.array([np.count_nonzero(r == threshold) for r in rivals], np.int64)
    room = places - int(above.sum())
    before = np.concatenate([[0], np.cumsum(tied)[:-1]])
    return above + np.clip(room - before, 0, tied)


def _scored(demand: Demand, name: str) -> Sequence[Scored]:
    if len(demand.scored) != len(demand.heads):
        raise ConfigError(
            f"allocation {name!r} deals out rows by scores",
            expected=f"scores of {len(demand.heads)} layers",
            received=f"{len(demand.scored)}",
        )
    return demand.scored
