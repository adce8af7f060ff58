"""Colours, markers and dashes of lines: told apart without colour, and by the colour-blind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

Scheme = Literal["light", "dark"]
Marker = Literal["circle", "square", "triangle", "diamond", "down", "cross"]

#: Colours of lines on the theme's panels: at least 3:1 against them (WCAG 2.2, 1.4.11).
SERIES: Mapping[Scheme, tuple[str, ...]] = {
    "light": (
        "#2a48dc", "#b5760a", "#176b4c", "#a3208f",
        "#565a00", "#2590e6", "#4a2b52", "#8a6a83",
    ),
    "dark": (
        "#6893f0", "#e0601f", "#3fe896", "#c767a2",
        "#f5d222", "#d3e1ff", "#9463ff", "#a38f6b",
    ),
}  # fmt: skip
#: What a chart that stands alone takes of the theme: panel, text, muted text, lines of the grid.
GROUND: Mapping[Scheme, Mapping[str, str]] = {
    "light": {"panel": "#ffffff", "text": "#1b1d22", "muted": "#545963", "line": "#d5d7dc"},
    "dark": {"panel": "#1a1d23", "text": "#eceef2", "muted": "#a9afba", "line": "#363b45"},
}
MARKERS: tuple[Marker, ...] = ("circle", "square", "triangle", "diamond", "down", "cross")
#: Lengths of dash and gap; empty is a whole line.
DASHES: tuple[tuple[float, ...], ...] = (
    (),
    (7, 3),
    (2, 2.5),
    (8, 3, 2, 3),
    (4, 3),
    (1, 3),
    (10, 4),
)

#: Styles that are no number of a series.
EXACT, BOUND = -1, -2
REFERENCE_DASHES: Mapping[int, tuple[float, ...]] = {EXACT: (), BOUND: (3, 3)}


def css() -> str:
    """The series' colours as variables, for both schemes."""
    return _variables({scheme: _named(colours) for scheme, colours in SERIES.items()})


def css_alone() -> str:
    """As `css`, with what the theme gives otherwise."""
    return _variables({s: {**GROUND[s], **_named(SERIES[s])} for s in SERIES})


def dashes(style: int) -> tuple[float, ...]:
    """Of a series' number, or of `EXACT` and `BOUND`."""
    return REFERENCE_DASHES[style] if style < 0 else DASHES[style % len(DASHES)]


def marker(style: int) -> Marker:
    """Of a series' number."""
    return MARKERS[style % len(MARKERS)]


def colour_number(style: int) -> int:
    """Which of the series' colours, from 0."""
    return style % len(SERIES["light"])


def styles_of(names: Iterable[str]) -> dict[str, int]:
    """A number for each name, by first appearance: one name looks the same in every chart."""
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def _named(colours: tuple[str, ...]) -> dict[str, str]:
    return {f"series-{number}": colour for number, colour in enumerate(colours)}


def _variables(schemes: Mapping[Scheme, Mapping[str, str]]) -> str:
    light, dark = (
        "".join(f"--{name}:{value};" for name, value in schemes[scheme].items())
        for scheme in ("light", "dark")
    )
    return f":root{{{light}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"
