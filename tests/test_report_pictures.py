"""Colours and pictures of reports: what can be told apart, and what is written."""

from __future__ import annotations

import itertools
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_reports import a_report
from kvkeep.errors import ConfigError, OutputError
from kvkeep.pages import asset
from kvkeep.reports import (
    bench_picture,
    eval_picture,
    require_drawable,
    save_picture,
)
from kvkeep.reports import charts as charting
from kvkeep.reports.palette import GROUND, SERIES, css
from report_results import (
    some_fidelity,
    some_results,
    some_tasks,
)

# -- colours -------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes 2009, severity 1: protanopia, deuteranopia, tritanopia.
SIGHTS = (
    np.eye(3),
    np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
              [-0.003882, -0.048116, 1.051998]]),
    np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
              [-0.011820, 0.042940, 0.968881]]),
    np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
              [0.004733, 0.691367, 0.303900]]),
)  # fmt: skip


def linear_light(colour: str) -> np.ndarray:
    values = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2.2, relative luminance and contrast ratio."""
    low, high = sorted(linear_light(c) @ [0.2126, 0.7152, 0.0722] for c in (one, other))
    return float((high + 0.05) / (low + 0.05))


def lab(light: np.ndarray) -> np.ndarray:
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x, y, z = np.cbrt(to_xyz @ light.clip(0.001, 1) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def theme() -> dict[str, dict[str, str]]:
    """Hexadecimal variables of the shared theme, dark ones over light ones."""
    text = asset("kvkeep.pages", "theme.css")
    light, dark = re.findall(r":root \{(.*?)\}", text, re.DOTALL)[:2]
    found = [dict(re.findall(r"--([\w-]+): (#\w{6});", part)) for part in (light, dark)]
    return {"light": found[0], "dark": {**found[0], **found[1]}}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out(scheme: Any) -> None:
    colours = theme()[scheme]
    for ink, ground in itertools.product(("text", "muted"), ("page", "panel")):
        assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    assert {name: colours[name] for name in GROUND[scheme]} == GROUND[scheme]
    for colour in SERIES[scheme]:
        assert contrast(colour, colours["panel"]) >= 3, colour
        assert colour in css()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_six_colours_differ_for_the_colour_blind(scheme: Any) -> None:
    for sight in SIGHTS:
        seen = [lab(sight @ linear_light(colour)) for colour in SERIES[scheme][:6]]
        for (i, one), (j, other) in itertools.combinations(enumerate(seen), 2):
            assert np.linalg.norm(one - other) > 15, (i, j)


# -- pictures ------------------------------------------------------------------------------


def test_an_svg_is_whole_and_stands_alone(tmp_path: Path) -> None:
    (title,) = (chart.title for chart in eval_picture(some_results(*some_tasks())).charts)
    assert title == "1,000 tokens, query-aware, 12 examples"
    for name, picture in (
        ("eval", eval_picture(some_results())),
        ("bench", bench_picture(a_report())),
        ("text", eval_picture(some_results(*some_fidelity()))),
    ):
        path = tmp_path / "new" / f"{name}.svg"
        save_picture(picture, path)
        root = ET.fromstring(path.read_text(encoding="utf-8"))
        assert root.tag.endswith("svg") and root.get("role") == "img"
        text = path.read_text(encoding="utf-8")
        assert "prefers-color-scheme: dark" in text and "http" not in text.replace(
            "http://www.w3.org/2000/svg", ""
        )
        lines = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
        assert " ".join(map(str, lines)).endswith(picture.foot)
        width = float(str(root.get("width")))
        assert all(len(str(line)) * 5 < width for line in lines)
        before = path.read_bytes()
        save_picture(picture, path)
        assert path.read_bytes() == before
    assert sorted(p.name for p in path.parent.iterdir()) == ["bench.svg", "eval.svg", "text.svg"]


def test_a_png_is_drawn_by_matplotlib(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'eval' is not installed")
    path = tmp_path / "a.png"
    save_picture(eval_picture(some_results(model_name="$x_$y")), path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_pictures_of_other_kinds_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OutputError, match=r"ends in \.svg or \.png"):
        require_drawable(tmp_path / "a.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    require_drawable(tmp_path / "a.svg")
    with pytest.raises(ConfigError, match="matplotlib"):
        require_drawable(tmp_path / "a.png")


# -- axes ----------------------------------------------------------------------------------


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_and_hold_the_values(low: float, span: float) -> None:
    ticks = charting.even_ticks(low, low + span)
    assert ticks[0] <= low + span * 1e-6 and ticks[-1] >= low + span * (1 - 1e-6)
    assert 2 <= len(ticks) <= 7
    steps = np.diff(ticks)
    assert np.allclose(steps, steps[0], rtol=1e-6)


def test_an_axis_of_one_value_has_it_in_the_middle() -> None:
    axis = charting.spaced("budget", [(0.25, "25%")])
    assert axis.place(0.25) == pytest.approx(0.5)
    ratios = charting.spaced("budget", [(0.1, "10%"), (0.2, "20%"), (0.4, "40%")])
    at = [ratios.place(x) for x, _ in ratios.ticks]
    assert at[1] - at[0] == pytest.approx(at[2] - at[1])
    assert charting.linear("KL", [0.0, 0.0]).high > 0
