"""The ledger of positions, and the compact cache over random histories against a plain list."""

from __future__ import annotations

import copy
import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvkeep import PositionPreservingKVCache
from kvkeep.caches import ledger as ledger_module
from kvkeep.caches.ledger import PositionLedger
from kvkeep.errors import CacheError, SelectionError, TrimError
from oracles import attend, masked_attention

HEADS, DIM, WIDE = 2, 4, 32  # a quantisation group is 32 wide at least

position_sets = st.lists(st.integers(0, 40), max_size=8, unique=True).map(sorted)
kept_heads = st.one_of(
    position_sets.map(lambda head: [head]), st.lists(position_sets, min_size=HEADS, max_size=HEADS)
)


def ledger(*heads: Any, start: int = 100, appended: int = 0) -> PositionLedger:
    return PositionLedger([np.array(head, int) for head in heads], start, appended)


# -- the ledger alone -----------------------------------------------------------------


def test_counters() -> None:
    three = ledger((0, 40, 99), appended=2)
    assert (three.rows, three.offset, three.pads, three.even) == (5, 102, (0,), True)
    assert three.head_positions() == ((0, 40, 99, 100, 101),)
    exact = PositionLedger.exact(3)
    assert (exact.rows, exact.offset, exact.head_positions()) == (3, 3, ((0, 1, 2),))


def test_unequal_heads_are_right_justified() -> None:
    uneven = ledger((0, 40), (7,), appended=1)
    assert (uneven.pads, uneven.even, uneven.live_head_rows) == ((0, 1), False, (3, 2))
    assert np.asarray(uneven.table()).tolist() == [[0, 40], [-1, 7]]
    with pytest.raises(CacheError):
        uneven.position_table()


@pytest.mark.parametrize(
    ("heads", "start", "error"),
    [
        ([], 5, CacheError),
        ([[0, 5]], 5, CacheError),
        ([[0], [9]], 5, CacheError),
        ([[1, 0]], 5, SelectionError),
        ([[1, 1]], 5, SelectionError),
        ([[-1]], 5, SelectionError),
        ([[0.5]], 5, SelectionError),
        ([[[0]]], 5, SelectionError),
    ],
)
def test_positions_that_make_no_ledger(heads: list[Any], start: int, error: type) -> None:
    with pytest.raises(error):
        PositionLedger([np.array(head) for head in heads], start)


@given(kept_heads, st.integers(41, 60), st.integers(0, 5))
def test_table_round_trip(heads: list[list[int]], start: int, appended: int) -> None:
    before = ledger(*heads, start=start, appended=appended)
    after = PositionLedger.from_table(before.table(), before.start, before.appended)
    assert after.head_positions() == before.head_positions()
    assert (after.rows, after.offset, after.pads) == (before.rows, before.offset, before.pads)


@given(kept_heads, st.integers(41, 60), st.integers(0, 5), st.data())
def test_trim_keeps_the_logical_prefix(
    heads: list[list[int]], start: int, appended: int, data: st.DataObject
) -> None:
    trimmed = ledger(*heads, start=start, appended=appended)
    before = trimmed.copy()
    old_rows, old_pads = before.rows, before.pads
    gather = trimmed.trim(data.draw(st.integers(0, before.offset)))
    new_offset = trimmed.offset
    whole = before.head_positions()
    assert trimmed.head_positions() == tuple(
        tuple(p for p in head if p < new_offset) for head in whole
    )
    assert trimmed.even == (len(set(trimmed.live_head_rows)) == 1)
    # Where each head's live rows lie now, in terms of the old physical rows.
    for head, positions in enumerate(trimmed.head_positions()):
        source = np.arange(trimmed.rows) if gather is None else gather[head]
        assert len(source) == trimmed.rows
        assert (source < max(old_rows, 1)).all() and (source >= 0).all()
        live = source[trimmed.rows - len(positions) :]
        assert live.tolist() == [old_pads[head] + i for i in range(len(positions))]


