"""PyramidKV: more rows in the first layers, fewer in the last, the same total."""

from __future__ import annotations

from kvkeep.errors import BudgetError
from kvkeep.spec import checked_count


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
