"""What a policy may look at, and what choosing hands to storing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import numpy as np

from kvkeep.errors import SelectionError


class Rope(Protocol):
    """A layer's rotary position embedding, and its inverse."""

    def rotate(self, rows: mx.array, positions: np.ndarray) -> mx.array:
        """Rows [H, n, D] as the model rotates them at int positions [n], [1, n] or [H, n].

        Float32, with whatever constant factor the model's rotation has.
        """
        ...

    def unrotate(self, rows: mx.array, positions: np.ndarray) -> mx.array:
        """What `rotate` at these positions makes into `rows`: [H, n, D] float32."""
        ...


#: Index of a query head -> the weights [D_v, hidden] float32 that its output goes through.
OutputWeights = Callable[[int], mx.array]


@dataclass(frozen=True)
class Drafted:
    """What a layer's attention looked like while the model drafted its answer.

    Attributes:
        queries: [H_q, n, D] post-RoPE queries of the n tokens after the view's rows.
        keys: [H_kv, n, D], of the same tokens; n >= 1.
    """

    queries: mx.array
    keys: mx.array


@dataclass(frozen=True)
class LayerView:
    """One layer of one request, as a policy sees it.

    Attributes:
        keys: [H_kv, T, D], post-RoPE, the cache's dtype.
        values: [H_kv, T, D_v].
        queries: [H_q, W, D] post-RoPE queries of the last W positions, or None.
        scale: what q.k is multiplied by before the softmax.
        layer: index in the cache list.
        n_layers: L, the number of evictable layers.
        sinks: [H_q] attention-sink logits of models that have them, or None.
        score_chunk_size: window queries to score at once, at most.
        positions: int [1, T] or [H_kv, T], ascending true positions of the rows; None stands
            for 0 … T - 1. They are sparse where the cache was compact already.
        keep: rows per KV head that the budget allows (the mean where heads differ), or None
            where that is not known.
        seen: what the policy's accumulator gathered, arrays by name.
        rope: the layer's rotation, for policies that need it, else None.
        output_weights: of the layer's output projection, likewise.
        draft: of what the model would answer, likewise.
    """

    keys: mx.array
    values: mx.array
    queries: mx.array | None
    scale: float
    layer: int
    n_layers: int
    sinks: mx.array | None = None
    score_chunk_size: int = 8
    positions: np.ndarray | None = None
    keep: int | None = None
    seen: Mapping[str, mx.array] = field(default_factory=dict)
    rope: Rope | None = None
    output_weights: OutputWeights | None = None
    draft: Drafted | None = None

    def row_positions(self) -> np.ndarray:
        """True positions of the rows: int [1, T] or [H_kv, T]."""
        if self.positions is None:
            return np.arange(self.keys.shape[1])[None]
        return self.positions


@dataclass(frozen=True)
class LayerSelection:
    """Kept positions of one layer: one ascending int32 array for all heads, or one per head.

    Attributes:
        heads: a single array [R] shared by all KV heads, or H_kv arrays [R_h].

    Raises:
        SelectionError: an array is not one-dimensional, sorted, unique and non-negative.
    """

    heads: tuple[np.ndarray, ...]

    def __post_init__(self) -> None:
        heads = tuple(checked_positions(h) for h in self.heads)
        if not heads:
            raise SelectionError("selection without heads", expected="one array or H_kv arrays")
        object.__setattr__(self, "heads", heads)

    @property
    def shared(self) -> bool:
        """Whether one set serves all heads."""
        return len(self.heads) == 1

    def of_head(self, head: int) -> np.ndarray:
        """Kept positions [R_h] of one KV head."""
        return self.heads[0 if self.shared else head]

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows per head (one entry when shared)."""
        return tuple(len(h) for h in self.heads)

    @property
    def equal_counts(self) -> bool:
        """Whether each head keeps the same number of rows."""
        return len(set(self.counts)) == 1


@dataclass(frozen=True)
class Selection:
    """Kept positions per layer and head, and the length they were chosen from.

    Attributes:
        source_length: T of the exact cache.
        layers: index in the cache list -> the layer's kept positions; layers that are
            not in it stay as they are.

    Raises:
        SelectionError: a position is not below `source_length`.
    """

    source_length: int
    layers: Mapping[int, LayerSelection]

    def __post_init__(self) -> None:
        for layer, chosen in self.layers.items():
            for head in chosen.heads:
                if len(head) and head[-1] >= self.source_length:
                    raise SelectionError(
                        f"kept position out of range in layer {layer}",
                        expected=f"positions below {self.source_length}",
                        received=int(head[-1]),
                    )


def checked_positions(positions: Sequence[int] | np.ndarray | mx.array) -> np.ndarray:
    """Positions as an ascending, unique, non-negative int32 array [R].

    Raises:
        SelectionError: they are not whole numbers, one-dimensional, sorted or unique.
    """
    array = np.asarray(positions)
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise SelectionError(
            "unreadable positions",
            expected="a one-dimensional sequence of whole numbers",
            received=f"{array.ndim} dimensions of {array.dtype}",
        )
    if array.min() < 0:
        raise SelectionError(
            "negative position", expected="positions >= 0", received=int(array.min())
        )
    if len(array) > 1 and (np.diff(array.astype(np.int64)) <= 0).any():
        at = int(np.argmax(np.diff(array.astype(np.int64)) <= 0))
        raise SelectionError(
            "positions are not sorted and unique",
            expected="each position greater than the one before",
            received=f"{array[at]} followed by {array[at + 1]} at index {at}",
            remedy="Pass sorted(set(positions)).",
        )
    return array.astype(np.int32)