@given(st.integers(max_value=-1) | st.integers(min_value=103) | st.booleans() | st.floats())
def test_refused_trims_change_nothing(n: Any) -> None:
    three = ledger((0, 40, 99), (1, 2, 3), appended=2)
    with pytest.raises(TrimError):
        three.trim(n)
    assert three.head_positions() == ledger((0, 40, 99), (1, 2, 3), appended=2).head_positions()


@pytest.mark.parametrize(
    "table", [mx.array([0, 1]), mx.array([[1, 0]]), mx.array([[0, -1, 2]]), mx.array([[0.5]])]
)
def test_tables_that_are_none(table: mx.array) -> None:
    with pytest.raises((CacheError, SelectionError)):
        PositionLedger.from_table(table, 10, 0)


def test_a_copy_is_independent() -> None:
    first = ledger((0, 40, 99))
    for twin in (first.copy(), copy.deepcopy(first)):
        twin.appended += 3
        twin.trim(50)
        assert (first.offset, first.head_positions()) == (100, ((0, 40, 99),))
        assert twin.head_positions() == ((0, 40),)


# -- a decode step costs the same at the end as at the start --------------------------


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """Names of the Python and C functions entered inside the block."""
    calls: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)
        elif event == "c_call":
            calls.append(getattr(argument, "__name__", str(argument)))

    gc.collect()
    gc.disable()  # a collection may call back into whoever registered for it
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        gc.enable()


def caches() -> dict[str, Callable[[], Any]]:
    def single(positions: Any) -> PositionPreservingKVCache:
        rows = mx.ones((1, HEADS, 3, WIDE))
        return PositionPreservingKVCache(rows, rows, offset=100, positions=positions)

    def uneven() -> PositionPreservingKVCache:
        cache = single(((0, 40, 99), (7, 50, 60)))
        cache.trim(55)
        return cache

    return {
        "shared": lambda: single((0, 40, 99)),
        "per-head": lambda: single(((0, 40, 99), (7, 50, 60))),
        "unequal heads": uneven,
        "quantised": lambda: single((0, 40, 99)).to_quantized(group_size=32, bits=8),
        "batch": lambda: PositionPreservingKVCache.merge([single((0, 40, 99)), uneven()]),
    }


@pytest.mark.parametrize("kind", caches())
def test_bookkeeping_per_token_does_not_grow(kind: str) -> None:
    cache = caches()[kind]()
    ledgers = getattr(cache, "_ledgers", None) or [cache._ledger]
    arrays = [head for entry in ledgers for head in entry.kept]
    row = mx.ones((len(ledgers), HEADS, 1, WIDE))

    def step() -> None:
        _ = cache.offset
        cache.make_mask(1)
        cache.update_and_fetch(row, row)

    work = {}
    for token in range(600):
        # Token 520 of a 256-row step meets no growth, and neither does token 5.
        if token in (5, 520):
            with counted_calls() as calls:
                step()
            work[token] = calls
        else:
            step()
    assert work[5] == work[520]
    assert len(work[5]) < 60, work[5]
    kept = [head for entry in ledgers for head in entry.kept]
    assert all(a is b for a, b in zip(kept, arrays, strict=True)), "kept positions were rebuilt"


def test_bookkeeping_allocates_nothing_that_stays() -> None:
    cache = caches()["per-head"]()
    row = mx.ones((1, HEADS, 1, WIDE))
    for _ in range(20):
        cache.update_and_fetch(row, row)
    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot()
        for _ in range(600):
            cache.make_mask(1)
            cache.update_and_fetch(row, row)
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    ours = [tracemalloc.Filter(True, ledger_module.__file__.replace("ledger.py", "*"))]
    grown = after.filter_traces(ours).compare_to(before.filter_traces(ours), "filename")
    assert sum(entry.size_diff for entry in grown) < 2_000


# -- random histories -----------------------------------------------------------------


