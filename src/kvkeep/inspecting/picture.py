"""An inspection as a PNG file: layers by positions."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence

import numpy as np

from kvkeep.inspecting.inspection import Inspection
from kvkeep.inspecting.page import budget_words, rows_words
from kvkeep.pages import count, require_matplotlib, written

# The page's colours on white: what stays is blue, what goes is grey, strong where it scored high.
_KEPT, _GONE = np.array([29, 84, 214]) / 255, np.array([120, 122, 128]) / 255
_MOST_COLUMNS = 1600


def save_png(
    inspection: Inspection,
    file_name: str | os.PathLike[str],
    *,
    layers: Sequence[int] | None = None,
) -> None:
    """Draw layers × positions at the asked budget, and write it as a PNG file.

    Args:
        layers: indices of the layers to show; None is all.

    Raises:
        ConfigError: matplotlib is not installed, or there is no such layer.
        OutputError: the file cannot be written.
    """
    module = require_matplotlib()
    shown = inspection.shown(layers)
    image = kept_image(inspection, shown)
    height = min(max(2.6, 1.5 + 0.13 * len(shown)), 12.0)
    figure = module.Figure(figsize=(11.0, height), layout="constrained")
    axes = figure.subplots()
    length = inspection.positions
    axes.imshow(
        image,
        aspect="auto",
        interpolation="nearest",
        extent=(0, length, len(shown) - 0.5, -0.5),
    )
    step = max(1, len(shown) // 15)
    axes.set_yticks(
        range(0, len(shown), step), [str(inspection.layers[at].index) for at in shown[::step]]
    )
    axes.set_xlabel("position")
    axes.set_ylabel("layer")
    rung = inspection.rungs[inspection.asked]
    words = f"{inspection.config.policy}, {budget_words(rung.budget)}"
    axes.set_title(f"{words}: rows kept {rows_words(inspection, rung)}", fontsize=10, loc="left")
    axes.set_title(f"{count(length + 1)} tokens", fontsize=9, loc="right", color="0.35")
    patch = importlib.import_module("matplotlib.patches").Patch
    marks = (
        (1.0, 1.0, "kept, high score"),
        (1.0, 0.0, "kept, low score"),
        (0.5, 1.0, "kept by half of the heads"),
        (0.0, 1.0, "evicted, high score"),
        (0.0, 0.0, "evicted, low score"),
    )
    handles = [
        patch(
            facecolor=tuple(_colour(np.array(shade), np.array(kept))), edgecolor="0.6", label=text
        )
        for kept, shade, text in marks
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    with written(file_name) as path:
        figure.savefig(path, dpi=150, format="png")


def kept_image(inspection: Inspection, shown: Sequence[int]) -> np.ndarray:
    """RGB in [0, 1], [layers, columns, 3]; the mean over heads, at most 1,600 columns.

    A column of several positions has their highest score and the mean of what stays.
    """
    length = inspection.positions
    edges = np.linspace(0, length, min(length, _MOST_COLUMNS) + 1).astype(int)[:-1]
    widths = np.diff([*edges, length])
    rows = []
    for at in shown:
        scores = inspection.layers[at].scores
        order = np.argsort(np.argsort(scores, axis=1, kind="stable"), axis=1)
        shade = (order / max(length - 1, 1)).mean(axis=0)
        kept = inspection.kept(at).mean(axis=0)
        shade, kept = np.maximum.reduceat(shade, edges), np.add.reduceat(kept, edges) / widths
        rows.append(_colour(shade, kept))
    return np.stack(rows)


def _colour(shade: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """White under a veil of grey to blue, thicker for higher scores and for what stays."""
    kept = kept[..., None]
    ink = _GONE + (_KEPT - _GONE) * kept
    veil = (0.06 + 0.3 * kept) + (0.44 + 0.2 * kept) * shade[..., None] ** 2
    return 1 - veil * (1 - ink)
