"""What a model's caches cost in bytes, measured on the arrays of a probe of two tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from kvkeep.attention import LeafFacts, facts_of
from kvkeep.caches import is_plain, leaves_of

#: Rows that mlx-lm's caches, and ours, grow by.
STEP: int = KVCache.step
_PROBE = 2  # tokens


@dataclass(frozen=True)
class LayerFootprint:
    """Bytes of one layer's cache.

    Attributes:
        kind: the cache's class.
        evictable: whether its rows can be evicted, by what the model does with them.
        row_bytes: bytes per position, all heads, K and V.
        fixed_bytes: bytes that do not grow with the positions (states of recurrent layers).
        most_rows: positions that a sliding or chunked layer holds at most, or None.
    """

    kind: str
    evictable: bool
    row_bytes: int
    fixed_bytes: int
    most_rows: int | None

    def nbytes(self, rows: int, chunk: int = 1) -> int:
        """Bytes of `rows` live positions.

        Args:
            chunk: tokens that were appended at once; a sliding layer holds them besides.
        """
        held = rows if self.most_rows is None else min(rows, self.most_rows + chunk - 1)
        return self.fixed_bytes + held * self.row_bytes


@dataclass(frozen=True)
class Footprint:
    """Bytes of one request's cache list.

    Attributes:
        layers: one entry per cache of `make_prompt_cache`; of a layer that holds several
            caches, one for each.
    """

    layers: tuple[LayerFootprint, ...]

    @property
    def evictable_row_bytes(self) -> int:
        """Bytes per position of the layers that eviction works on."""
        return sum(layer.row_bytes for layer in self.layers if layer.evictable)

    def nbytes(self, rows: int, *, kept: int | None = None, chunk: int = 1) -> int:
        """Bytes of the live rows of `rows` positions.

        Args:
            rows: positions that were computed.
            kept: rows per head of the evictable layers, mean over them; None keeps all.
            chunk: tokens that were appended at once.
        """
        return sum(
            layer.nbytes(rows if kept is None or not layer.evictable else kept, chunk)
            for layer in self.layers
        )

    def allocated_nbytes(self, rows: int, *, kept: int | None = None, chunk: int = 1) -> int:
        """Bytes of buffers that grow in steps of `STEP` rows, room for one step included."""
        held = None if kept is None else _stepped(kept)
        return self.nbytes(_stepped(rows), kept=held, chunk=chunk)


def measure_footprint(model: Any) -> Footprint:
    """Run a short probe through a model and see what each layer's cache holds.

    Args:
        model: an mlx-lm model; its weights stay untouched.

    Returns:
        Bytes as the caches hold them, unquantised.
    """
    cache = make_prompt_cache(model)
    model(mx.zeros((1, _PROBE), mx.int32), cache=cache)
    leaves, facts = leaves_of(cache), facts_of(model)
    mx.eval([leaf.state for leaf in leaves if not leaf.empty()])
    return Footprint(tuple(_measured(leaf, facts.of(index)) for index, leaf in enumerate(leaves)))


def _measured(leaf: Any, facts: LeafFacts) -> LayerFootprint:
    row, fixed, most = _bytes_of(leaf)
    return LayerFootprint(type(leaf).__name__, is_plain(leaf) and facts.evictable, row, fixed, most)


def _bytes_of(layer: Any) -> tuple[int, int, int | None]:
    """Bytes per row, other bytes, and the most rows that are held."""
    if isinstance(layer, CacheList):
        parts = [_bytes_of(part) for part in layer.caches]
        bounds = {most for row, _, most in parts if row}
        most = bounds.pop() if len(bounds) == 1 else None
        return sum(row for row, _, _ in parts), sum(fixed for _, fixed, _ in parts), most
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is not None and values is not None and layer.offset:
        row = sum(a.nbytes // a.shape[-2] for a in (keys, values))  # buffers are [1, H, rows, D]
        most = getattr(layer, "max_size", None) or getattr(layer, "chunk_size", None)
        return row, 0, int(most) if most else None
    held = [] if layer.empty() else [a for _, a in tree_flatten(layer.state)]
    return 0, sum(a.nbytes for a in held if isinstance(a, mx.array)), None


def _stepped(rows: int) -> int:
    return -(-rows // STEP) * STEP + STEP
