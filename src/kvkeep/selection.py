"""From scores to kept positions: the one place where rows are chosen.

Order of precedence, in every function: protected positions, first positions (sinks), last
positions (recent), then the highest scores; of equal scores the later position stays.
Choosing takes O(T) per head: a partition finds the threshold, nothing is sorted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from kvkeep.errors import BudgetError, SelectionError
from kvkeep.spec import checked_count, parse_ranges

#: One score per position, or one row of them per head; higher = keep.
Scores: TypeAlias = Sequence[float] | Sequence[Sequence[float]] | np.ndarray | mx.array


def select_rows(
    scores: Scores,
    keep: int,
    *,
    sinks: int = 0,
    recent: int = 0,
    protected: Sequence[tuple[int, int]] = (),
) -> np.ndarray:
    """Positions to keep per head.

    Protected positions always stay. What is left of `keep` goes to the first `sinks`
    positions, then to the last `recent` (the latest first), then to the highest scores,
    ties to the later position.

    Args:
        scores: [H, T], or [T] for one head; any real dtype, finite.
        keep: rows per head; T where it is more.
        sinks: first positions to keep; they shrink to what is left.
        recent: last positions to keep; they shrink to what is left.
        protected: half-open ranges [start, stop), clipped to T; they may overlap.

    Returns:
        [H, min(keep, T)] int32, ascending and unique per head.

    Raises:
        BudgetError: `keep` is no whole number >= 1, or less than the protected positions.
        ConfigError: a range is unreadable; `sinks` or `recent` is negative.
        SelectionError: the scores have another shape or are not finite numbers.
    """
    rows = _finite(_per_head(scores))
    forced = _inside(protected, rows.shape[1])
    return _select(rows, keep, forced, sinks=sinks, recent=recent)


def select_unequal_rows(
    scores: Scores,
    counts: Sequence[int] | np.ndarray,
    *,
    sinks: int = 0,
    recent: int = 0,
    protected: Sequence[tuple[int, int]] = (),
) -> list[np.ndarray]:
    """As `select_rows`, with a number of rows for each head.

    Args:
        scores: [H, T].
        counts: [H] rows to keep.

    Returns:
        H arrays [min(counts[h], T)] int32, ascending and unique.

    Raises:
        BudgetError, ConfigError, SelectionError: as `select_rows`, or H counts are not given.
    """
    rows, asked = _finite(_per_head(scores)), np.asarray(counts)
    if asked.shape != (len(rows),):
        raise SelectionError(
            "counts do not fit the heads",
            expected=f"{len(rows)} counts",
            received=f"shape {asked.shape}",
        )
    chosen: dict[int, np.ndarray] = {}
    for count in np.unique(asked):
        (heads,) = np.nonzero(asked == count)
        forced = _inside(protected, rows.shape[1])
        kept = _select(rows[heads], count, forced, sinks=sinks, recent=recent)
        chosen.update(zip(heads.tolist(), kept, strict=True))
    return [chosen[head] for head in range(len(rows))]


def forced_rows(
    length: int,
    keep: int,
    *,
    sinks: int = 0,
    recent: int = 0,
    protected: Sequence[tuple[int, int]] = (),
) -> np.ndarray:
    """Which rows stay whatever they score, in a budget of `keep`: bool [T].

    Raises:
        BudgetError, ConfigError: as `select_rows`.
    """
    forced = _inside(protected, length)
    _force_ends(forced, min(keep, length), sinks=sinks, recent=recent)
    return forced


def _inside(protected: Sequence[tuple[int, int]], length: int) -> np.ndarray:
    """Which of `length` positions lie in one of the ranges."""
    inside = np.zeros(length, dtype=np.bool_)
    for start, stop in parse_ranges(protected):
        inside[start:stop] = True
    return inside


def topk_indices_per_head(
    score: Scores, keep: int, always_keep: Sequence[int] | np.ndarray | mx.array | None = None
) -> np.ndarray:
    """The `keep` highest-scored positions of each head.

    Args:
        score: [H, T], or [T] for one head; any real dtype, finite.
        keep: rows per head; T where it is more.
        always_keep: positions that each head keeps whatever their score, counted inside
            `keep`; in any order, repeats allowed.

    Returns:
        [H, min(keep, T)] int32, ascending and unique per head.

    Raises:
        BudgetError: `keep` is no whole number >= 1, or less than `always_keep` names.
        SelectionError: the scores have another shape or are not finite numbers, or a
            position is not a whole number in [0, T).
    """
    rows = _finite(_per_head(score))
    forced = np.zeros(rows.shape[1], dtype=np.bool_)
    if always_keep is not None:
        forced[_positions_below(rows.shape[1], always_keep)] = True
    return _select(rows, keep, forced)


def snapkv_keep_indices(
    seq_len: int,
    budget: int,
    scores: Scores,
    *,
    sink_tokens: int = 4,
    recent_tokens: int | None = None,
    min_tokens: int = 128,
    guarantee_sinks: bool = True,
) -> tuple[int, ...]:
    """Prompt positions that SnapKV-D keeps, one set for all layers and heads.

    The first positions (sinks), a recent window, and the highest-scored of the rest, ties to
    the later position. Everything is kept when `seq_len` is at most `min_tokens` or `budget`.

    Args:
        seq_len: prompt positions.
        budget: positions to keep.
        scores: [at least seq_len], finite; what comes after `seq_len` is not looked at.
        sink_tokens: first positions to keep, at most `budget`.
        recent_tokens: last positions to keep, at most what the sinks leave; None is
            max(1, budget // 8).
        min_tokens: prompts of at most this many positions are kept whole.
        guarantee_sinks: False caps the sinks at max(1, budget // 8), so that a small budget
            has room for scores.

    Returns:
        min(budget, seq_len) positions, or all; ascending and unique.

    Raises:
        BudgetError: `budget` is no whole number >= 1.
        ConfigError: another count is no whole number >= 0.
        SelectionError: `seq_len` is negative, or the scores are too few, not
            one-dimensional, or not finite numbers.
    """
    length = checked_count("seq_len", seq_len, 0, SelectionError)
    rows = checked_count("budget", budget, 1, BudgetError)
    sinks = checked_count("sink_tokens", sink_tokens, 0)
    share = max(1, rows // 8)
    recent = share if recent_tokens is None else checked_count("recent_tokens", recent_tokens, 0)
    whole = length <= checked_count("min_tokens", min_tokens, 0)
    per_position = _finite(_prefix(scores, length)[None])
    if whole or length <= rows:
        return tuple(range(length))
    if not guarantee_sinks:
        sinks = min(sinks, share)
    forced = np.zeros(length, dtype=np.bool_)
    return tuple(_select(per_position, rows, forced, sinks=sinks, recent=recent)[0].tolist())


def sink_recent_indices(T: int, keep: int, sinks: int = 4) -> np.ndarray:
    """The first `sinks` positions and the most recent others (StreamingLLM-inspired).

    Unlike StreamingLLM (arXiv 2309.17453), the kept rows stay at their own positions.

    Returns:
        [min(keep, T)] int32, ascending and unique; the sinks shrink to `keep`.

    Raises:
        BudgetError: `keep` is no whole number >= 1.
        ConfigError: `sinks` is no whole number >= 0.
        SelectionError: `T` is no whole number >= 0.
    """
    length = checked_count("T", T, 0, SelectionError)
    rows = min(checked_count("keep", keep, 1, BudgetError), length)
    first = min(checked_count("sinks", sinks, 0), rows)
    last = np.arange(length - (rows - first), length, dtype=np.int32)
    return np.concatenate([np.arange(first, dtype=np.int32), last])


def random_indices(T: int, keep: int, seed: int) -> np.ndarray:
    """Positions drawn without replacement: the control at the same budget.

    Returns:
        [min(keep, T)] int32, ascending and unique; the same seed draws the same.

    Raises:
        BudgetError: `keep` is no whole number >= 1.
        ConfigError: `seed` is no whole number >= 0.
        SelectionError: `T` is no whole number >= 0.
    """
    length = checked_count("T", T, 0, SelectionError)
    rows = min(checked_count("keep", keep, 1, BudgetError), length)
    generator = np.random.default_rng(checked_count("seed", seed, 0))
    return np.sort(generator.choice(length, rows, replace=False, shuffle=False)).astype(np.int32)


def _select(
    scores: np.ndarray, keep: int, forced: np.ndarray, *, sinks: int = 0, recent: int = 0
) -> np.ndarray:
    """[H, min(keep, T)] positions of scores [H, T]; `forced` [T] is filled in place."""
    heads, length = scores.shape
    rows = min(checked_count("keep", keep, 1, BudgetError), length)
    left = _force_ends(forced, rows, sinks=sinks, recent=recent)
    kept = _with_highest(scores, forced, left)
    flat = np.flatnonzero(kept).reshape(heads, rows)
    return (flat - np.arange(heads)[:, None] * length).astype(np.int32)


def _force_ends(forced: np.ndarray, rows: int, *, sinks: int, recent: int) -> int:
    """Add first and last positions to `forced` [T], in place: what is left of `rows`.

    Raises:
        BudgetError: the rows do not hold what is forced already.
    """
    length = len(forced)
    left = rows - int(np.count_nonzero(forced))
    if left < 0:
        raise BudgetError(
            f"{rows} rows cannot hold the {rows - left} protected positions",
            expected=f"at least {rows - left} rows per head",
            received=f"{rows}",
            remedy="Raise the budget or protect fewer positions.",
        )
    first = np.flatnonzero(~forced[: checked_count("sinks", sinks, 0)])[:left]
    forced[first] = True
    start = length - min(checked_count("recent", recent, 0), length)
    # The slice starts from a length, since [-0:] would be everything.
    last = start + np.flatnonzero(~forced[start:])
    last = last[max(0, len(last) - (left - len(first))) :]
    forced[last] = True
    return left - len(first) - len(last)


def _with_highest(scores: np.ndarray, forced: np.ndarray, count: int) -> np.ndarray:
    """Mask [H, T]: the forced positions and, per head, the `count` highest of the others."""
    kept = np.repeat(forced[None], len(scores), axis=0)
    if count == 0:
        return kept
    free = _free(forced)
    pool = scores[:, free]
    cut = _nth_highest(pool, count)
    above = pool > cut
    tied = pool == cut
    missing = count - np.count_nonzero(above, axis=1)
    surplus = np.flatnonzero(np.count_nonzero(tied, axis=1) > missing)
    if len(surplus):
        from_end = np.cumsum(tied[surplus, ::-1], axis=1, dtype=np.int32)[:, ::-1]
        tied[surplus] &= from_end <= missing[surplus, None]
    kept[:, free] = np.logical_or(above, tied, out=above)
    return kept


def _nth_highest(pool: np.ndarray, count: int) -> np.ndarray:
    """[H, 1]: per head the `count`-th highest of pool [H, C]."""
    heads, size = pool.shape
    groups = 4 * count
    width = size // groups
    if width < 8:
        return np.partition(pool, -count, axis=1)[:, -count, None]
    # `count` groups hold a value as high as the count-th highest group maximum, so the answer
    # is no lower: only the few values that reach it need a partition. Groups are strided, since
    # neighbours tend to be high together.
    maxima = pool[:, : width * groups].reshape(heads, width, groups).max(axis=1)
    floors = np.partition(maxima, -count, axis=1)[:, -count]
    cuts = [
        np.partition(row[row >= floor], -count)[-count]
        for row, floor in zip(pool, floors, strict=True)
    ]
    return np.array(cuts, dtype=pool.dtype)[:, None]


def _free(forced: np.ndarray) -> slice | np.ndarray:
    """The positions that are not forced: as a slice (no gather) when they are one run."""
    free = ~forced
    start, stop = int(free.argmax()), len(free) - int(free[::-1].argmax())
    if np.count_nonzero(free) == stop - start:
        return slice(start, stop)
    return np.flatnonzero(free)


def _numbers(scores: Scores) -> np.ndarray:
    """Scores as an array of integers, float32 or wider, whichever holds them exactly."""
    if isinstance(scores, mx.array) and scores.dtype == mx.bfloat16:
        scores = scores.astype(mx.float32)
    try:
        if isinstance(scores, list | tuple) and scores and type(scores[0]) is float:
            # Faster than np.asarray, which asks each element for its type first.
            return np.frombuffer(array("d", scores), dtype=np.float64)  # type: ignore[arg-type]
        numbers = np.asarray(scores)
    except (TypeError, ValueError, OverflowError) as error:
        raise SelectionError(
            "unreadable scores",
            expected="numbers, the same count for each head",
            received=f"{type(scores).__name__} ({error})",
        ) from error
    if numbers.dtype.kind not in "fiub":
        raise SelectionError(
            "unreadable scores", expected="real numbers", received=f"dtype {numbers.dtype}"
        )
    return numbers.astype(np.float32) if numbers.dtype == np.float16 else numbers


def _per_head(scores: Scores) -> np.ndarray:
    """Scores as [H, T], H >= 1."""
    numbers = _numbers(scores)
    rows = numbers[None] if numbers.ndim == 1 else numbers
    if rows.ndim != 2 or len(rows) == 0:
        raise SelectionError(
            "scores of the wrong shape",
            expected="[heads, positions] or [positions]",
            received=f"shape {numbers.shape}",
        )
    return rows


def _prefix(scores: Scores, length: int) -> np.ndarray:
    """The first `length` of one-dimensional scores."""
    numbers = _numbers(scores)
    if numbers.ndim != 1:
        raise SelectionError(
            "scores of the wrong shape",
            expected=f"one dimension of at least {length} positions",
            received=f"shape {numbers.shape}",
        )
    if len(numbers) < length:
        raise SelectionError(
            "fewer scores than positions",
            expected=f"at least {length} scores",
            received=f"{len(numbers)}",
        )
    return numbers[:length]


def _finite(rows: np.ndarray) -> np.ndarray:
    """`rows` [H, T] itself, once it is known to hold no NaN and no infinity."""
    finite = np.isfinite(rows)
    if not finite.all():
        head, position = np.unravel_index(int(finite.argmin()), rows.shape)
        where = f"position {position}" + (f" of head {head}" if len(rows) > 1 else "")
        raise SelectionError(
            "scores are not finite",
            expected="finite numbers only",
            received=f"{np.count_nonzero(~finite)} of {rows.size} NaN or infinite,"
            f" the first ({rows[head, position]}) at {where}",
        )
    return rows


def _positions_below(length: int, positions: Sequence[int] | np.ndarray | mx.array) -> np.ndarray:
    """Positions in any order, as an array that indexes [length]."""
    indices = np.asarray(positions)
    if indices.size == 0:
        return np.zeros(0, dtype=np.int64)
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise SelectionError(
            "unreadable positions to keep",
            expected="a one-dimensional sequence of whole numbers",
            received=f"{indices.ndim} dimensions of {indices.dtype}",
        )
    outside = (indices < 0) | (indices >= length)
    if outside.any():
        raise SelectionError(
            "position to keep out of range",
            expected=f"positions from 0 to {length - 1}",
            received=f"{indices[outside][0]}",
        )
    return indices
