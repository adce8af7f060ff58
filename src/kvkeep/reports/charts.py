"""What a chart shows, whoever draws it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvkeep.pages import TextTable
from kvkeep.reports.palette import EXACT

NOTHING = "–"


@dataclass(frozen=True)
class Point:
    """A figure.

    Attributes:
        x, y: where it is.
        at: x in words, such as "25%".
        told: y in words, with its interval.
        low, high: ends of the interval; None where there is none.
    """

    x: float
    y: float
    at: str
    told: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """Figures that belong together.

    Attributes:
        name: in the legend.
        style: number of a series, or `EXACT` or `BOUND` of `reports.palette`.
        points: by x.
        marked: whether each point has a marker.
    """

    name: str
    style: int
    points: tuple[Point, ...]
    marked: bool = True


@dataclass(frozen=True)
class Level:
    """A figure that hangs on no x: a line across, with a band for its interval.

    Attributes:
        name: in the legend.
        y: its height.
        told: in words.
        low, high: ends of the interval; None where there is none.
        style: as of a line.
    """

    name: str
    y: float
    told: str
    low: float | None = None
    high: float | None = None
    style: int = EXACT


@dataclass(frozen=True)
class Axis:
    """One of the two.

    Attributes:
        label: what it measures, and in what.
        low, high: its ends.
        ticks: (where, in words).
        log: whether distances are ratios.
    """

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high end."""
        if self.log:
            span = math.log(self.high / self.low)
            return math.log(value / self.low) / span
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        title: what it is about.
        x, y: its axes.
        lines, levels: what is drawn.
        note: a sentence below it; empty is none.
    """

    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    levels: tuple[Level, ...] = ()
    note: str = ""

    @property
    def described(self) -> str:
        """All that it shows, in words."""
        told = [f"{level.name}: {level.told}" for level in self.levels]
        for line in self.lines:
            told.append(f"{line.name}: {', '.join(f'{p.at} {p.told}' for p in line.points)}")
        return f"{self.y.label} by {self.x.label}. {'; '.join(told)}."

    @property
    def table(self) -> TextTable:
        """All that it shows: a row per x, a column per line."""
        ats = dict(sorted((p.x, p.at) for line in self.lines for p in line.points))
        cells = [{p.x: p.told for p in line.points} for line in self.lines]
        rows = [
            (at, *(level.told for level in self.levels), *(c.get(x, NOTHING) for c in cells))
            for x, at in ats.items()
        ]
        names = [item.name for item in (*self.levels, *self.lines)]
        return TextTable(self.title, (self.x.label, *names), tuple(rows), self.note)


def even_ticks(low: float, high: float, most: int = 5) -> tuple[float, ...]:
    """Round numbers, evenly apart, from at or below `low` to at or above `high`."""
    span = max(high - low, abs(high) * 1e-6, 1e-12)
    rough = span / (most - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(number * step for number in range(first, max(last, first + 1) + 1))


def linear(label: str, values: Iterable[float], *, zero: bool = True, unit: str = "") -> Axis:
    """An axis with room for the values.

    Args:
        zero: whether it begins at 0.
        unit: after each tick's number.
    """
    held = list(values) or [0.0, 1.0]
    low, high = min(held), max(held)
    ticks = even_ticks(min(low, 0.0) if zero else low, high if high > low or zero else high + 1)
    named = tuple((tick, f"{shown(tick)}{unit}") for tick in ticks)
    return Axis(label, ticks[0], ticks[-1], named)


def spaced(label: str, values: Sequence[tuple[float, str]]) -> Axis:
    """An axis of a few named places: by ratios of their values, with some room at both ends."""
    named = sorted(dict(values).items())
    low, high = named[0][0], named[-1][0]
    room = (high / low) ** 0.08 if high > low else 2.0
    return Axis(label, low / room, high * room, tuple(named), log=True)


def shown(value: float) -> str:
    """A tick's number: no digits that say nothing."""
    return f"{0.0 if abs(value) < 1e-12 else value:,.6g}"
