"""Interleaving, medians and their intervals, against NumPy and the definition."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.bench import Spread, interleaved, ratios
from kvkeep.bench.timing import rounds_told

figures = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60)


def orders(seed: int, rounds: int = 6, warmup: int = 0) -> list[str]:
    calls: list[str] = []
    names = "abcd"
    interleaved(
        {name: lambda name=name: calls.append(name) for name in names}, rounds, warmup, seed=seed
    )
    return ["".join(calls[i : i + 4]) for i in range(0, len(calls), 4)]


def test_contenders_run_once_a_round_and_warm_up_first() -> None:
    calls: list[str] = []

    def contender(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = interleaved({name: lambda name=name: contender(name) for name in "ab"}, 5, warmup=2)
    rounds = [calls[i : i + 2] for i in range(0, len(calls), 2)]
    assert len(rounds) == 7
    assert all(sorted(names) == ["a", "b"] for names in rounds)
    assert ["a", "b"] in rounds and ["b", "a"] in rounds
    assert [len(found["a"]), len(found["b"])] == [5, 5]
    assert min(found["a"] + found["b"]) == 5  # the first four calls were the warm-up


def test_the_order_is_drawn_by_the_seed_and_differs_by_round() -> None:
    first = orders(seed=3)
    assert first == orders(seed=3) != orders(seed=4)
    assert len(set(first)) > 1
    assert all(sorted(order) == list("abcd") for order in first)


def test_rounds_are_told_in_words() -> None:
    told: list[str] = []
    interleaved({"a": lambda: 1.0}, 2, report=rounds_told(told.append, "decoding"))
    assert told == ["decoding, warming up", "decoding, round 1/2", "decoding, round 2/2"]


def test_the_garbage_collector_is_on_again_after_a_failure() -> None:
    def fail() -> float:
        assert not gc.isenabled()
        raise ValueError

    with pytest.raises(ValueError):
        interleaved({"a": fail}, 1)
    assert gc.isenabled()


def test_spread_of_known_figures() -> None:
    spread = Spread.of([float(n) for n in range(100, 0, -1)])
    assert (spread.low, spread.median, spread.high) == (1, 50.5, 100)
    # Ranks 40 and 61 of 100: the textbook's interval for a median.
    assert (spread.median_low, spread.median_high) == (40, 61)
    few = Spread.of([3.0, 1.0, 2.0])
    assert (few.median_low, few.median_high) == (1, 3)


@given(figures)
def test_spread_against_numpy(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread.median == pytest.approx(np.median(values), rel=1e-12)
    assert (spread.low, spread.high) == (np.min(values), np.max(values))
    assert spread.low <= spread.median_low <= spread.median <= spread.median_high <= spread.high
    assert {spread.median_low, spread.median_high} <= set(values)
    assert Spread.of(values[::-1]) == spread


@pytest.mark.parametrize("count", [3, 6, 7, 15, 30])
def test_coverage_is_how_often_the_interval_holds_the_true_median(count: int) -> None:
    draws = np.sort(np.random.default_rng(count).exponential(size=(40_000, count)), axis=1)
    interval = Spread.of(draws[0])
    first, last = np.searchsorted(draws[0], (interval.median_low, interval.median_high))
    holds = (draws[:, first] < np.log(2)) & (np.log(2) <= draws[:, last])
    assert Spread.coverage(count) == pytest.approx(holds.mean(), abs=0.01)


def test_coverage_by_hand() -> None:
    assert Spread.coverage(1) == 0
    assert Spread.coverage(3) == 1 - 2 * 0.5**3
    assert Spread.coverage(5) == 1 - 2 * 0.5**5
    assert all(Spread.coverage(count) >= 0.95 for count in range(6, 200))


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=1))
def test_ratios_against_numpy(pairs: list[tuple[float, float]]) -> None:
    values, base = np.array(pairs).T
    np.testing.assert_array_equal(ratios(list(values), list(base)), values / base)


def test_ratios_of_unequal_rounds_are_a_fault() -> None:
    with pytest.raises(ValueError):
        ratios([1.0, 2.0], [1.0])
