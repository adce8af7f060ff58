"""Interleaved runs: what disturbs the machine meets every contender alike."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

#: Called with (round, rounds) before each round; warm-up rounds count from below zero.
RoundReport = Callable[[int, int], None]


@dataclass(frozen=True)
class Spread:
    """Where a list of figures lies.

    Attributes:
        median: the middle one.
        low, high: the smallest and the largest.
        median_low, median_high: about 95 % of repetitions have their median in between
            (order statistics, no assumption on the distribution); the whole spread where
            there are fewer than six figures. `Spread.coverage` gives the exact share.
    """

    median: float
    low: float
    high: float
    median_low: float
    median_high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one figure."""
        ordered = sorted(values)
        first, last = _ranks(len(ordered))
        return cls(
            statistics.median(ordered), ordered[0], ordered[-1], ordered[first], ordered[last]
        )

    @staticmethod
    def coverage(count: int) -> float:
        """How likely the true median lies in the interval of `count` independent figures.

        The number of figures below the median is binomial(count, 1/2); the interval holds it
        where its lower end is below and its upper end is not (Conover, Practical
        Nonparametric Statistics, 3.2).
        """
        first, last = _ranks(count)
        inside = sum(math.comb(count, below) for below in range(first + 1, last + 1))
        return inside / 2**count


def _ranks(count: int) -> tuple[int, int]:
    """Indices, in a sorted list, of the ends of the median's interval."""
    margin = 1.96 * math.sqrt(count) / 2
    first = max(math.floor(count / 2 - margin) - 1, 0)
    return first, min(math.ceil(count / 2 + margin), count - 1)


def interleaved(
    contenders: Mapping[str, Callable[[], T]],
    rounds: int,
    warmup: int = 1,
    *,
    seed: int = 0,
    report: RoundReport | None = None,
) -> dict[str, list[T]]:
    """Run every contender once per round, in an order drawn anew each round.

    So neither a drift nor what one run leaves in the processor's caches favours anyone. A
    contender does one run and returns its figure, which leaves its preparation out. The
    garbage collector is off meanwhile, as in `timeit`.

    Args:
        rounds: figures per contender.
        warmup: rounds before them that do not count.
        seed: of the order.
        report: told of each round.

    Returns:
        The figures by contender; the i-th of each come from the same round.
    """
    figures: dict[str, list[T]] = {name: [] for name in contenders}
    order, draw = list(contenders), random.Random(seed)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number in range(-warmup, rounds):
            if report is not None:
                report(number, rounds)
            draw.shuffle(order)
            for name in order:
                figure = contenders[name]()
                if number >= 0:
                    figures[name].append(figure)
    finally:
        if collecting:
            gc.enable()
    return figures


def rounds_told(report: Callable[[str], None], what: str) -> RoundReport:
    """Rounds in words, such as "reading the prompt, round 2/3"."""

    def told(number: int, rounds: int) -> None:
        report(f"{what}, {'warming up' if number < 0 else f'round {number + 1}/{rounds}'}")

    return told


def ratios(values: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Values / baseline, round by round.

    Raises:
        ValueError: unequal numbers of rounds.
    """
    return [value / base for value, base in zip(values, baseline, strict=True)]


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
