"""PyramidKV: more rows in the first layers, fewer in the last, the same total."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvkeep.allocation.apportion import rows_by_layer
from kvkeep.allocation.base import Allocation, Demand
from kvkeep.errors import BudgetError
from kvkeep.spec import checked_count


@dataclass(frozen=True)
class Pyramid(Allocation):
    """Rows fall from the first layer to the last: `pyramid_budgets`, its total exact.

    A layer that would get more rows than it holds hands the surplus to the others, in
    proportion to theirs. Source: Cai et al., "PyramidKV", arXiv:2406.02069.

    Attributes:
        beta: how steep: the last layer holds about 1/beta of the mean, window aside.

    Raises:
        ConfigError: `beta` is out of range.
    """

    beta: int = 20

    name: ClassVar[str] = "pyramid"
    summary: ClassVar[str] = "more rows in the first layers, fewer in the last"
    source: ClassVar[str] = "PyramidKV, arXiv:2406.02069"

    def counts(self, demand: Demand) -> list[np.ndarray]:
        """[S] counts per layer, falling."""
        window = min(demand.recent, demand.keep - 1)
        weights = pyramid_budgets(demand.keep, len(demand.heads), window, self.beta)
        return rows_by_layer(weights, demand)


@dataclass(frozen=True)
class PyramidKvpress(Allocation):
    """As `pyramid`, by kvpress's schedule.

    It is linear with the window inside, and uniform where its last layer would
    fall below the window. kvpress rounds each layer by itself, so its total may be off by some
    rows; here the counts are scaled to the exact total.

    Source: kvpress 0.5.5, pyramidkv_press.py, lines 47 to 86.

    Attributes:
        beta: how steep: the last layer holds 1/beta of the mean.

    Raises:
        ConfigError: `beta` is out of range.
    """

    beta: int = 20

    name: ClassVar[str] = "pyramid-kvpress"
    summary: ClassVar[str] = "as pyramid, by kvpress's schedule (window inside, else uniform)"
    source: ClassVar[str] = "kvpress 0.5.5, pyramidkv_press.py"

    def counts(self, demand: Demand) -> list[np.ndarray]:
        """[S] counts per layer, falling or all equal."""
        length = min(int(held.min()) for held in demand.held)
        # kvpress deals out shares unrounded, and a part of a row may tip its schedule to uniform.
        mean = demand.keep + demand.part
        weights = pyramid_kvpress_budgets(length, mean, len(demand.heads), demand.recent, self.beta)
        return rows_by_layer(weights, demand)


def pyramid_kvpress_budgets(
    length: int, mean: float, n_layers: int, window: int, beta: int = 20
) -> list[int]:
    """Kvpress's rows per layer, as it rounds them: the sum may differ from mean * n_layers.

    Args:
        length: T.
        mean: rows per layer and KV head, T * (1 - ratio); may be a fraction.
        n_layers: L.
        window: W; the schedule never goes below it.
        beta: how steep.

    Returns:
        L counts, window included.
    """
    low = mean / beta
    high = 2 * mean - low
    if high >= length - window:
        high = length - window
        low = 2 * mean - high
    if n_layers < 2 or not length >= high >= low >= window:
        return [round(mean)] * n_layers
    step = (high - low) / (n_layers - 1)
    return [round(high - layer * step) for layer in range(n_layers)]


def pyramid_budgets(total_keep: int, n_layers: int, window: int, beta: int = 20) -> list[int]:
    """Rows per KV head for each layer, falling from the first layer to the last.

    The schedule is PyramidKV's (arXiv 2406.02069) as its reference implementation computes it,
    in whole numbers, window on top. Its floors overshoot, so it is then scaled to the exact
    total with largest-remainder rounding: the sum is total_keep * n_layers, equal layers differ
    by at most one row, and a tie goes to the earlier layer.

    A layer's count may exceed the prompt; capping it is the caller's, who knows the length.

    Args:
        total_keep: mean rows per layer and KV head, window included.
        n_layers: L.
        window: last positions that each layer holds; where they are `total_keep` or more,
            the counts are uniform.
        beta: how steep: the last layer holds about 1/beta of the mean, window aside.

    Returns:
        L counts, each at least 1, non-increasing.

    Raises:
        BudgetError: `total_keep` is not a whole number >= 1.
        ConfigError: `n_layers`, `window` or `beta` is not a whole number >= 1 (0 for window).
    """
    keep = checked_count("total_keep", total_keep, 1, BudgetError)
    layers = checked_count("n_layers", n_layers, 1)
    schedule = _schedule(
        keep, layers, checked_count("window", window, 0), checked_count("beta", beta, 1)
    )
    return _scaled(schedule, keep * layers)


def _schedule(keep: int, layers: int, window: int, beta: int) -> list[int]:
    """The counts before scaling; each is at least window + 1."""
    base = max(keep - window, 1)
    least = max(base // beta, 1)
    most = 2 * base - least
    step = (most - least) // max(layers - 1, 1)
    return [max(most - layer * step, least) + window for layer in range(layers)]


def _scaled(weights: list[int], total: int) -> list[int]:
    """Whole numbers proportional to `weights` that sum to `total`, by largest remainder.

    Integer arithmetic: no float can tip a remainder. A falling schedule stays falling, since
    of two layers with the same floor the heavier one has the larger remainder.
    """
    whole = sum(weights)
    counts = [weight * total // whole for weight in weights]
    by_remainder = sorted(
        range(len(weights)), key=lambda layer: (-(weights[layer] * total % whole), layer)
    )
    for layer in by_remainder[: total - sum(counts)]:
        counts[layer] += 1
    return counts
