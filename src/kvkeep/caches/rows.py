"""Row storage: growing K/V buffers and gathering rows per head."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kvkeep.errors import CacheError

STEP = 256  # mlx-lm's KVCache grows by the same number, so decode allocates alike.


def with_room(buffer: mx.array | None, used: int, new: mx.array) -> mx.array:
    """A buffer that holds `used` rows of `buffer` and has room for those of `new`.

    Args:
        buffer: [B, H_kv, capacity, D] or None.
        used: live rows.
        new: [B, H_kv, n, D], rows about to be written.

    Raises:
        CacheError: batch, head count or head size of `new` differs from the buffer's.
    """
    batch, heads, count, dim = new.shape
    if buffer is not None:
        held = buffer.shape  # mlx builds a new tuple at each call: a cost per layer and token
        if held[0] != batch or held[1] != heads or held[3] != dim:
            raise CacheError(
                "new rows do not fit the cache",
                expected=f"[{held[0]}, {held[1]}, n, {held[3]}]",
                received=f"{[batch, heads, count, dim]}",
            )
        if used + count <= held[2]:
            return buffer
    room = mx.zeros((batch, heads, -(-count // STEP) * STEP, dim), new.dtype)
    if buffer is None:
        return room
    return mx.concatenate([buffer[..., :used, :], room], axis=2)


def require_single(rows: mx.array) -> None:
    """Refuse rows [B, H_kv, n, D] of more than one request.

    Raises:
        CacheError: B is not 1.
    """
    if rows.shape[0] != 1:
        raise CacheError(
            "a batch where one request is meant",
            expected="rows [1, H_kv, R, D]",
            received=f"batch {rows.shape[0]}",
            remedy="Build one cache per request and merge() them.",
        )


def row_nbytes(keys: mx.array, values: mx.array) -> int:
    """Bytes of one row of one head, K and V."""
    return sum(side.shape[-1] * side.itemsize for side in (keys, values))


def gather_rows(buffer: mx.array, rows: np.ndarray) -> mx.array:
    """Copy rows out of a buffer into a new, exactly sized array.

    Args:
        buffer: [1, H_kv, capacity, D].
        rows: int [R] or [1, R] for all heads, or [H_kv, R], each below capacity.

    Returns:
        [1, H_kv, R, D], bit-equal rows.
    """
    _, heads, capacity, dim = buffer.shape
    if rows.ndim == 2 and len(rows) == 1:
        rows = rows[0]
    if rows.shape[-1] == 0:
        return buffer[..., :0, :]
    if rows.ndim == 1:
        return mx.take(buffer, mx.array(rows.astype(np.int32)), axis=2)
    # One flat take: an index array broadcast over D would cost as much as the rows.
    flat = rows.astype(np.int64) + np.arange(heads)[:, None] * capacity
    index = mx.array(flat.reshape(-1).astype(np.uint32))
    return mx.take(buffer.reshape(-1, dim), index, axis=0).reshape(1, heads, -1, dim)


def shift_right(buffer: mx.array, shifts: np.ndarray) -> mx.array:
    """Move each batch row's cache rows right by its shift; what falls off the end is lost.

    Args:
        buffer: [B, H_kv, rows, D].
        shifts: int [B]; the freed rows in front are left padding (they repeat row 0).
    """
    target = np.arange(buffer.shape[2])
    source = np.clip(target[None] - shifts[:, None], 0, None).astype(np.int32)
    index = mx.array(source)[:, None, :, None]
    return mx.take_along_axis(buffer, index, axis=2)
