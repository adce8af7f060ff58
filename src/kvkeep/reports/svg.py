"""Charts as SVG: light and dark by variables of CSS, text as text, the same bytes every time."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.pages import escaped
from kvkeep.reports.charts import Axis, Chart, Level, Line, Point
from kvkeep.reports.palette import EXACT, SERIES, colour_number, css_alone, dashes, marker

_LOOKS = "".join(
    f".chart .s{n} {{ stroke: var(--series-{n}); color: var(--series-{n}); }}\n"
    for n in range(len(SERIES["light"]))
)
#: Of all charts, in the page and alone.
CHART_CSS = f"""\
.chart {{ display: block; max-width: 100%; height: auto; font-family: var(--sans, system-ui,
  -apple-system, "Segoe UI", "Noto Sans", sans-serif); }}
.chart text {{ fill: var(--muted); }}
.chart .strong {{ fill: var(--text); font-weight: 650; }}
.chart .ink {{ stroke: var(--text); color: var(--text); }}
{_LOOKS}.chart .rule {{ stroke: var(--line); stroke-width: 1; fill: none; }}
.chart .path {{ fill: none; stroke-width: 2; stroke-linejoin: round; }}
.chart .bar {{ fill: none; stroke-width: 1.2; opacity: 0.75; }}
.chart .mark {{ fill: currentColor; stroke-width: 1.6; stroke-linejoin: round; }}
.chart .band {{ fill: currentColor; stroke: none; opacity: 0.07; }}
.chart .open, .chart .ground {{ fill: var(--panel); }}
"""
_FONT = 11
_RIGHT, _TOP, _BOTTOM = 10, 26, 38
_EM = 0.56  # width of a letter over the font's size, about


@dataclass(frozen=True)
class Size:
    """Of a chart, in the SVG's own units: what the text is 11 of.

    Attributes:
        width, height: of all of it.
    """

    width: int
    height: int


MAIN, SMALL = Size(350, 245), Size(280, 190)


def figure(chart: Chart, mark: str, size: Size = MAIN) -> str:
    """A chart for a page that has `CHART_CSS`: an image with a name and a description.

    Args:
        mark: begins the element ids in it.
    """
    described = f"{escaped(mark)}-desc"
    return (
        f'<svg class="chart" viewBox="0 0 {size.width} {size.height}" role="img"'
        f' aria-label="{escaped(chart.title)}" aria-describedby="{described}">'
        f'<desc id="{described}">{escaped(chart.described)}</desc>{_drawn(chart, size)}</svg>'
    )


def swatch(item: Line | Level) -> str:
    """A line's look, for a legend; without a name."""
    return (
        '<svg class="chart swatch" viewBox="0 0 34 12" width="34" height="12" aria-hidden="true">'
        f"{_sample(item, 0, 6)}</svg>"
    )


