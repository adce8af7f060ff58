"""Divergence from the exact cache on a text: charts over the budget and over the position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvkeep.evaluation import NONE, FidelitySummary, Summary
from kvkeep.pages import TextTable, count
from kvkeep.reports.charts import Axis, Chart, Level, Line, Point, linear, shown, spaced
from kvkeep.reports.scores import FULL_CACHE

#: Points of a curve, at most; further positions are put together.
BINS = 32


@dataclass(frozen=True)
class Stretches:
    """A text at one length.

    Attributes:
        text: its name.
        length: tokens before eviction.
        continuation: tokens after it.
        summaries: under all settings.
    """

    text: str
    length: int
    continuation: int
    summaries: tuple[FidelitySummary, ...]

    @property
    def words(self) -> str:
        """What was predicted after what."""
        return f"{self.text}: {count(self.continuation)} tokens after {count(self.length)}"

    @property
    def evicted(self) -> list[FidelitySummary]:
        """All but the full cache."""
        return [s for s in self.summaries if s.setting.policy != NONE]

    @property
    def budgets(self) -> list[str]:
        """Those of few rows first."""
        rows: dict[str, float] = {}
        for s in self.evicted:
            rows.setdefault(s.setting.budget, s.rows)
        return sorted(rows, key=lambda name: rows[name])


def stretches(summary: Summary) -> list[Stretches]:
    """By text, length and continuation, in the summary's order."""
    keys = dict.fromkeys((s.text, s.length, s.continuation) for s in summary.fidelity)
    return [
        Stretches(
            *key,
            tuple(s for s in summary.fidelity if (s.text, s.length, s.continuation) == key),
        )
        for key in keys
    ]


def kl_chart(found: Stretches, styles: Mapping[str, int]) -> Chart:
    """Mean KL divergence over budget."""
    rows = {s.setting.budget: s.rows for s in found.evicted}
    places = {name: rows[name] for name in found.budgets}
    if len(set(places.values())) < len(places):
        places = {name: 2.0**n for n, name in enumerate(found.budgets)}
    lines = []
    for name in dict.fromkeys(s.setting.name for s in found.evicted):
        points = sorted(
            (
                Point(
                    places[s.setting.budget], s.kl.mean, s.setting.budget, kl_words(s),
                    max(s.kl.low, 0.0), s.kl.high,
                )
                for s in found.evicted
                if s.setting.name == name
            ),
            key=lambda point: point.x,
        )  # fmt: skip
        lines.append(Line(name, styles[name], tuple(points)))
    high = [point.high or point.y for line in lines for point in line.points]
    return Chart(
        "KL divergence from the exact cache",
        spaced("budget", [(place, name) for name, place in places.items()]),
        linear("KL, nats", high),
        tuple(lines),
        note=_count_words(found),
    )


def curve_charts(found: Stretches, styles: Mapping[str, int]) -> Iterator[Chart]:
    """KL, perplexity ratio and agreement over the position after eviction, at each budget."""
    kinds: tuple[tuple[str, str, Callable[[FidelitySummary], list[float]], Level | None], ...]
    kinds = (
        ("KL divergence", "KL, nats", lambda s: binned(s.kl_curve), None),
        (
            "Perplexity ratio",
            "× exact",
            lambda s: [math.exp(x) for x in binned(s.loss_curve)],
            Level("exact cache", 1.0, "1"),
        ),
        ("Same most likely token", "share", lambda s: binned(s.agreement_curve), None),
    )
    for title, label, curve, level in kinds:
        at_all = [(s, curve(s)) for s in found.evicted]
        values = [value for _, values in at_all for value in values]
        axis = linear(label, [*values, 0.0 if level is None else 1.0], zero=level is None)
        if label == "share":
            axis = Axis(label, 0, 1, tuple((n / 4, f"{n / 4:g}") for n in range(5)))
        for budget in found.budgets:
            lines = tuple(
                _curve(s.setting.name, styles[s.setting.name], found.continuation, values)
                for s, values in at_all
                if s.setting.budget == budget
            )
            yield Chart(
                f"{title}, budget {budget}",
                _positions(found.continuation),
                axis,
                lines,
                () if level is None else (level,),
                _curve_words(found),
            )


def binned(curve: Sequence[float], bins: int = BINS) -> list[float]:
    """Means of at most `bins` runs of neighbours, as equal in length as can be."""
    edges = bin_edges(len(curve), bins)
    return [math.fsum(curve[a:b]) / (b - a) for a, b in pairwise(edges)]


def bin_edges(length: int, bins: int = BINS) -> list[int]:
    """Where those runs begin, and the end of the last."""
    bins = min(length, bins)
    return [length * n // bins for n in range(bins + 1)]


def fidelity_table(found: Stretches) -> TextTable:
    """All measures by setting and budget."""
    rows = tuple(
        (
            FULL_CACHE if s.setting.policy == NONE else f"{s.setting.name} {s.setting.budget}",
            kl_words(s),
            f"{100 * s.agreement.mean:.1f}%",
            f"{s.perplexity:.2f}",
            f"{s.perplexity / s.exact_perplexity:.3f}",
            f"{100 * s.rows:.1f}%",
        )
        for s in found.summaries
    )
    headers = ("setting", "KL, nats", "same top token", "perplexity", "× exact", "rows")
    return TextTable(found.words, headers, rows, _count_words(found))


def kl_words(s: FidelitySummary) -> str:
    """Mean KL and its interval, where there is one."""
    if s.kl.count == 1:
        return f"{s.kl.mean:.4f}"
    return f"{s.kl.mean:.4f} ({max(s.kl.low, 0.0):.4f} – {s.kl.high:.4f})"


def _count_words(found: Stretches) -> str:
    counts = sorted({s.kl.count for s in found.summaries})
    if counts == [1]:
        return "One stretch of the text: no interval can be told."
    few = f"{counts[0]} – " if len(counts) > 1 else ""
    return f"Means over {few}{counts[-1]} stretches of the text, with 95 % intervals (normal)."


def _curve_words(found: Stretches) -> str:
    most = max(b - a for a, b in pairwise(bin_edges(found.continuation)))
    most_stretches = max(s.kl.count for s in found.summaries)
    plural = "es" if most_stretches != 1 else ""
    what = f"up to {most} position{'s' if most > 1 else ''} of {most_stretches} stretch{plural}"
    return f"Each point is the mean of {what}."


def _curve(name: str, style: int, length: int, values: Sequence[float]) -> Line:
    edges = bin_edges(length)
    points = []
    for start, stop, value in zip(edges[:-1], edges[1:], values, strict=True):
        at = str(start + 1) if stop - start == 1 else f"{start + 1} – {stop}"
        points.append(Point((start + 1 + stop) / 2, value, at, f"{value:.4g}"))
    return Line(name, style, tuple(points), marked=False)


def _positions(length: int) -> Axis:
    ticks = [tick for tick in linear("", [1, max(length, 2)]).ticks if tick[0] <= length]
    return Axis(
        "position after eviction",
        0,
        max(length, 2),
        tuple((value, shown(value)) for value, _ in ticks),
    )
