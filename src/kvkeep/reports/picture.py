"""The main charts of a run as one picture for a README: SVG, or PNG by matplotlib."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.bench import BenchReport
from kvkeep.errors import OutputError
from kvkeep.evaluation import Results, summarise
from kvkeep.pages import count, require_matplotlib, require_writable, written
from kvkeep.reports.charts import Chart, Level, Line
from kvkeep.reports.divergence import kl_chart, stretches
from kvkeep.reports.origin import eval_line
from kvkeep.reports.palette import (
    BOUND,
    GROUND,
    SERIES,
    colour_number,
    dashes,
    marker,
)
from kvkeep.reports.scores import Block, blocks, score_chart, setting_styles
from kvkeep.reports.speed import bytes_charts, decoded, kind_styles, speed_charts
from kvkeep.reports.svg import legend_of, standalone

#: Endings of a picture's name.
SUFFIXES = (".svg", ".png")
_MARKS = {
    "circle": "o", "square": "s", "triangle": "^", "diamond": "D", "down": "v", "cross": "x",
}  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """Charts side by side.

    Attributes:
        title: above them.
        charts: at least one.
        foot: what they were taken on.
    """

    title: str
    charts: tuple[Chart, ...]
    foot: str


def eval_picture(results: Results) -> Picture:
    """Score over budget for each protocol and length; without tasks, divergence over budget.

    Raises:
        OutputError: there is nothing to draw.
    """
    summary = summarise(results.records)
    styles = setting_styles(summary)
    charts = [score_chart(b, b.over_all, styles, _title(b)) for b in blocks(summary)]
    title = "Score by budget"
    if not charts:
        charts = [kl_chart(found, styles) for found in stretches(summary) if found.evicted]
        title = "Divergence by budget"
    return _picture(title, charts, eval_line(results))


def bench_picture(report: BenchReport) -> Picture:
    """Decode speed of the smallest batch and bytes of the cache, over the length.

    Raises:
        OutputError: there is nothing to draw.
    """
    styles, found = kind_styles(report), decoded(report)
    smallest = [one for one in found if one.batch == min(f.batch for f in found)]
    charts = [*speed_charts(smallest, styles), *bytes_charts(report, styles)]
    device = report.device
    foot = (
        f"{report.model.name}, {report.model.dtype}, {device.kind.upper()} {device.name};"
        f" kvkeep {device.kvkeep}, mlx {device.mlx}, mlx-lm {device.mlx_lm}"
    )
    return _picture("Speed and bytes after eviction", charts, foot)


def require_drawable(file_name: str | os.PathLike[str]) -> None:
    """Refuse what `save_picture` would fail on after the work was done.

    Raises:
        OutputError: another ending, or a place where nothing can be written.
        ConfigError: a PNG without matplotlib.
    """
    require_writable(file_name, *SUFFIXES)
    if Path(file_name).suffix.lower() == ".png":
        require_matplotlib()


def save_picture(picture: Picture, file_name: str | os.PathLike[str]) -> None:
    """Write a picture; an SVG follows the reader's light or dark scheme, a PNG is light.

    Raises:
        OutputError, ConfigError: as `require_drawable`.
    """
    require_drawable(file_name)
    if Path(file_name).suffix.lower() == ".png":
        _save_png(picture, file_name)
        return
    text = standalone(picture.charts, picture.title, picture.foot)
    with written(file_name) as path:
        path.write_text(text, encoding="utf-8", newline="\n")


def _title(block: Block) -> str:
    most = max(s.score.count for s in block.of(block.over_all))
    plural = "s" if most != 1 else ""
    words = f"{count(block.length)} tokens, query-{block.protocol}"
    return f"{words}, {count(most)} example{plural}"


def _picture(title: str, charts: Sequence[Chart], foot: str) -> Picture:
    if not charts:
        raise OutputError("there is nothing to draw yet", expected="results of evicted caches")
    return Picture(title, tuple(charts), foot)


# -- PNG -----------------------------------------------------------------------------------


def _save_png(picture: Picture, file_name: str | os.PathLike[str]) -> None:
    charts, ground = picture.charts, GROUND["light"]
    columns = min(2, len(charts))
    lines = -(-len(charts) // columns)
    wide, names = 5.2 * columns, [item.name for item in legend_of(charts)]
    # In inches at the legend's sizes of letters, about.
    across = max(1, min(len(names), 4, int(wide / (0.8 + 0.085 * max(map(len, names))))))
    foot = textwrap.fill(picture.foot, int(wide / 0.056))
    high = 0.55 + 0.2 * -(-len(names) // across) + 0.12 * foot.count("\n")
    figure = require_matplotlib().Figure(
        figsize=(wide, 3.5 * lines + high), layout="constrained", facecolor=ground["panel"]
    )
    places = figure.subplots(lines, columns, squeeze=False).ravel()
    for place in places[len(charts) :]:
        place.set_visible(False)
    drawn: dict[str, Any] = {}
    for chart, axes in zip(charts, places, strict=False):
        drawn = {**_drawn(chart, axes), **drawn}
    figure.suptitle(_plain(picture.title), x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.legend(
        [drawn[name] for name in names], list(map(_plain, names)), loc="outside lower left",
        ncols=across, fontsize=9, frameon=False,
        title=_plain(foot), title_fontsize=7, alignment="left",
    )  # fmt: skip
    with written(file_name) as path:
        figure.savefig(path, dpi=150, format="png", metadata={"Software": "kvkeep"})


def _drawn(chart: Chart, axes: Any) -> dict[str, Any]:
    """Draw a chart, and give each name's handle for the legend."""
    handles: dict[str, Any] = {}
    for level in chart.levels:
        handles[level.name] = axes.axhline(level.y, **_look(level))
        if level.low is not None and level.high is not None:
            axes.axhspan(level.low, level.high, color=GROUND["light"]["text"], alpha=0.08, lw=0)
    for number, line in enumerate(chart.lines):
        shift = 1 + 0.012 * (number - (len(chart.lines) - 1) / 2) if chart.x.log else 1.0
        below = [p.y - (p.y if p.low is None else p.low) for p in line.points]
        above = [(p.y if p.high is None else p.high) - p.y for p in line.points]
        handles[line.name] = axes.errorbar(
            [p.x * shift for p in line.points],
            [p.y for p in line.points],
            yerr=[[max(value, 0.0) for value in below], [max(value, 0.0) for value in above]],
            capsize=2.5, elinewidth=1, **_look(line),
        )  # fmt: skip
    axes.set_title(_plain(chart.title), fontsize=10, loc="left")
    axes.set_ylabel(_plain(chart.y.label))
    axes.set_xlabel(_plain(chart.x.label))
    if chart.x.log:
        axes.set_xscale("log")
    axes.set_xlim(chart.x.low, chart.x.high)
    # Room for the markers of what lies at an end.
    room = 0.02 * (chart.y.high - chart.y.low)
    axes.set_ylim(chart.y.low - room, chart.y.high + room)
    axes.set_xticks([x for x, _ in chart.x.ticks], [_plain(words) for _, words in chart.x.ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks([y for y, _ in chart.y.ticks], [words for _, words in chart.y.ticks])
    axes.grid(axis="y", color=GROUND["light"]["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return handles


def _look(item: Line | Level) -> dict[str, Any]:
    series = SERIES["light"]
    look: dict[str, Any] = {
        "color": GROUND["light"]["text"] if item.style < 0 else series[colour_number(item.style)],
        "linewidth": 1.8,
    }
    if dashes(item.style):
        look["linestyle"] = (0, tuple(length / 1.8 for length in dashes(item.style)))
    if isinstance(item, Line) and item.marked:
        look["marker"] = "o" if item.style < 0 else _MARKS[marker(item.style)]
        look["markersize"] = 5.5
        if item.style == BOUND:
            look["markerfacecolor"] = GROUND["light"]["panel"]
    return look


def _plain(text: str) -> str:
    """Text that matplotlib takes for no formula."""
    return text.replace("$", "\\$")
