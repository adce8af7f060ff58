"""Speed and bytes of a benchmark over the prompt's length: charts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from kvkeep.bench import (
    BenchReport,
    CompactionRow,
    DecodeRow,
    PrefillRow,
    Setting,
    Spread,
    compaction_rows,
    decode_rows,
    mb_words,
    prefill_rows,
    spread_words,
)
from kvkeep.pages import count
from kvkeep.reports.charts import Axis, Chart, Level, Line, Point, linear, spaced
from kvkeep.reports.palette import BOUND, EXACT, styles_of

BOUND_NAME = "bound"
EXACT_NAME = "exact"
_LENGTH = "prompt tokens"
K = TypeVar("K")


@dataclass(frozen=True)
class Decoded:
    """What one batch size found at one budget.

    Attributes:
        batch: requests that decode together.
        budget: as it was spelled.
        exact, bound: by length; the bound of the setting that keeps the fewest rows.
        evicted: by kind of setting and length.
    """

    batch: int
    budget: str
    exact: dict[int, DecodeRow] = field(default_factory=dict)
    bound: dict[int, DecodeRow] = field(default_factory=dict)
    evicted: dict[str, dict[int, DecodeRow]] = field(default_factory=dict)


def kind_words(setting: Setting) -> str:
    """A setting without its budget."""
    allocation = "" if setting.allocation == "uniform" else f", {setting.allocation}"
    return f"{setting.policy}{allocation}, {setting.store}"


def kind_styles(report: BenchReport) -> dict[str, int]:
    """The look of each kind of setting, and of each policy's prefill, in all charts."""
    kinds = [kind_words(c.setting) for p in report.prompts for c in p.compactions]
    kinds += [kind_words(r.setting) for d in report.decodes for r in d.runs if r.setting]
    policies = styles_of(p.setting.policy for prompt in report.prompts for p in prompt.prefills)
    return {**styles_of(kinds), **policies}


def decoded(report: BenchReport) -> list[Decoded]:
    """By batch size and budget; of what was measured twice, the later figures."""
    found: dict[tuple[int, str], Decoded] = {}
    bounds: dict[tuple[int, int, int], DecodeRow] = {}
    for result in report.decodes:
        rows = decode_rows(result)
        for row in rows:
            if row.run.role == "bound":
                bounds[result.batch, result.length, row.run.rows] = row
            if (setting := row.run.setting) is None:
                continue
            key = (result.batch, setting.budget)
            one = found.setdefault(key, Decoded(*key))
            one.exact[result.length] = rows[0]
            one.evicted.setdefault(kind_words(setting), {})[result.length] = row
    for one in found.values():
        for length in one.exact:
            kept = [rows[length].run.rows for rows in one.evicted.values() if length in rows]
            one.bound[length] = bounds[one.batch, length, min(kept)]
    return sorted(found.values(), key=lambda one: one.batch)


def speed_charts(found: Iterable[Decoded], styles: Mapping[str, int]) -> Iterator[Chart]:
    """Decode speed over the exact cache's, over the length: one per batch size and budget."""
    for one in found:
        lines = [
            _line(name, styles[name], {n: _ratio(row) for n, row in by_length.items()})
            for name, by_length in one.evicted.items()
        ]
        bound = _line(BOUND_NAME, BOUND, {n: _ratio(row) for n, row in one.bound.items()})
        lines.insert(0, bound)
        yield _chart(
            f"Decode speed, {batch_words(one.batch)}, budget {one.budget}",
            "× exact",
            lines,
            (Level(EXACT_NAME, 1.0, "1"),),
            "Speed over the exact cache's, round by round; the bound is a stock cache that holds"
            " only as many rows.",
        )


def peak_charts(found: Iterable[Decoded], styles: Mapping[str, int]) -> Iterator[Chart]:
    """Bytes in use at most while decoding."""
    for one in found:
        contenders = {EXACT_NAME: (EXACT, one.exact), BOUND_NAME: (BOUND, one.bound)}
        contenders |= {name: (styles[name], rows) for name, rows in one.evicted.items()}
        lines = [
            _line(name, style, {n: _mb(row.run.peak_nbytes) for n, row in rows.items()})
            for name, (style, rows) in contenders.items()
        ]
        yield _chart(
            f"Peak memory of decoding, {batch_words(one.batch)}, budget {one.budget}",
            "MB",
            lines,
            note="Bytes in use at most over a round, with the model's weights.",
        )


