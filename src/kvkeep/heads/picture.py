"""A profile as a heat map: a PNG file, or characters on a terminal."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from kvkeep.errors import ConfigError, HeadProfileError
from kvkeep.pages import require_matplotlib
from kvkeep.spec import HeadProfile


def score_table(profile: HeadProfile) -> np.ndarray:
    """Scores [L, H_kv] in the order of the layers."""
    return np.array(list(profile.scores.values()))


def save_picture(profile: HeadProfile, file_name: str | os.PathLike[str]) -> None:
    """Draw layers × KV heads as a heat map, and write it as a PNG file.

    Raises:
        ConfigError: matplotlib is not installed, or the name does not end in ".png".
        HeadProfileError: the file cannot be written.
    """
    path = Path(file_name)
    require_png(path)
    module = require_matplotlib()
    table = score_table(profile).T
    heads, layers = table.shape
    figure = module.Figure(
        figsize=(max(4.0, 1.6 + 0.22 * layers), max(1.8, 1.2 + 0.22 * heads)), layout="constrained"
    )
    axes = figure.subplots()
    image = axes.imshow(table, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    step = max(1, layers // 16)
    axes.set_xticks(range(0, layers, step), [str(i) for i in list(profile.scores)[::step]])
    axes.set_yticks(range(0, heads, max(1, heads // 16)))
    axes.set_xlabel("layer")
    axes.set_ylabel("KV head")
    axes.set_title(f"{profile.model_name}: {profile.method}, {profile.steps} steps", fontsize=9)
    figure.colorbar(image, ax=axes, label="score")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".kvkeep-") as folder:
            temporary = Path(folder) / path.name
            figure.savefig(temporary, dpi=150)
            os.replace(temporary, path)
    except OSError as error:
        raise HeadProfileError(f"cannot write {path}", received=str(error)) from error


def require_png(path: Path) -> None:
    """Refuse another kind of picture.

    Raises:
        ConfigError: the name does not end in ".png".
    """
    if path.suffix.lower() != ".png":
        raise ConfigError(
            "bad name for a picture", expected="a file name that ends in .png", received=str(path)
        )
