"""The true position of every physical row, at O(1) cost per appended token."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from kvkeep.errors import CacheError, TrimError
from kvkeep.spec import checked_positions


class PositionLedger:
    """Positions of a cache's rows: some kept ones, then appended ones that are implied.

    Rows `[0, kept_rows)` hold the kept positions of each head, right-justified where heads
    keep unequal numbers. Row `kept_rows + i` holds position `start + i` for every head.

    Attributes:
        kept: one ascending int32 array [R] shared by all heads, or H_kv arrays [R_h].
        even: whether no head has dead rows, so that no mask is needed.
        start: position of the first appended row; every kept position is below it.
        appended: rows appended since.

    Raises:
        SelectionError: kept positions are not sorted, unique and non-negative.
        CacheError: a kept position is not below `start`.
    """

    __slots__ = ("_table", "appended", "even", "kept", "kept_rows", "start")

    def __init__(self, kept: Sequence[np.ndarray], start: int, appended: int = 0) -> None:
        self.kept = tuple(checked_positions(head) for head in kept)
        if not self.kept:
            raise CacheError("no positions", expected="one array of positions, or one per KV head")
        last = max((int(head[-1]) for head in self.kept if len(head)), default=-1)
        if last >= start:
            raise CacheError(
                "kept position at or beyond the offset",
                expected=f"positions below the offset {start}",
                received=last,
            )
        self.kept_rows = max(len(head) for head in self.kept)
        self.even = all(len(head) == self.kept_rows for head in self.kept)
        self.start = start
        self.appended = appended
        self._table: mx.array | None = None

    @classmethod
    def exact(cls, length: int) -> PositionLedger:
        """The ledger of a cache that holds every row of `length` positions."""
        return cls((np.arange(length, dtype=np.int32),), length)

    @property
    def rows(self) -> int:
        """Physical rows, padding of shorter heads included."""
        return self.kept_rows + self.appended

    @property
    def offset(self) -> int:
        """The next true position."""
        return self.start + self.appended

    @property
    def pads(self) -> tuple[int, ...]:
        """Dead rows in front of each head's rows (one entry when shared)."""
        return tuple(self.kept_rows - len(head) for head in self.kept)

    @property
    def complete(self) -> bool:
        """Whether every position below the offset has its row, in every head."""
        return self.even and self.kept_rows == self.start

    @property
    def live_head_rows(self) -> tuple[int, ...]:
        """Live rows of each head (one entry when shared)."""
        return tuple(len(head) + self.appended for head in self.kept)

    def head_positions(self) -> tuple[tuple[int, ...], ...]:
        """All positions, per head (one entry when shared). O(rows): not for a decode step."""
        tail = tuple(range(self.start, self.offset))
        return tuple(tuple(head.tolist()) + tail for head in self.kept)

    def head_arrays(self) -> list[np.ndarray]:
        """All positions as arrays, per head (one entry when shared)."""
        tail = np.arange(self.start, self.offset)
        return [np.concatenate([head, tail]) for head in self.kept]

    def position_table(self) -> np.ndarray:
        """All positions as int [H_kv or 1, rows].

        Raises:
            CacheError: heads hold unequal numbers of rows.
        """
        if not self.even:
            raise CacheError(
                "heads hold unequal numbers of rows",
                expected="equal counts per head",
                received=str(self.live_head_rows),
                remedy="Start from the exact cache of the prompt.",
            )
        return np.stack(self.head_arrays())

    def table(self) -> mx.array:
        """Kept positions as int32 [H_kv or 1, kept_rows], -1 in dead rows; built once."""
        if self._table is None:
            rows = np.full((len(self.kept), self.kept_rows), -1, np.int32)
            for row, head in zip(rows, self.kept, strict=True):
                row[self.kept_rows - len(head) :] = head
            self._table = mx.array(rows)
        return self._table

    @classmethod
    def from_table(cls, table: mx.array, start: int, appended: int) -> PositionLedger:
        """Rebuild a ledger from `table()` and its two counters."""
        rows = np.asarray(table)
        if rows.ndim != 2:
            raise CacheError(
                "unreadable positions in a cache state",
                expected="a table [heads, rows]",
                received=f"shape {tuple(rows.shape)}",
            )
        kept = [row[row >= 0] for row in rows]
        for row, head in zip(rows, kept, strict=True):
            if len(head) and not np.array_equal(row[-len(head) :], head):
                raise CacheError(
                    "unreadable positions in a cache state",
                    expected="-1 in front of a head's positions only",
                    received=str(row.tolist()[:8]),
                )
        return cls(kept, int(start), int(appended))

    def copy(self) -> PositionLedger:
        """An independent ledger; the kept arrays are never written to and stay shared."""
        twin = object.__new__(PositionLedger)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin

    def __deepcopy__(self, memo: object) -> PositionLedger:
        return self.copy()

    def trim(self, n: int) -> np.ndarray | None:
        """Forget the last `n` tokens: appended rows first, then the logical prefix.

        Returns:
            None when the remaining rows are a prefix of the present ones, else the rows
            to gather: int64 [H_kv, new kept_rows] (dead rows repeat row 0).

        Raises:
            TrimError: `n` is negative or more than `offset`; nothing is changed.
        """
        check_trim(n, self.offset)
        if n <= self.appended:
            self.appended -= n
            return None
        start = self.offset - n
        counts = [int(np.searchsorted(head, start)) for head in self.kept]
        kept_rows = max(counts)
        uneven = len(set(counts)) > 1 or not self.even
        gather = None
        if uneven:
            target = np.arange(kept_rows)
            source = [
                np.clip(target - (kept_rows - count), 0, None) + pad
                for count, pad in zip(counts, self.pads, strict=True)
            ]
            # A head without live rows has none behind its padding to repeat.
            gather = np.minimum(np.stack(source), self.kept_rows - 1)
        self.kept = tuple(head[:c] for head, c in zip(self.kept, counts, strict=True))
        self.kept_rows, self.start, self.appended, self._table = kept_rows, start, 0, None
        self.even = len(set(counts)) == 1
        return gather


def check_trim(n: int, most: int, what: str = "tokens in the cache") -> None:
    """Refuse a trim that is no whole number between 0 and `most`.

    Raises:
        TrimError: says which it is.
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise TrimError("unreadable trim", expected="a whole number of tokens", received=repr(n))
    if n < 0:
        raise TrimError("negative trim", expected="a number of tokens >= 0", received=int(n))
    if n > most:
        raise TrimError(
            "trim of more than there is",
            expected=f"at most {most} {what}",
            received=int(n),
        )
