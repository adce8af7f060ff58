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


@dataclass(frozen=True)
class Spread:
    """Where a list of figures lies.

    Attributes:
        median: the middle one.
        low, high: the smallest and the largest.
        median_low, median_high: about 95 % of repetitions have their median in between
            (order statistics, no assumption on the distribution); the whole spread where
            there are fewer than six figures.
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
        count = len(ordered)
        margin = 1.96 * math.sqrt(count) / 2
        first = max(math.floor(count / 2 - margin) - 1, 0)
        last = min(math.ceil(count / 2 + margin), count - 1)
        return cls(
            statistics.median(ordered), ordered[0], ordered[-1], ordered[first], ordered[last]
        )


def interleaved(
    contenders: Mapping[str, Callable[[], T]], rounds: int, warmup: int = 1
) -> dict[str, list[T]]:
    """Run every contender once per round, in an order drawn anew each round.

    So neither a drift nor what one run leaves in the processor's caches favours anyone. A
    contender does one run and returns its figure, which leaves its preparation out. The
    garbage collector is off meanwhile, as in `timeit`.

    Args:
        rounds: figures per contender.
        warmup: rounds before them that do not count.

    Returns:
        The figures by contender; the i-th of each come from the same round.
    """
    figures: dict[str, list[T]] = {name: [] for name in contenders}
    order, draw = list(contenders), random.Random(0)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number in range(-warmup, rounds):
            draw.shuffle(order)
            for name in order:
                figure = contenders[name]()
                if number >= 0:
                    figures[name].append(figure)
    finally:
        if collecting:
            gc.enable()
    return figures


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
