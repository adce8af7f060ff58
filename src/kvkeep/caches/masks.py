"""Masks over physical rows: causal, with dead rows in front."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np

# Layers of one forward share the last mask; per thread, since MLX streams are.
_last = threading.local()


def padded_causal_mask(pads: tuple[tuple[int, ...], ...], rows: int, n: int) -> mx.array:
    """Which rows the last `n` tokens may attend to, given dead rows in front.

    Args:
        pads: for each batch row, the dead rows per KV head (or one entry for all heads).
        rows: physical rows, the `n` new ones included.
        n: query tokens, aligned with the last rows.

    Returns:
        bool [B, H_kv or 1, n, rows].
    """
    key = (pads, rows, n)
    if getattr(_last, "key", None) == key:
        return _last.mask
    heads = max(len(row) for row in pads)
    table = np.array([row if len(row) == heads else row * heads for row in pads], np.int32)
    index = mx.arange(rows)
    mask = index >= mx.array(table)[:, :, None, None]
    if n > 1:
        mask = mask & (index[None] <= mx.arange(rows - n, rows)[:, None])
    _last.key, _last.mask = key, mask
    return mask


def made_last(pads: tuple[tuple[int, ...], ...], rows: int, n: int) -> bool:
    """Whether this thread's last `padded_causal_mask` was for these rows."""
    return getattr(_last, "key", None) == (pads, rows, n)


def for_query_heads(mask: mx.array, query_heads: int) -> mx.array:
    """Repeat a per-KV-head mask [B, H_kv, n, rows] for its query heads [B, H_q, n, rows]."""
    heads = mask.shape[1]
    return mask if heads in (1, query_heads) else mx.repeat(mask, query_heads // heads, axis=1)


def noted_window_mask(mask: mx.array) -> mx.array:
    """The mask itself, once `is_window_mask` knows it (this thread's last one)."""
    _last.window = mask
    return mask


def is_window_mask(mask: mx.array) -> bool:
    """Whether a compact cache made this mask for a sliding window."""
    return getattr(_last, "window", None) is mask


def noted_own_mask(mask: mx.array) -> mx.array:
    """The mask itself, once `is_own_mask` knows it (this thread's last one)."""
    _last.own = mask
    return mask


def is_own_mask(mask: mx.array) -> bool:
    """Whether a cache made this mask for the heads of its own layer only."""
    return getattr(_last, "own", None) is mask
