"""Light caches that let a stock model be run with gated or measured heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from kvkeep.caches.contract import MlxCache
from kvkeep.caches.protocol import AttentionFunction
from kvkeep.errors import HeadProfileError


@dataclass(frozen=True)
class Streaming:
    """What a streaming head still reads.

    Attributes:
        sinks: rows at the start.
        recent: latest rows, the query's own among them.
    """

    sinks: int
    recent: int

    def mask(self, prefix: int, count: int) -> mx.array:
        """Which rows each of the last `count` queries reads: bool [count, prefix + count].

        Without a prefix the window moves with the query, as in a streaming prefill. With one,
        its rows were evicted once, at its end, and later rows all stay: kvkeep's decoding.
        """
        rows = mx.arange(prefix, prefix + count)[:, None]
        columns = mx.arange(prefix + count)[None]
        first = rows - self.recent + 1 if prefix == 0 else prefix - self.recent
        return (columns <= rows) & ((columns < self.sinks) | (columns >= first))


class OnePassLayer(MlxCache):
    """Hands a layer the rows of a prefix and its own, once; keeps nothing for later.

    Args:
        prefix: (keys [1, H_kv, P, D], values [1, H_kv, P, D_v]) in front of what comes, or None.
    """

    owns_attention = True

    def __init__(self, prefix: tuple[mx.array, mx.array] | None = None) -> None:
        self.prefix = prefix
        self.length = 0 if prefix is None else int(prefix[0].shape[2])
        self.offset = self.length
        self.calls = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Prefix and new rows, joined."""
        self.offset += keys.shape[2]
        if self.prefix is None:
            return keys, values
        return (
            mx.concatenate([self.prefix[0], keys], axis=2),
            mx.concatenate([self.prefix[1], values], axis=2),
        )

    def make_mask(self, *args: Any, **options: Any) -> Any:
        """A mask for models that want one; attention here does not use it."""
        return create_attention_mask(*args, offset=self.offset, **options)

    def size(self) -> int:
        """Rows so far."""
        return self.offset

    def empty(self) -> bool:
        """Whether there is no row yet."""
        return self.offset == 0


class GatedLayer(OnePassLayer):
    """Each KV head's output is g · full attention + (1 - g) · streaming attention.

    Source: DuoAttention, arXiv:2410.10819, section 2.2.

    Args:
        gates: [H_kv] in [0, 1].
        streaming: what the second term reads.
        prefix: as in the base class.
    """

    def __init__(
        self,
        gates: mx.array,
        streaming: Streaming,
        prefix: tuple[mx.array, mx.array] | None = None,
    ) -> None:
        super().__init__(prefix)
        self.gates, self.streaming = gates, streaming

    def attend(
        self,
        attention: AttentionFunction,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Mixed attention of queries [1, H_q, n, D] over keys [1, H_kv, P + n, D].

        Only the inputs are kept for the gradient, not the weights [H_q, n, P + n]: they
        are computed again when it is taken.
        """
        self.calls += 1
        mask = self.streaming.mask(self.length, queries.shape[2])
        group = queries.shape[1] // keys.shape[1]

        def mixed(q: mx.array, k: mx.array, v: mx.array, gates: mx.array) -> mx.array:
            full, streamed = (
                attention(q, k, v, cache=None, scale=scale, mask=which, sinks=sinks)
                for which in ("causal", mask)
            )
            g = mx.repeat(gates, group)[None, :, None, None].astype(full.dtype)
            return g * full + (1 - g) * streamed

        return mx.checkpoint(mixed)(queries, keys, values, self.gates)


Measure = Callable[[mx.array, mx.array, float, "mx.array | None"], mx.array]


class MeasuredLayer(OnePassLayer):
    """Plain causal attention that also measures the heads.

    Args:
        measure: (queries [H_q, n, D], keys [H_kv, T, D], scale, sinks) -> [H_kv].
        prefix: as in the base class.
    """

    def __init__(self, measure: Measure, prefix: tuple[mx.array, mx.array] | None = None) -> None:
        super().__init__(prefix)
        self.measure = measure
        self.measured: mx.array | None = None

    def attend(
        self,
        attention: AttentionFunction,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Causal attention, unchanged."""
        self.calls += 1
        self.measured = self.measure(queries[0], keys[0], scale, sinks)
        return attention(queries, keys, values, cache=None, scale=scale, mask="causal", sinks=sinks)


def late_attention(
    queries: mx.array,
    keys: mx.array,
    scale: float,
    sinks: mx.array | None,
    rows: mx.array,
) -> mx.array:
    """Attention weights of some query rows, in float32: [H_kv, G, len(rows), T].

    Args:
        queries: [H_q, n, D], of the last n positions.
        keys: [H_kv, T, D].
        rows: indices into the n queries.
    """
    kv_heads, length, _ = keys.shape
    chosen = mx.take(queries, rows, axis=1).astype(mx.float32) * scale
    grouped = chosen.reshape(kv_heads, -1, *chosen.shape[1:])
    logits = grouped @ keys.astype(mx.float32).swapaxes(-1, -2)[:, None]
    positions = rows + (length - queries.shape[1])
    logits = mx.where(mx.arange(length)[None] <= positions[:, None], logits, -mx.inf)
    if sinks is not None:
        extra = sinks.astype(mx.float32).reshape(kv_heads, -1, 1, 1)
        total = mx.logaddexp(mx.logsumexp(logits, axis=-1, keepdims=True), extra)
        return mx.exp(logits - total)
    return mx.softmax(logits, axis=-1)


def require_called_once(layers: Mapping[int, OnePassLayer], name: str) -> None:
    """Refuse a model whose attention did not come through the seam once per layer.

    Raises:
        HeadProfileError: names the model and the layers.
    """
    wrong = [index for index, layer in layers.items() if layer.calls != 1]
    if wrong:
        calls = sorted({layers[index].calls for index in wrong})
        raise HeadProfileError(
            f"the heads of model {name!r} cannot be profiled",
            expected="one call of mlx-lm's attention function per layer and forward",
            received=f"{calls} in layers {wrong}",
            remedy="Its attention is computed where nobody sees it, or layers share a cache.",
        )