def standalone(charts: Sequence[Chart], title: str, foot: str, columns: int = 2) -> str:
    """Charts side by side as a file of their own, which follows the reader's scheme.

    Args:
        title: above them.
        foot: below them, such as what they were taken on.
        columns: charts side by side, at most.
    """
    columns = max(1, min(columns, len(charts)))
    lines = -(-len(charts) // columns)
    gap, head = 16, 34
    width = columns * (MAIN.width + gap) + gap
    legend, high = _legend(legend_of(charts), width - 2 * gap)
    block = MAIN.height + 24
    told = textwrap.wrap(foot, int((width - 2 * gap) / (_FONT * _EM)))
    height = head + lines * block + high + 10 + 15 * len(told)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" role="img" aria-labelledby="t d">',
        f'<title id="t">{escaped(title)}</title>',
        f'<desc id="d">{escaped(" ".join(f"{c.title}. {c.described}" for c in charts))}</desc>',
        f"<style>{css_alone()}{CHART_CSS}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
        f'<text class="strong" x="{gap}" y="23" font-size="15">{escaped(title)}</text>',
    ]
    for number, chart in enumerate(charts):
        x = gap + (number % columns) * (MAIN.width + gap)
        y = head + (number // columns) * block
        parts.append(
            f'<g transform="translate({x} {y})"><text class="strong" y="13" font-size="12">'
            f'{escaped(chart.title)}</text><g transform="translate(0 18)">'
            f"{_drawn(chart, MAIN)}</g></g>"
        )
    y = head + lines * block
    parts.append(f'<g transform="translate({gap} {y})">{legend}</g>')
    for number, line in enumerate(told, 1):
        below = y + high + 15 * number
        parts.append(f'<text x="{gap}" y="{below}" font-size="{_FONT}">{escaped(line)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def legend_of(charts: Sequence[Chart]) -> list[Line | Level]:
    """Each name of some charts once."""
    items: dict[str, Line | Level] = {}
    for chart in charts:
        for item in (*chart.levels, *chart.lines):
            items.setdefault(item.name, item)
    return list(items.values())


def _legend(items: Sequence[Line | Level], width: float) -> tuple[str, int]:
    """Items in lines of some width, and their height."""
    parts, x, y = [], 0.0, 14
    for item in items:
        wide = 40 + len(item.name) * 12 * _EM + 16
        if x and x + wide > width:
            x, y = 0.0, y + 18
        parts.append(
            f"{_sample(item, x, y - 4)}"
            f'<text x="{_n(x + 40)}" y="{y}" font-size="12">{escaped(item.name)}</text>'
        )
        x += wide
    return "".join(parts), y + 6


# -- one chart -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frame:
    """Where values come to lie."""

    x: Axis
    y: Axis
    left: float
    top: float
    width: float
    height: float

    def across(self, value: float) -> float:
        return self.left + self.width * self.x.place(value)

    def up(self, value: float) -> float:
        place = self.y.place(min(max(value, self.y.low), self.y.high))
        return self.top + self.height * (1 - place)


def _drawn(chart: Chart, size: Size) -> str:
    widest = max((len(words) for _, words in chart.y.ticks), default=1)
    left = 10 + widest * _FONT * _EM
    frame = _Frame(
        chart.x, chart.y, left, _TOP, size.width - left - _RIGHT, size.height - _TOP - _BOTTOM
    )
    parts = [_axes(frame, size)]
    parts += [_level(level, frame) for level in chart.levels]
    marked = [line for line in chart.lines if line.marked]
    # Beside each other where they stand at the same x; wider where there is no other x.
    room = 24.0 if len(chart.x.ticks) > 1 else 90.0
    apart = min(room / 5, room / max(len(marked), 1))
    for line in chart.lines:
        shift = (marked.index(line) - (len(marked) - 1) / 2) * apart if line in marked else 0.0
        parts.append(_line(line, frame, shift))
    return "".join(parts)


def _axes(frame: _Frame, size: Size) -> str:
    bottom, right = frame.top + frame.height, frame.left + frame.width
    parts = [f'<text x="0" y="11" font-size="{_FONT}">{escaped(frame.y.label)}</text>']
    for value, words in frame.y.ticks:
        y = frame.up(value)
        parts.append(
            f'<path class="rule" d="M{_n(frame.left)} {_n(y)}H{_n(right)}"/>'
            f'<text x="{_n(frame.left - 6)}" y="{_n(y + 4)}" text-anchor="end"'
            f' font-size="{_FONT}">{escaped(words)}</text>'
        )
    free = -math.inf
    for value, words in frame.x.ticks:
        x, half = frame.across(value), len(words) * _FONT * _EM / 2
        parts.append(f'<path class="rule" d="M{_n(x)} {_n(bottom)}v4"/>')
        if x - half > free:
            free = x + half + 4
            inside = min(x, size.width - half)
            parts.append(
                f'<text x="{_n(inside)}" y="{_n(bottom + 18)}" text-anchor="middle"'
                f' font-size="{_FONT}">{escaped(words)}</text>'
            )
    parts.append(
        f'<text x="{_n(frame.left + frame.width / 2)}" y="{_n(bottom + 33)}"'
        f' text-anchor="middle" font-size="{_FONT}">{escaped(frame.x.label)}</text>'
    )
    return "".join(parts)


def _level(level: Level, frame: _Frame) -> str:
    y, look = frame.up(level.y), _look(level.style)
    parts = []
    if level.low is not None and level.high is not None:
        top = frame.up(level.high)
        parts.append(
            f'<rect class="band {look}" x="{_n(frame.left)}" y="{_n(top)}"'
            f' width="{_n(frame.width)}" height="{_n(frame.up(level.low) - top)}"/>'
        )
    parts.append(
        f'<path class="path {look}"{_dashed(level.style)} d="M{_n(frame.left)} {_n(y)}'
        f'h{_n(frame.width)}"><title>{escaped(f"{level.name}: {level.told}")}</title></path>'
    )
    return "".join(parts)


def _line(line: Line, frame: _Frame, shift: float) -> str:
    look = _look(line.style)
    places = [(frame.across(point.x) + shift, frame.up(point.y)) for point in line.points]
    steps = "L".join(f"{_n(x)} {_n(y)}" for x, y in places)
    parts = []
    if len(places) > 1:
        parts.append(f'<path class="path {look}"{_dashed(line.style)} d="M{steps}"/>')
    for point, (x, y) in zip(line.points, places, strict=True):
        parts.append(_point(point, line, frame, x, y))
    return "".join(parts)


def _point(point: Point, line: Line, frame: _Frame, x: float, y: float) -> str:
    look, parts = _look(line.style), []
    if point.low is not None and point.high is not None and point.low < point.high:
        low, high = frame.up(point.low), frame.up(point.high)
        parts.append(
            f'<path class="bar {look}" d="M{_n(x - 3)} {_n(low)}h6m-3 0V{_n(high)}m-3 0h6"/>'
        )
    if line.marked:
        parts.append(_mark(line.style, x, y))
    if not parts:
        return ""
    told = escaped(f"{line.name}, {point.at}: {point.told}")
    return f"<g><title>{told}</title>{''.join(parts)}</g>"


def _sample(item: Line | Level, x: float, y: float) -> str:
    path = f'<path class="path {_look(item.style)}"{_dashed(item.style)} d="M{_n(x)} {_n(y)}h34"/>'
    return path + _mark(item.style, x + 17, y) if isinstance(item, Line) and item.marked else path


def _mark(style: int, x: float, y: float) -> str:
    r = 3.8
    paths = {
        "square": f"M{_n(x - r)} {_n(y - r)}h{_n(2 * r)}v{_n(2 * r)}h{_n(-2 * r)}z",
        "triangle": f"M{_n(x)} {_n(y - r - 1)}l{_n(r + 1)} {_n(2 * r)}h{_n(-2 * r - 2)}z",
        "down": f"M{_n(x)} {_n(y + r + 1)}l{_n(r + 1)} {_n(-2 * r)}h{_n(-2 * r - 2)}z",
        "diamond": f"M{_n(x)} {_n(y - r - 1.4)}l{_n(r + 1.4)} {_n(r + 1.4)}"
        f"l{_n(-r - 1.4)} {_n(r + 1.4)}l{_n(-r - 1.4)} {_n(-r - 1.4)}z",
        "cross": f"M{_n(x - r)} {_n(y - r)}l{_n(2 * r)} {_n(2 * r)}"
        f"m0 {_n(-2 * r)}l{_n(-2 * r)} {_n(2 * r)}",
    }
    look, kind = _look(style), marker(style) if style >= 0 else "circle"
    hollow = " open" if style < EXACT else ""
    if kind == "circle":
        return f'<circle class="mark {look}{hollow}" cx="{_n(x)}" cy="{_n(y)}" r="{r}"/>'
    return f'<path class="mark {look}" d="{paths[kind]}"/>'


def _look(style: int) -> str:
    return "ink" if style < 0 else f"s{colour_number(style)}"


def _dashed(style: int) -> str:
    pattern = dashes(style)
    return f' stroke-dasharray="{" ".join(map(_n, pattern))}"' if pattern else ""


def _n(value: float) -> str:
    """A coordinate: two decimals at most."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
