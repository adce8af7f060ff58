"""Window scores of models that call `mx.fast.scaled_dot_product_attention` themselves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import mlx.core as mx
import numpy as np

from kvkeep.errors import ConfigError, SelectionError
from kvkeep.policies import window_attention

_lock = threading.Lock()
_active: dict[int, list[SnapKVAttentionCapture]] = {}  # thread id -> captures, innermost last
_original: Any = None
_inside = threading.local()


class SnapKVAttentionCapture:
    """Context manager: sums the attention of the last `window` queries over all layers.

    While any capture is open, `mx.fast.scaled_dot_product_attention` is wrapped; it is
    restored when the last one closes, also after an exception. A capture sees only calls
    of the thread that opened it, and none that kvkeep's attention seam handled already.

    Each query's weights are complete once it has run, so they are kept per query position
    and only those of the last `window` positions count: a prompt prefilled in chunks
    scores as in one pass. One capture serves one growing sequence.

    Args:
        window: W, at least 1.
        score_chunk_size: query rows scored at once, at most.

    Raises:
        ConfigError: either is below 1.
    """

    def __init__(self, window: int = 24, score_chunk_size: int = 8) -> None:
        for name, value in (("window", window), ("score_chunk_size", score_chunk_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"bad value for {name}", expected="a whole number >= 1", received=repr(value)
                )
        self.window, self.score_chunk_size = window, score_chunk_size
        self.calls = 0
        self._thread = 0
        self._rows: mx.array | None = None  # [rows, keys]: weights by query position
        self._end = 0  # position after the last row

    def __enter__(self) -> SnapKVAttentionCapture:
        global _original
        with _lock:
            if not _active:
                _original = mx.fast.scaled_dot_product_attention
                mx.fast.scaled_dot_product_attention = _captured
            self._thread = threading.get_ident()
            _active.setdefault(self._thread, []).append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _lock:
            mine = _active[self._thread]  # closed elsewhere, say by a generator's owner
            mine.remove(self)
            if not mine:
                del _active[self._thread]
            if not _active:
                mx.fast.scaled_dot_product_attention = _original

    def snap_scores(self, seq_len: int) -> list[float]:
        """One score per position: attention from the window's queries, summed over layers.

        Positions that no captured query could see score 0; so do all when nothing was
        captured (`calls` is 0 then).

        Raises:
            SelectionError: `seq_len` is negative.
        """
        if seq_len < 0:
            raise SelectionError("negative length", expected="seq_len >= 0", received=seq_len)
        if self._rows is None:
            return [0.0] * seq_len
        scores = np.asarray(self._rows.sum(axis=0)).tolist()
        return [*scores, *[0.0] * (seq_len - len(scores))][:seq_len]

    def record(
        self, queries: mx.array, keys: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> None:
        """Add one attention call: queries [B, H_q, n, D], keys [B, H_kv, T, D]."""
        count, length = queries.shape[2], keys.shape[2]
        if length < self._end:
            return  # a sliding-window layer, or a sequence that went back: not this one
        self.calls += 1
        rows = []
        for start in range(max(count - self.window, 0), count, self.score_chunk_size):
            stop = min(start + self.score_chunk_size, count)
            rows.append(
                sum(
                    _weights(queries, keys, scale, mask, sinks, b, start, stop)
                    for b in range(queries.shape[0])
                )
            )
            mx.eval(rows[-1])
        self._add(mx.concatenate(rows, axis=0), length)

    def _add(self, rows: mx.array, end: int) -> None:
        old, grown = self._rows, end - self._end
        if old is None:
            self._rows = rows
        elif grown == 0 and old.shape[0] >= rows.shape[0]:
            front = old.shape[0] - rows.shape[0]
            self._rows = old + mx.pad(rows, [(front, 0), (0, 0)])
        elif grown > 0:
            left = self.window - rows.shape[0]
            kept = old[-left:] if left > 0 else old[:0]
            self._rows = mx.concatenate([mx.pad(kept, [(0, 0), (0, grown)]), rows], axis=0)
        self._end = end
        mx.eval(self._rows)


def _weights(
    queries: mx.array,
    keys: mx.array,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
    batch: int,
    start: int,
    stop: int,
) -> mx.array:
    """[stop - start, T]: these query rows' weights, summed over heads."""
    count, length = queries.shape[2], keys.shape[2]
    row_positions = mx.arange(length - count + start, length - count + stop)[:, None]

    def bias(first: int, last: int) -> mx.array:
        if mask is None:
            return mx.array(0.0)
        if isinstance(mask, str):
            return _additive(mx.arange(first, last)[None] <= row_positions)
        rows = slice(start, stop) if mask.shape[-2] == count else slice(None)
        part = mask[..., rows, first:last]
        if part.ndim == 4:
            part = part[batch if part.shape[0] > 1 else 0]
        if part.ndim == 3 and part.shape[0] > 1:  # [H_q, w, t] -> [H_kv, G, w, t]
            part = part.reshape(keys.shape[1], -1, *part.shape[1:])
        return _additive(part)

    return window_attention(
        queries[batch, :, start:stop],
        keys[batch],
        scale,
        lambda weights: weights.sum(axis=(0, 1)),
        sinks=sinks,
        bias=bias,
    )


def _additive(mask: mx.array) -> mx.array:
    # A finite floor: a row that may attend to nothing must not become NaN.
    return mx.where(mask, 0.0, -1e30) if mask.dtype == mx.bool_ else mask.astype(mx.float32)


def _captured(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, **rest: Any
) -> mx.array:
    if not getattr(_inside, "seam", False):
        for capture in _active.get(threading.get_ident(), ()):
            capture.record(q, k, scale, mask, rest.get("sinks"))
    return _original(q, k, v, scale=scale, mask=mask, **rest)


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    before = getattr(_inside, "seam", False)
    _inside.seam = True
    try:
        yield
    finally:
        _inside.seam = before


def any_open() -> bool:
    """Whether a capture is open in any thread; else `seen_by_seam` would mark nothing."""
    return bool(_active)


def seen_by_seam() -> contextlib.AbstractContextManager[None]:
    """Marks attention calls that the seam handles, so that captures leave them out."""
    return _marked() if _active else contextlib.nullcontext()
