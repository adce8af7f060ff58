"""What a model's caches cost in bytes, measured on the arrays of a probe of a few tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

from kvkeep.caches import is_plain

#: Rows that mlx-lm's caches, and ours, grow by.
STEP: int = KVCache.step
_PROBES = (2, 4)  # tokens


@dataclass(frozen=True)
class LayerFootprint:
    """Bytes of one layer's cache.

    Attributes:
        kind: the cache's class.
        evictable: whether eviction works on it: a plain full-attention KV cache.
        row_bytes: bytes per position, all heads, K and V.
        fixed_bytes: bytes that do not grow with the positions (states of recurrent layers).
        most_rows: positions that a sliding or chunked layer holds at most, or None.
    """

    kind: str
    evictable: bool
    row_bytes: int
    fixed_bytes: int
    most_rows: int | None

    def nbytes(self, rows: int) -> int:
        """Bytes of `rows` live positions."""
        held = rows if self.most_rows is None else min(rows, self.most_rows)
        return self.fixed_bytes + held * self.row_bytes


@dataclass(frozen=True)
class Footprint:
    """Bytes of one request's cache list.

    Attributes:
        layers: one entry per cache of `make_prompt_cache`.
    """

    layers: tuple[LayerFootprint, ...]

    @property
    def evictable_row_bytes(self) -> int:
        """Bytes per position of the layers that eviction works on."""
        return sum(layer.row_bytes for layer in self.layers if layer.evictable)

    def nbytes(self, rows: int, *, kept: int | None = None) -> int:
        """Bytes of the live rows of `rows` positions.

        Args:
            rows: positions that were computed.
            kept: rows per head of the evictable layers, mean over them; None keeps all.
        """
        return sum(
            layer.nbytes(rows if kept is None or not layer.evictable else kept)
            for layer in self.layers
        )

    def allocated_nbytes(self, rows: int, *, kept: int | None = None) -> int:
        """Bytes of buffers that grow in steps of `STEP` rows, room for one step included."""
        return self.nbytes(_stepped(rows), kept=None if kept is None else _stepped(kept))


def measure_footprint(model: Any) -> Footprint:
    """Run two short probes through a model and see what each layer's cache grew by.

    Args:
        model: an mlx-lm model; its weights stay untouched.

    Returns:
        Bytes as the caches hold them, unquantised.
    """
    few, more = (_probe(model, count) for count in _PROBES)
    between = _PROBES[1] - _PROBES[0]
    layers = []
    for (layer, small), (_, large) in zip(few, more, strict=True):
        row = (large - small) // between
        most = getattr(layer, "max_size", None) or getattr(layer, "chunk_size", None)
        layers.append(
            LayerFootprint(
                kind=type(layer).__name__,
                evictable=is_plain(layer),
                row_bytes=row,
                fixed_bytes=small - _PROBES[0] * row,
                most_rows=int(most) if most else None,
            )
        )
    return Footprint(tuple(layers))


def _probe(model: Any, count: int) -> list[tuple[Any, int]]:
    cache = make_prompt_cache(model)
    model(mx.zeros((1, count), mx.int32), cache=cache)
    found = []
    for layer in cache:
        arrays = [a for _, a in tree_flatten(layer.state) if isinstance(a, mx.array)]
        mx.eval(arrays)
        found.append((layer, sum(a.nbytes for a in arrays)))
    return found


def _stepped(rows: int) -> int:
    return -(-rows // STEP) * STEP + STEP
