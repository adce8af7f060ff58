"""Inspections that are made up or of tiny models, for the tests of the page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvkeep import EvictionConfig
from kvkeep.inspecting import InspectedLayer, Inspection, Rung, TextUnit
from kvkeep.selection import select_rows
from kvkeep.spec import Budget, LayerSelection, Selection


def made_up(
    texts: Sequence[str],
    *,
    layers: int = 2,
    heads: int = 2,
    shares: Sequence[float] = (0.1, 0.25, 0.5, 0.75),
    seed: int = 0,
) -> Inspection:
    """An inspection of one token per text, the last of them unscored; scores are random."""
    random = np.random.default_rng(seed)
    length = len(texts) - 1
    inspected = tuple(
        InspectedLayer(at, heads, random.lognormal(0, 2, (heads, length)).astype(np.float32))
        for at in range(layers)
    )
    rungs = []
    for share in shares:
        keep = max(1, int(share * length))
        kept = {
            layer.index: LayerSelection(tuple(select_rows(layer.scores, keep)))
            for layer in inspected
        }
        rungs.append(
            Rung(Budget(share, "share"), Selection(length, kept), float(keep), 1000 * keep)
        )
    asked = len(rungs) // 2
    return Inspection(
        name="made up",
        config=EvictionConfig(policy="snapkv", budget=rungs[asked].budget),
        tokens=np.arange(len(texts)),
        units=tuple(TextUnit(text, 1) for text in texts),
        layers=inspected,
        rungs=tuple(rungs),
        asked=asked,
        exact_nbytes=1000 * length,
        other_layers=0,
        prefill_seconds=1.0,
        score_seconds=0.1,
    )
