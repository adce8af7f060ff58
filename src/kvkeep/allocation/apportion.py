"""Whole numbers in proportion to weights, within bounds, that sum to a total."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvkeep.allocation.base import Demand
from kvkeep.errors import BudgetError


def apportion(
    weights: Sequence[float] | np.ndarray,
    total: int,
    least: int | np.ndarray = 0,
    most: int | np.ndarray = 2**40,
) -> np.ndarray:
    """Counts [N] in proportion to `weights` where the bounds allow it, summing to `total`.

    Counts at a bound stay there and the others share what is left. Fractions are settled by
    largest remainder, ties to the earlier entry.

    Args:
        weights: [N] finite numbers >= 0; all 0 means all equal.
        total: the sum; the bounds' sum where it is more than that.
        least, most: bounds of each count, or [N] of them.

    Returns:
        [N] int64.

    Raises:
        BudgetError: `total` is less than the lower bounds' sum.
    """
    share = np.asarray(weights, np.float64)
    low = np.broadcast_to(np.asarray(least, np.int64), share.shape)
    high = np.maximum(np.broadcast_to(np.asarray(most, np.int64), share.shape), low)
    if low.sum() > total:
        raise BudgetError(
            "the budget does not hold what is protected",
            expected=f"at least {int(low.sum())} rows over all heads",
            received=f"{total}",
            remedy="Raise the budget or protect fewer positions.",
        )
    if not share.any():
        share = np.ones_like(share)
    share = share / share.max()  # so that no quotient of tiny weights overflows
    return _rounded(_bounded(share, total, low, high), total, low, high)


def _bounded(share: np.ndarray, total: int, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Real counts: proportional within the bounds, summing to `total` where they can."""
    counts = low.astype(np.float64)
    free = np.ones(len(share), np.bool_)
    while free.any():
        left = total - counts[~free].sum()
        whole = share[free].sum()
        even = np.full(int(free.sum()), left / free.sum())
        counts[free] = share[free] / whole * left if whole > 0 else even
        under, over = free & (counts < low), free & (counts > high)
        lacking, beyond = (low - counts)[under].sum(), (counts - high)[over].sum()
        # Only the side that moves more is settled: the other may come right by itself.
        settled = under if lacking >= beyond else over
        if not settled.any():
            break
        counts[settled] = (low if lacking >= beyond else high)[settled]
        free &= ~settled
    return np.clip(counts, low, high)


def _rounded(real: np.ndarray, total: int, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    counts = np.clip(np.floor(real + 1e-9).astype(np.int64), low, high)
    by_remainder = np.argsort(-(real - counts), kind="stable")
    missing = min(total, int(high.sum())) - int(counts.sum())
    while missing > 0:
        for index in by_remainder:
            if missing and counts[index] < high[index]:
                counts[index] += 1
                missing -= 1
    for index in by_remainder[::-1]:  # the small term above may have lifted one too many
        if missing < 0 and counts[index] > low[index]:
            counts[index] -= 1
            missing += 1
    return counts


def rows_by_layer(weights: Sequence[float] | np.ndarray, demand: Demand) -> list[np.ndarray]:
    """The same count for all sets of a layer, in proportion to the layers' weights.

    Returns:
        For each layer [S] counts.

    Raises:
        BudgetError: the total does not hold what is protected.
    """
    heads = np.asarray(demand.heads, np.int64)
    most = np.asarray([int(held.min()) for held in demand.held], np.int64)
    least = np.minimum(demand.least, most)
    if len(set(demand.heads)) <= 1:
        rows = apportion(weights, demand.keep * len(heads), least, most)
    else:
        share = np.asarray(weights, np.float64) * heads
        spent = apportion(share, demand.total, least * heads, most * heads)
        rows = spent // heads
        left = demand.total - int((rows * heads).sum())
        for index in np.argsort(-(spent % heads), kind="stable"):
            if heads[index] <= left and rows[index] < most[index]:
                rows[index] += 1
                left -= int(heads[index])
    return [
        np.full(len(held), count, np.int64) for held, count in zip(demand.held, rows, strict=True)
    ]
