"""Results as one HTML file that asks nothing of the network and runs no script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvkeep.bench import BenchReport, tables, warnings
from kvkeep.evaluation import Results, Summary, summarise
from kvkeep.pages import TextTable, asset, escaped, html_table, render_page
from kvkeep.reports.charts import Chart
from kvkeep.reports.divergence import curve_charts, fidelity_table, kl_chart, stretches
from kvkeep.reports.harness import harness_tables
from kvkeep.reports.headlines import bench_headline, eval_headline
from kvkeep.reports.origin import Origin, bench_facts, eval_facts
from kvkeep.reports.palette import css
from kvkeep.reports.scores import (
    blocks,
    every_task_table,
    missing_words,
    score_chart,
    score_table,
    setting_styles,
    turn_charts,
)
from kvkeep.reports.speed import (
    bytes_charts,
    compaction_charts,
    decoded,
    kind_styles,
    peak_charts,
    prefill_charts,
    speed_charts,
)
from kvkeep.reports.svg import CHART_CSS, MAIN, SMALL, Size, figure, legend_of, swatch


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: its heading.
        charts: in it; a single one stands beside the first table.
        tables: the first of `shown` are open, the others fold.
        small: whether the charts are small multiples.
        shown: how many tables are open.
    """

    title: str
    charts: tuple[Chart, ...] = ()
    tables: tuple[TextTable, ...] = ()
    small: bool = False
    shown: int = 0


def eval_page(results: Results, origin: Origin) -> str:
    """The page of an evaluation's results.

    Args:
        results: of a whole run or of one that was interrupted; the page says what is missing.
        origin: of the page.
    """
    summary = summarise(results.records)
    facts = eval_facts(results)
    notes = [words for block in blocks(summary) for words in missing_words(block)]
    return _page(
        f"kvkeep eval: {facts[0][1]}",
        eval_headline(summary),
        notes,
        [*facts, *origin.facts],
        [*_score_sections(summary), *_fidelity_sections(summary), *_harness_sections(summary)],
    )


def bench_page(report: BenchReport, origin: Origin) -> str:
    """The page of a benchmark's results; of an interrupted one, what it holds."""
    return _page(
        f"kvkeep bench: {report.model.name}",
        bench_headline(report),
        warnings(report),
        [*bench_facts(report), *origin.facts],
        _bench_sections(report),
    )


def _score_sections(summary: Summary) -> Iterator[Section]:
    styles = setting_styles(summary)
    for block in blocks(summary):
        chart = score_chart(block, block.over_all, styles, f"Score by budget, {block.over_all}")
        table = score_table(block, block.over_all)
        yield Section(f"Score by budget: {block.words}", (chart,), (table,), shown=1)
        if len(block.tasks) > 1:
            each = tuple(score_chart(block, task, styles) for task in block.tasks[:-1])
            yield Section(f"Each task: {block.words}", each, (every_task_table(block),), small=True)
        turns = tuple(turn_charts(block, styles))
        if turns:
            tables = tuple(chart.table for chart in turns)
            yield Section(f"Score per turn: {block.words}", turns, tables, small=True)


def _fidelity_sections(summary: Summary) -> Iterator[Section]:
    styles = setting_styles(summary)
    for found in stretches(summary):
        charts = (kl_chart(found, styles),) if found.evicted else ()
        title = f"Divergence from the exact cache: {found.words}"
        yield Section(title, charts, (fidelity_table(found),), shown=1)
        curves = tuple(curve_charts(found, styles))
        if curves:
            tables = tuple(chart.table for chart in curves)
            yield Section(f"By position after eviction: {found.words}", curves, tables, small=True)


def _harness_sections(summary: Summary) -> Iterator[Section]:
    for table in harness_tables(summary):
        yield Section(table.title, (), (table,), shown=1)


def _bench_sections(report: BenchReport) -> Iterator[Section]:
    styles, found = kind_styles(report), decoded(report)
    for title, charts in (
        ("Decode speed", speed_charts(found, styles)),
        ("Bytes of the cache", bytes_charts(report, styles)),
        ("Peak memory of decoding", peak_charts(found, styles)),
        ("What eviction adds to the prefill", prefill_charts(report, styles)),
        ("Time to score and compact", compaction_charts(report, styles)),
    ):
        held = tuple(charts)
        if held:
            yield Section(title, held, tuple(chart.table for chart in held))
    if report.results:
        yield Section("All figures", (), tuple(tables(report)))


# -- HTML ----------------------------------------------------------------------------------


def _page(
    title: str,
    headline: str,
    notes: Sequence[str],
    facts: Sequence[tuple[str, str]],
    sections: Iterable[Section],
) -> str:
    told = "".join(f'<p class="note">{escaped(note)}</p>\n' for note in notes)
    figures = "\n".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in facts
    )
    held = "\n".join(_section(section, f"c{at}") for at, section in enumerate(sections))
    body = (
        f'<header class="top">\n<h1>{escaped(title)}</h1>\n'
        f'<p class="headline">{escaped(headline)}</p>\n{told}</header>\n'
        f"<main>\n{held}\n"
        '<section class="panel" aria-labelledby="about"><h2 id="about">About this run</h2>\n'
        f'<dl class="figures">\n{figures}\n</dl></section>\n</main>'
    )
    return render_page(
        title, body, styles=(css(), CHART_CSS, asset("kvkeep.reports", "report.css"))
    )


def _section(section: Section, mark: str) -> str:
    size = SMALL if section.small else MAIN
    figures = [_figure(c, f"{mark}-{n}", size) for n, c in enumerate(section.charts)]
    opened = [html_table(table) for table in section.tables[: section.shown]]
    legend = _legend(section.charts)
    if len(figures) == len(opened) == 1:
        inner = f'<div class="pair"><div>{legend}{figures[0]}</div><div>{opened[0]}</div></div>'
    else:
        wide = "" if section.small else " wide"
        grid = f'<div class="charts{wide}">{"".join(figures)}</div>' if figures else ""
        inner = "".join([legend, grid, *opened])
    notes = dict.fromkeys(chart.note for chart in section.charts if chart.note)
    if not section.shown:
        inner += "".join(f'<p class="muted small">{escaped(note)}</p>' for note in notes)
    folded = [
        f"<details><summary>Table: {escaped(table.title)}</summary>{html_table(table)}</details>"
        for table in section.tables[section.shown :]
    ]
    return (
        f'<section class="panel" aria-labelledby="{mark}"><h2 id="{mark}">'
        f"{escaped(section.title)}</h2>\n{inner}{''.join(folded)}</section>"
    )


def _figure(chart: Chart, mark: str, size: Size) -> str:
    drawn = figure(chart, mark, size)
    return f"<figure><h3>{escaped(chart.title)}</h3>{drawn}</figure>"


def _legend(charts: Sequence[Chart]) -> str:
    items = "".join(
        f"<li>{swatch(item)}<span>{escaped(item.name)}</span></li>" for item in legend_of(charts)
    )
    return f'<ul class="legend" aria-label="Lines">{items}</ul>' if items else ""
