"""From scores per query head to scores per KV head, with the window on top."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from kvkeep.policies.window import PIECE_BYTES, pooled


def grouped(
    per_head: Callable[[int, int], mx.array],
    heads: int,
    kv_heads: int,
    length: int,
    width: int,
    kernel: int,
    pooling: str,
    group: str = "mean",
) -> mx.array:
    """Pool the prefix per query head, reduce the group, put the window on top.

    The order matters: max pooling and the mean do not commute.

    Args:
        per_head: (first, stop) -> scores [stop - first, T - W] of these query heads, float32.
        heads, kv_heads, length, width: H_q, H_kv, T, W.
        kernel, pooling: as in `pooled`.
        group: "mean" or "max" over the query heads of a KV head.

    Returns:
        [H_kv, T] float32; the last W positions hold the layer's maximum + 1.
    """
    size, prefix = heads // kv_heads, length - width
    if prefix == 0:
        return mx.ones((kv_heads, length))
    # A few heads at once: pooling takes several arrays of the size of what it pools.
    at_once = max(PIECE_BYTES // (16 * size * length), 1) * size
    blocks = []
    for first in range(0, heads, at_once):
        block = pooled(per_head(first, min(first + at_once, heads)), kernel, pooling)
        block = block.reshape(-1, size, prefix)
        blocks.append(block.max(axis=1) if group == "max" else block.mean(axis=1))
        mx.eval(blocks[-1])
    scores = mx.concatenate(blocks, axis=0)
    window = mx.broadcast_to(scores.max() + 1, (kv_heads, width))
    return mx.concatenate([scores, window], axis=1)
