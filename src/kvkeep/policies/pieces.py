"""Work over a layer's rows in float32 pieces: no temporary of the size of the layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx

from kvkeep.policies.window import PIECE_BYTES


def spans(rows: mx.array, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of positions whose float32 rows fit `PIECE_BYTES`.

    Args:
        rows: [H_kv, T, D].
        multiple: every range but the last holds a whole number of blocks of this many.
    """
    heads, length, dim = rows.shape
    blocks = max(PIECE_BYTES // (4 * heads * dim * multiple), 1)
    step = blocks * multiple
    for start in range(0, length, step):
        yield start, min(start + step, length)


def by_position(
    rows: mx.array, function: Callable[[mx.array], mx.array], multiple: int = 1
) -> mx.array:
    """`function` of each piece [H_kv, t, D] float32, which gives [H_kv, t]: joined [H_kv, T].

    Args:
        rows: [H_kv, T, D], any float dtype.
        function: must not look beyond a block of `multiple` positions.
        multiple: positions per block; pieces begin at block borders.
    """
    pieces = []
    for start, stop in spans(rows, multiple):
        pieces.append(function(rows[:, start:stop].astype(mx.float32)))
        mx.eval(pieces[-1])
    return mx.concatenate(pieces, axis=1)


def squares(rows: mx.array) -> mx.array:
    """Squared length of each row: [..., D] to [...]."""
    return mx.square(rows).sum(axis=-1)


def unit(rows: mx.array) -> mx.array:
    """Rows [..., D] at length 1; those of length 0 stay as they are."""
    return rows / mx.maximum(mx.sqrt(squares(rows)), 1e-12)[..., None]


def mean_direction(rows: mx.array) -> mx.array:
    """Mean over positions of the rows at length 1: [H_kv, T, D] to [H_kv, 1, D] float32."""
    heads, length, dim = rows.shape
    mean = mx.zeros((heads, 1, dim))
    for start, stop in spans(rows):
        piece = unit(rows[:, start:stop].astype(mx.float32))
        mean = mean + piece.sum(axis=1, keepdims=True) / length
        mx.eval(mean)
    return mean
