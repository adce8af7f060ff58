"""Softmax attention of the observation window over all keys, in bounded pieces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from kvkeep.errors import ConfigError
from kvkeep.policies.softmax import exp, softmax
from kvkeep.spec import LayerView

# Bound of one float32 temporary. A handful are alive at once, so scoring stays under
# 64 MB at T = 131,072 for 32 query heads, whatever the window.
PIECE_BYTES = 8 * 2**20

Reduce = Callable[[mx.array], mx.array]
Bias = Callable[[int, int], mx.array]


def window_attention(
    queries: mx.array,
    keys: mx.array,
    scale: float,
    reduce: Reduce,
    *,
    sinks: mx.array | None = None,
    bias: Bias | None = None,
    factors: Bias | None = None,
    beside: mx.array | None = None,
) -> mx.array:
    """Attention weights of the window's queries, reduced before they pile up.

    The softmax is taken in float32 over all keys, also from float16 or bfloat16 rows:
    scores that tie only by rounding would evict at random. Two passes over the keys
    (normaliser, then weights) keep every temporary within `PIECE_BYTES`.

    Args:
        queries: [H_q, w, D], post-RoPE, of the last w rows.
        keys: [H_kv, T, D].
        scale: multiplies q.k.
        reduce: maps weights [H_kv, G, w, t] of t keys to an array [..., t].
        sinks: [H_q] logits that share the softmax and get no row, or None.
        bias: replaces the causal mask: (start, stop) -> additive float32 array that
            broadcasts to [H_kv, G, w, stop - start].
        factors: what weights are multiplied by before they are reduced: (start, stop) ->
            float32 array that broadcasts to [H_kv, G, w, stop - start]. The softmax is as before.
        beside: [H_q, w] float32, log-sum-exp of logits of other keys that share the softmax and
            get no row, or None.

    Returns:
        The reduced pieces, joined along the last axis: [..., T] float32.
    """
    heads, width, dim = queries.shape
    kv_heads, length, _ = keys.shape
    grouped = queries.astype(mx.float32).reshape(kv_heads, heads // kv_heads, width, dim) * scale
    flat = grouped.reshape(kv_heads, -1, dim)
    causal = bias or _causal(length, width)

    def logits(start: int, stop: int) -> mx.array:
        piece = keys[:, start:stop].astype(mx.float32)
        product = (flat @ piece.swapaxes(-1, -2)).reshape(*grouped.shape[:3], stop - start)
        in_window = bias is not None or stop > length - width
        return product + causal(start, stop) if in_window else product

    def reduced(weights: mx.array, start: int, stop: int) -> mx.array:
        return reduce(weights if factors is None else weights * factors(start, stop))

    step = max(min(PIECE_BYTES // (4 * heads * width), PIECE_BYTES // (4 * kv_heads * dim)), 64)
    spans = [(start, min(start + step, length)) for start in range(0, length, step)]
    total = None if sinks is None else sinks.astype(mx.float32).reshape(kv_heads, -1, 1, 1)
    if beside is not None:
        others = beside.reshape(*grouped.shape[:3], 1)
        total = others if total is None else mx.logaddexp(total, others)
    if len(spans) == 1:
        scores = logits(0, length)
        if total is None:  # one exponential per weight instead of two: they are the cost here
            return reduced(softmax(scores), 0, length)
        return reduced(exp(scores - _logsumexp(scores, total)), 0, length)
    for span in spans:
        total = _logsumexp(logits(*span), total)
        mx.eval(total)
    assert total is not None  # there is a span: T >= 1
    pieces = []
    for span in spans:
        pieces.append(reduced(exp(logits(*span) - total), *span))
        mx.eval(pieces[-1])
    return mx.concatenate(pieces, axis=-1)


def window_mass(view: LayerView) -> mx.array:
    """Attention that each key gets from each query head, summed over the window.

    Returns:
        [H_q, T] float32: the sum over the W queries of softmax(q k^T * scale), causal
        inside the window.

    Raises:
        ConfigError: the view has no queries, or more of them than keys.
    """
    return _over_window(view, _sum_window)


def window_moments(view: LayerView) -> mx.array:
    """As `window_mass`, with the sum of the squared weights beside it: [2, H_q, T] float32.

    Raises:
        ConfigError: the view has no queries, or more of them than keys.
    """
    return _over_window(view, _sum_window_twice)


def window_shape(view: LayerView) -> mx.array:
    """As `window_moments`, with the entropy terms beside it: [3, H_q, T] float32.

    The third part is the sum over the window of -a log a, of each weight a.

    Raises:
        ConfigError: the view has no queries, or more of them than keys.
    """
    return _over_window(view, _sum_window_shape)


def window_cubes(view: LayerView, gap: int) -> mx.array:
    """Cubed attention that each key gets from each query head, later queries counting more.

    Args:
        view: with queries.
        gap: attention counts only from queries at least so many positions after the key:
            what stands close by is read whatever it says.

    Returns:
        [H_q, T] float32: the sum over the W queries of c_i * a_i^3, where a_i is the attention
        of the i-th and c_i = (i + 1) / (1 + 2 + ... + W).

    Raises:
        ConfigError: the view has no queries, or more of them than keys.
    """
    width = 0 if view.queries is None else view.queries.shape[1]
    lateness = mx.arange(1, width + 1, dtype=mx.float32) * (2 / max(width * (width + 1), 1))

    def cubes(weights: mx.array, first: int) -> mx.array:
        late = lateness[first : first + weights.shape[2]]
        return (weights * weights * weights * late[:, None]).sum(axis=2)

    return _by_query(view, cubes, gap)


def _over_window(view: LayerView, reduce: Reduce) -> mx.array:
    """Sum of `reduce` over the window's queries, a few at a time: [..., H_q, T].

    `reduce` maps weights [H_kv, G, w, t] to [..., H_kv, G, t] and must be a sum over w.
    """
    return _by_query(view, lambda weights, first: reduce(weights))


def _by_query(view: LayerView, reduce: Callable[..., mx.array], gap: int = 0) -> mx.array:
    """As `_over_window`, with the index of the first of the queries told to `reduce`.

    Attention to keys fewer than `gap` positions before the query counts as none.
    """
    if view.queries is None:
        raise ConfigError(
            "no window queries for a policy that needs them",
            expected="a LayerView with queries [H_q, W, D]",
            received="None",
        )
    heads, width, _ = view.queries.shape
    length = view.keys.shape[1]
    if not 0 < width <= length:
        raise ConfigError(
            "window queries do not fit the keys",
            expected=f"between 1 and {length} queries, those of the last positions",
            received=f"{width}",
        )
    total = None
    small = 4 * heads * width * length <= PIECE_BYTES
    for start in range(0, width, view.score_chunk_size):
        stop = min(start + view.score_chunk_size, width)
        rows = view.queries[:, start:stop]
        visible = length - (width - stop)  # keys after this chunk's last query are not seen
        part = window_attention(
            rows,
            view.keys[:, :visible],
            view.scale,
            partial(reduce, first=start),
            sinks=view.sinks,
            factors=apart(length - width + start, stop - start, gap) if gap else None,
        )
        part = part.reshape(*part.shape[:-3], heads, visible)
        if visible < length:
            part = mx.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, length - visible)])
        total = part if total is None else total + part
        if not small:  # a GPU should not wait for each chunk of a short prompt
            mx.eval(total)
    assert total is not None  # there is a query
    return total


def pooled(scores: mx.array, kernel: int, kind: str, *, edge: bool = False) -> mx.array:
    """Sliding "avg" (constant divisor) or "max" over positions, stride 1.

    Args:
        scores: [H, T] float32, non-negative.
        kernel: odd width; 1 and "none" leave the scores as they are.
        kind: "avg", "max" or "none".
        edge: pad with the first and the last score instead of zeros.

    Returns:
        [H, T] float32.
    """
    if kind == "none" or kernel == 1 or scores.shape[-1] == 0:
        return scores
    side = kernel // 2
    padded = mx.pad(scores, [(0, 0), (side, side)], mode="edge" if edge else "constant")
    if kind == "max":
        return _sliding(padded, kernel, mx.maximum)
    return _sliding(padded, kernel, mx.add) / kernel


def _sliding(x: mx.array, kernel: int, op: Callable[[mx.array, mx.array], mx.array]) -> mx.array:
    """Combine every run of `kernel` entries by doubling: log2(kernel) passes."""
    length = x.shape[-1] - kernel + 1
    result, offset, width, runs = None, 0, 1, x
    while True:
        if kernel & width:
            piece = runs[..., offset : offset + length]
            result = piece if result is None else op(result, piece)
            offset += width
        if 2 * width > kernel:
            assert result is not None  # kernel has at least one bit
            return result
        runs = op(runs[..., :-width], runs[..., width:])
        width *= 2


def apart(first: int, count: int, gap: int) -> Bias:
    """1 where a key stands at least `gap` before the query, else 0; queries from `first` on."""

    def factors(start: int, stop: int) -> mx.array:
        if stop <= first - gap + 1:
            return mx.array(1.0)
        last = mx.arange(first - gap, first - gap + count)[:, None]
        return (mx.arange(start, stop)[None] <= last).astype(mx.float32)

    return factors


def _causal(length: int, width: int) -> Bias:
    first = length - width

    def bias(start: int, stop: int) -> mx.array:
        rows = mx.arange(first, length)[:, None]
        return mx.where(mx.arange(start, stop)[None] <= rows, 0.0, -mx.inf)

    return bias


def _logsumexp(scores: mx.array, total: mx.array | None) -> mx.array:
    piece = mx.logsumexp(scores, axis=-1, keepdims=True)
    return piece if total is None else mx.logaddexp(total, piece)


def _sum_window(weights: mx.array) -> mx.array:
    return weights.sum(axis=2)


def _sum_window_twice(weights: mx.array) -> mx.array:
    return mx.stack([weights.sum(axis=2), mx.square(weights).sum(axis=2)])


def _sum_window_shape(weights: mx.array) -> mx.array:
    surprise = -weights * mx.log(mx.maximum(weights, 1e-30))
    return mx.concatenate([_sum_window_twice(weights), surprise.sum(axis=2)[None]])