def bytes_charts(report: BenchReport, styles: Mapping[str, int]) -> Iterator[Chart]:
    """Live K/V bytes of one request before and after eviction: one per budget."""
    for budget, by_kind in _compactions(report).items():
        exact: dict[int, tuple[str, Spread]] = {}
        lines = []
        for name, rows in by_kind.items():
            exact |= {n: _mb(row.compaction.exact_nbytes) for n, row in rows.items()}
            after = {n: _mb(row.compaction.compact_nbytes) for n, row in rows.items()}
            lines.append(_line(name, styles[name], after))
        lines.insert(0, _line(EXACT_NAME, EXACT, exact))
        yield _chart(f"K/V bytes of one request, budget {budget}", "live MB", lines)


def compaction_charts(report: BenchReport, styles: Mapping[str, int]) -> Iterator[Chart]:
    """Time to score and to compact, together: one per budget."""
    for budget, by_kind in _compactions(report).items():
        lines = [
            _line(name, styles[name], {n: _compaction_ms(row) for n, row in rows.items()})
            for name, rows in by_kind.items()
        ]
        yield _chart(f"Scoring and compaction, budget {budget}", "ms", lines)


def prefill_charts(report: BenchReport, styles: Mapping[str, int]) -> Iterator[Chart]:
    """What reading for eviction takes over a stock prefill: its time, then its peak memory."""
    found: dict[str, dict[int, PrefillRow]] = {}
    for prompt in report.prompts:
        for row in prefill_rows(prompt):
            found.setdefault(row.name, {})[prompt.length] = row
    if not found:
        return
    stock = found.pop("stock")
    lines = []
    for name, rows in found.items():
        spreads = {n: row.against_stock for n, row in rows.items() if row.against_stock}
        told = {n: (spread_words(spread, "{:.3f}"), spread) for n, spread in spreads.items()}
        lines.append(_line(name, styles[name], told))
    level = Level("stock", 1.0, "1")
    yield _chart("Prefill time", "× stock", lines, (level,), "Scoring and compaction left out.")
    lines = [
        _line(name, styles[name], {n: _mb(row.peak_nbytes) for n, row in rows.items()})
        for name, rows in found.items()
    ]
    peaks = _line("stock", EXACT, {n: _mb(row.peak_nbytes) for n, row in stock.items()})
    note = "Bytes in use at most from prefill to compaction, with the model's weights."
    yield _chart("Peak memory of the prefill", "MB", [peaks, *lines], (), note)


def batch_words(batch: int) -> str:
    """How many requests."""
    return "1 request" if batch == 1 else f"{batch} requests"


def _compactions(report: BenchReport) -> dict[str, dict[str, dict[int, CompactionRow]]]:
    """By budget, kind of setting and length."""
    found: dict[str, dict[str, dict[int, CompactionRow]]] = {}
    for prompt in report.prompts:
        for row in compaction_rows(prompt):
            setting = row.compaction.setting
            kinds = found.setdefault(setting.budget, {})
            kinds.setdefault(kind_words(setting), {})[prompt.length] = row
    return found


def _compaction_ms(row: CompactionRow) -> tuple[str, Spread]:
    found = row.compaction
    both = zip(found.score_seconds, found.compact_seconds, strict=True)
    spread = Spread.of([1000 * (score + compact) for score, compact in both])
    return spread_words(spread, "{:,.1f}"), spread


def _ratio(row: DecodeRow) -> tuple[str, Spread]:
    assert row.against_exact is not None
    return spread_words(row.against_exact, "{:.2f}"), row.against_exact


def _mb(nbytes: int) -> tuple[str, Spread]:
    return mb_words(nbytes), Spread.of([nbytes / 1e6])


def _line(name: str, style: int, figures: Mapping[int, tuple[str, Spread]]) -> Line:
    points = (
        Point(float(n), s.median, count(n), told, s.median_low, s.median_high)
        for n, (told, s) in sorted(figures.items())
    )
    return Line(name, style, tuple(points))


def _chart(
    title: str, label: str, lines: list[Line], levels: tuple[Level, ...] = (), note: str = ""
) -> Chart:
    shown = tuple(line for line in lines if line.points)
    points = [point for line in shown for point in line.points]
    x = Axis(_LENGTH, 0, 1, ())
    if points:
        x = spaced(_LENGTH, [(point.x, point.at) for point in points])
    highs = [point.y if point.high is None else point.high for point in points]
    return Chart(title, x, linear(label, [*highs, *(lv.y for lv in levels)]), shown, levels, note)
