"""Where the rows of a ragged layer lie: groups of heads that keep equally many rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class HeadGroup:
    """Heads that keep equally many rows, one after the other.

    Attributes:
        heads: KV heads, ascending.
        kept: kept rows of each.
        first: flat row where the group's region begins.
    """

    heads: tuple[int, ...]
    kept: int
    first: int


@dataclass(frozen=True)
class QueryOrder:
    """How query heads come to the order of the groups and back.

    Attributes:
        cuts: query heads before each group but the first.
        order: uint32 [H_q], None where the groups are runs of heads in order.
        inverse: uint32 [H_q], back again; None as above.
    """

    cuts: list[int]
    order: mx.array | None
    inverse: mx.array | None


class RaggedLayout:
    """Regions of one flat buffer [rows, D]: per group [heads, kept + room, D], contiguous.

    Everything that a decode step needs is computed here, once per change of the kept rows
    or of the room.

    Args:
        counts: kept rows of each KV head.
        room: rows behind them for appended tokens, the same for all heads.
    """

    def __init__(self, counts: Sequence[int], room: int) -> None:
        self.counts, self.room = tuple(counts), room
        by_count: dict[int, list[int]] = {}
        for head, count in enumerate(self.counts):
            by_count.setdefault(count, []).append(head)
        groups, starts, first = [], [0] * len(self.counts), 0
        for count, heads in by_count.items():
            groups.append(HeadGroup(tuple(heads), count, first))
            for head in heads:
                starts[head] = first
                first += count + room
        self.groups = tuple(groups)
        self.starts, self.rows = tuple(starts), first
        free = np.array(starts, np.int64) + np.array(self.counts, np.int64)
        self._free = mx.array(free.astype(np.uint32))  # [H_kv]: row of the first appended token
        self._query_orders: dict[int, QueryOrder] = {}

    def __deepcopy__(self, memo: object) -> RaggedLayout:
        return self  # nothing in it ever changes

    def slots(self, appended: int, n: int) -> mx.array:
        """Flat rows uint32 [H_kv * n] of the next `n` tokens behind `appended` ones."""
        if n == 1:
            return self._free + appended
        steps = mx.arange(appended, appended + n, dtype=mx.uint32)
        return (self._free[:, None] + steps).reshape(-1)

    def views(self, flat: mx.array, appended: int) -> list[mx.array]:
        """Live rows [1, heads, kept + appended, D] of each group, without a copy.

        Args:
            flat: [rows, D], row-contiguous.
        """
        dim = flat.shape[1]
        views = []
        for group in self.groups:
            rows, heads = group.kept + appended, len(group.heads)
            if rows == 0:
                views.append(mx.zeros((1, heads, 0, dim), flat.dtype))
                continue
            head = (group.kept + self.room) * dim
            shape, strides = (1, heads, rows, dim), (heads * head, head, dim, 1)
            views.append(mx.as_strided(flat, shape, strides, group.first * dim))
        return views

    def live_rows(self, appended: int) -> list[np.ndarray]:
        """Flat rows int64 [kept + appended] of each head."""
        return [
            start + np.arange(count + appended)
            for start, count in zip(self.starts, self.counts, strict=True)
        ]

    def query_order(self, query_heads: int) -> QueryOrder:
        """The order for H_q query heads; computed once."""
        order = self._query_orders.get(query_heads)
        if order is None:
            order = self._query_orders[query_heads] = self._ordered(query_heads)
        return order

    def _ordered(self, query_heads: int) -> QueryOrder:
        heads = [head for group in self.groups for head in group.heads]
        share = query_heads // len(heads)
        sizes = [len(group.heads) * share for group in self.groups]
        cuts = np.cumsum(sizes)[:-1].tolist()
        if heads == sorted(heads):
            return QueryOrder(cuts, None, None)
        order = (np.array(heads)[:, None] * share + np.arange(share)).reshape(-1)
        forward, back = (mx.array(o.astype(np.uint32)) for o in (order, np.argsort(order)))
        return QueryOrder(cuts, forward, back)


def placed(flat: mx.array, rows: Sequence[np.ndarray], layout: RaggedLayout) -> mx.array:
    """Copy rows of a flat buffer to where a layout wants them.

    Args:
        flat: [N, D].
        rows: flat rows of each KV head, at most kept + room.

    Returns:
        [layout.rows, D]; the rest holds finite rows that nobody reads.
    """
    if layout.rows == 0 or flat.shape[0] == 0:
        return mx.zeros((layout.rows, flat.shape[1]), flat.dtype)
    # Unread rows repeat one that is copied anyway: its values are as finite as the rest.
    filler = next((int(head[0]) for head in rows if len(head)), 0)
    index = np.full(layout.rows, filler, np.uint32)
    for start, head in zip(layout.starts, rows, strict=True):
        index[start : start + len(head)] = head
    return mx.take(flat, mx.array(index), axis=0)