class CompactCacheHistory(RuleBasedStateMachine):
    """A compact cache against a list of (position, key row, value row) per head."""

    @initialize(heads=kept_heads, offset=st.integers(41, 60), seed=st.integers(0, 2**16))
    def build(self, heads: list[list[int]], offset: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        count = min(len(head) for head in heads)
        heads = [head[:count] for head in heads]
        keys, values = self.rows(count), self.rows(count)
        self.shared = len(heads) == 1
        per_head = heads * (HEADS // len(heads))
        self.model = [
            [(p, keys[h, i], values[h, i]) for i, p in enumerate(per_head[h])] for h in range(HEADS)
        ]
        self.offset = offset
        self.cache = PositionPreservingKVCache(
            mx.array(keys)[None],
            mx.array(values)[None],
            offset=offset,
            positions=heads[0] if self.shared else heads,
        )
        self.left_behind: list[tuple[Any, Any]] = []

    def rows(self, count: int, heads: int = HEADS) -> np.ndarray:
        return self.random.standard_normal((heads, count, DIM)).astype(np.float32)

    @rule(count=st.integers(1, 5) | st.just(300))
    def append(self, count: int) -> None:
        keys, values = self.rows(count), self.rows(count)
        self.cache.update_and_fetch(mx.array(keys)[None], mx.array(values)[None])
        for head, rows in enumerate(self.model):
            rows += [(self.offset + i, keys[head, i], values[head, i]) for i in range(count)]
        self.offset += count

    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, min(self.offset, 6)) | st.integers(0, self.offset))
        assert self.cache.trim(n) == n
        self.offset -= n
        self.model = [[row for row in rows if row[0] < self.offset] for rows in self.model]

    @rule(n=st.integers(1, 3))
    def trim_too_much(self, n: int) -> None:
        for wrong in (self.offset + n, -n):
            with pytest.raises(TrimError):
                self.cache.trim(wrong)

    @rule()
    def go_on_with_a_copy(self) -> None:
        self.left_behind.append((self.cache, copy.deepcopy(self.cache.state)))
        self.cache = copy.deepcopy(self.cache)

    @rule(as_list=st.booleans())
    def go_on_with_the_state(self, as_list: bool) -> None:
        state = self.cache.state
        self.left_behind.append((self.cache, copy.deepcopy(state)))
        self.cache = PositionPreservingKVCache.from_state(
            list(state) if as_list else state, self.cache.meta_state
        )

    @invariant()
    def rows_and_positions(self) -> None:
        cache = self.cache
        assert type(cache.offset) is int
        assert cache.offset == self.offset
        positions = [tuple(row[0] for row in rows) for rows in self.model]
        assert cache.positions == (positions[0] if self.shared else tuple(positions))
        assert cache.size() == max(map(len, self.model))
        assert cache.owns_attention == (len(set(map(len, self.model))) > 1)
        live = sum(map(len, self.model))
        assert cache.nbytes == live * DIM * 4 * 2 <= cache.allocated_nbytes
        for kind, stored in enumerate(cache.keys_and_values()):
            for head, rows in enumerate(self.model):
                if rows:
                    mine = np.asarray(stored[0, head])[-len(rows) :]
                    np.testing.assert_array_equal(mine, [row[1 + kind] for row in rows])

    @invariant()
    @precondition(lambda self: self.offset < 400)
    def attention(self) -> None:
        n, cache = 2, copy.deepcopy(self.cache)
        queries, keys, values = self.rows(n, 2 * HEADS), self.rows(n), self.rows(n)
        out = attend(cache, *(mx.array(part)[None] for part in (queries, keys, values)), scale=0.5)
        tokens = np.arange(self.offset, self.offset + n)[:, None]
        for head, rows in enumerate(self.model):
            new = [(self.offset + i, keys[head, i], values[head, i]) for i in range(n)]
            positions, k, v = (np.array(part) for part in zip(*rows, *new, strict=True))
            pair = slice(2 * head, 2 * head + 2)
            expected = masked_attention(queries[pair], k[None], v[None], positions <= tokens, 0.5)
            np.testing.assert_allclose(out[0, pair], expected, atol=1e-5)

    def teardown(self) -> None:
        for cache, state in getattr(self, "left_behind", []):
            for mine, old in zip(cache.state, state, strict=True):
                same = mx.array_equal(mine, old) if isinstance(old, mx.array) else mine == old
                assert same, "a cache changed after it was copied"


TestCompactCacheHistory = CompactCacheHistory.TestCase
TestCompactCacheHistory.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
