"""Counts of a layer's heads, drawn together into few lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def grouped_counts(
    counts: Sequence[int] | np.ndarray, max_groups: int, most: np.ndarray | None = None
) -> np.ndarray:
    """The nearest counts that have at most `max_groups` different values and the same sum.

    Heads of similar counts get their mean (the split minimises the squared change). Where the
    means are not whole, one group is split in two that differ by one row. With
    `max_groups` 1 that is not possible: the common count is then rounded down.

    Args:
        counts: [H] whole numbers >= 0.
        max_groups: >= 1.
        most: [H] what each head holds; a count is cut to it.

    Returns:
        [H] int64.
    """
    before = np.asarray(counts, np.int64)
    if len(np.unique(before)) <= max_groups:
        return before if most is None else np.minimum(before, most)
    order = np.argsort(before, kind="stable")
    result = np.empty_like(before)
    top = int(before.max()) + 1 if most is None else int(np.max(most))
    result[order] = _levelled(before[order], max_groups, top)
    return result if most is None else np.minimum(result, most)


def _levelled(ordered: np.ndarray, max_groups: int, top: int) -> np.ndarray:
    """Levels [H] of ascending counts, none above `top`."""
    edges = _clusters(ordered, max_groups)
    level = _means(ordered, edges)
    steps = _steps(level, edges, int(ordered.sum() - level.sum()), int(ordered[0]), top)
    if steps is None and max_groups > 1:
        # One group fewer, and one of them in two.
        edges = _clusters(ordered, max_groups - 1)
        level = _means(ordered, edges)
        return _split(ordered, level, edges)
    for (start, stop), step in zip(edges, steps or (), strict=False):
        level[start:stop] += step
    return level


def _means(ordered: np.ndarray, edges: list[tuple[int, int]]) -> np.ndarray:
    """Each run's mean, rounded down."""
    level = np.empty_like(ordered)
    for start, stop in edges:
        level[start:stop] = ordered[start:stop].sum() // (stop - start)
    return level


def _steps(
    level: np.ndarray, edges: list[tuple[int, int]], left: int, bottom: int, top: int
) -> tuple[int, ...] | None:
    """Whole steps per run that use up exactly `left` rows at the least change, or None."""
    reached: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for start, stop in edges:
        size, now = stop - start, int(level[start])
        allowed = [step for step in (0, 1, -1, 2) if bottom <= now + step <= top]
        after: dict[int, tuple[int, tuple[int, ...]]] = {}
        for used, (change, steps) in reached.items():
            for step in allowed:
                total, cost = used + size * step, change + size * step * step
                if total not in after or cost < after[total][0]:
                    after[total] = (cost, (*steps, step))
        reached = after
    return reached[left][1] if left in reached else None


def _split(ordered: np.ndarray, level: np.ndarray, edges: list[tuple[int, int]]) -> np.ndarray:
    """Use up what rounding cut off: whole runs get one row more, part of one run the rest."""
    left = int(ordered.sum() - level.sum())
    cut = [int(ordered[a:b].sum()) % (b - a) / (b - a) for a, b in edges]
    for index in np.argsort(cut)[::-1]:  # those that lost most come first
        start, stop = edges[index]
        if cut[index] == 0 or not left:
            break
        more = min(left, stop - start)
        level[stop - more : stop] += 1
        left -= more
    return level


def _clusters(ordered: np.ndarray, groups: int) -> list[tuple[int, int]]:
    """At most `groups` runs of ascending values with the least squared deviation in all."""
    heads = len(ordered)
    value = ordered.astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(value)])
    squares = np.concatenate([[0.0], np.cumsum(value * value)])
    start = np.arange(heads)

    def cost(stop: int) -> np.ndarray:
        """Squared deviation of the run [start, stop) for every start below stop."""
        count = stop - start[:stop]
        inside = sums[stop] - sums[:stop]
        return squares[stop] - squares[:stop] - inside * inside / count

    best = np.full(heads + 1, np.inf)
    best[0] = 0.0
    cuts: list[np.ndarray] = []
    for _ in range(min(groups, heads)):
        now, came = np.full(heads + 1, np.inf), np.zeros(heads + 1, np.int64)
        now[0] = 0.0
        for stop in range(1, heads + 1):
            candidates = best[:stop] + cost(stop)
            came[stop] = int(candidates.argmin())
            now[stop] = candidates[came[stop]]
        best = now
        cuts.append(came)
    edges, stop = [], heads
    for came in reversed(cuts):
        if stop == 0:
            break
        edges.append((int(came[stop]), stop))
        stop = int(came[stop])
    return edges[::-1]
