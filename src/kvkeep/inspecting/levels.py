"""Scores in one byte, and kept positions of many budgets in little more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LEVELS = 256
#: A position that no budget of the ladder keeps.
NEVER = 255


def quantised(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores as levels, and what each level stands for.

    Levels are cut evenly from the mean of two scales, the score's place among the others and
    its place between the lowest and the highest: the first tells equal-looking low scores
    apart, the second the few high ones. A higher score never has a lower level.

    Args:
        scores: [T], finite.

    Returns:
        uint8 [T], and float32 [256]: the mean score of a level, 0 where none has it.
    """
    values = scores.astype(np.float64)
    ordered = np.sort(values)
    below = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
    rank = below / (2 * len(values))
    width = ordered[-1] - ordered[0]
    place = (values - ordered[0]) / width if width > 0 else np.zeros_like(values)
    levels = np.rint((rank + place) / 2 * (LEVELS - 1)).astype(np.uint8)
    counts = np.bincount(levels, minlength=LEVELS)
    sums = np.bincount(levels, values, minlength=LEVELS)
    return levels, (sums / np.maximum(counts, 1)).astype(np.float32)


def first_rungs(kept: Sequence[np.ndarray]) -> np.ndarray | None:
    """The first budget that keeps a position, where every larger one keeps it too.

    Args:
        kept: bool [S, T] for each of at most 255 budgets, from the fewest rows to the most.

    Returns:
        uint8 [S, T], `NEVER` where none keeps it; None where a larger budget gives a kept
        position up.
    """
    rungs = np.stack(kept)
    if len(rungs) > NEVER or (rungs[:-1] & ~rungs[1:]).any():
        return None
    first = np.argmax(rungs, axis=0)
    return np.where(rungs.any(axis=0), first, NEVER).astype(np.uint8)


def packed(kept: Sequence[np.ndarray]) -> np.ndarray:
    """The same as bits, the first position lowest: uint8 [budgets, S, ceil(T / 8)]."""
    return np.packbits(np.stack(kept), axis=-1, bitorder="little")
