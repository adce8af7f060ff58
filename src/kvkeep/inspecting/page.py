"""An inspection as one HTML file."""

from __future__ import annotations

import base64
import dataclasses
import os
from collections.abc import Sequence
from string import Template
from typing import Any

import numpy as np

from kvkeep.inspecting.inspection import InspectedLayer, Inspection, Rung
from kvkeep.inspecting.layers import thinned
from kvkeep.inspecting.levels import first_rungs, packed, quantised
from kvkeep.pages import asset, count, escaped, nbytes, percent, render_page, written
from kvkeep.spec import Budget, EvictionConfig

#: Scores (layers x sets x positions) that a page holds, at most: about 45 MB of HTML.
MAX_SCORES = 2**24

_SCRIPTS = ("data.js", "text.js", "map.js", "controls.js")


def render_html(inspection: Inspection, *, layers: Sequence[int] | None = None) -> str:
    """The page: self-contained, nothing is asked of the network, no text of the prompt runs.

    Args:
        layers: indices of the layers to show; None is all, thinned out evenly where they
            have more than `MAX_SCORES` scores.

    Raises:
        ConfigError: there is no such layer.
    """
    shown = shown_layers(inspection, layers)
    body = Template(asset("kvkeep.inspecting", "inspect.html")).substitute(
        figures=_figures(inspection), notes=_notes(inspection, shown)
    )
    script = "".join(asset("kvkeep.inspecting", name) for name in _SCRIPTS)
    return render_page(
        f"kvkeep inspect: {inspection.config.policy}, {budget_words(inspection.config.limit)}",
        body,
        styles=(asset("kvkeep.inspecting", "inspect.css"),),
        scripts=(f'"use strict";\n(() => {{\n{script}}})();\n',),
        data={"data": page_data(inspection, shown)},
    )


def save_html(
    inspection: Inspection,
    file_name: str | os.PathLike[str],
    *,
    layers: Sequence[int] | None = None,
) -> None:
    """Write the page, under a temporary name first.

    Raises:
        ConfigError: there is no such layer.
        OutputError: it cannot be written.
    """
    text = render_html(inspection, layers=layers)
    with written(file_name) as path:
        path.write_text(text, encoding="utf-8", newline="\n")


def shown_layers(inspection: Inspection, layers: Sequence[int] | None) -> list[int]:
    """Which of the inspection's layers a page of bounded size shows, as its own indices."""
    asked = inspection.shown(layers)
    if layers is not None:
        return asked
    cells = [inspection.layers[at].scores.size for at in asked]
    return thinned(asked, cells, MAX_SCORES)


def page_data(inspection: Inspection, shown: Sequence[int]) -> dict[str, Any]:
    """What the script reads: plain values, arrays in base64."""
    return {
        "positions": inspection.positions,
        "tokens": inspection.tokens.tolist(),
        "texts": [unit.text for unit in inspection.units],
        "widths": [unit.tokens for unit in inspection.units],
        "asked": inspection.asked,
        "rungs": [_rung_data(inspection, rung, shown) for rung in inspection.rungs],
        "layers": [_layer_data(inspection, at) for at in shown],
    }


def _rung_data(inspection: Inspection, rung: Rung, shown: Sequence[int]) -> dict[str, Any]:
    return {
        "label": budget_words(rung.budget),
        "rows": rows_words(inspection, rung),
        "bytes": bytes_words(inspection, rung),
        "counts": [_counts(inspection, rung, inspection.layers[at]) for at in shown],
    }


def _counts(inspection: Inspection, rung: Rung, layer: InspectedLayer) -> list[int]:
    chosen = rung.selection.layers.get(layer.index)
    return [inspection.positions] * layer.sets if chosen is None else list(chosen.counts)


def _layer_data(inspection: Inspection, at: int) -> dict[str, Any]:
    layer = inspection.layers[at]
    each = [quantised(row) for row in layer.scores]
    kept = [inspection.kept(at, rung) for rung in range(len(inspection.rungs))]
    first = first_rungs(kept)
    return {
        "index": layer.index,
        "heads": layer.heads,
        "sets": layer.sets,
        "levels": _base64(np.stack([levels for levels, _ in each])),
        "values": _base64(np.stack([values for _, values in each]).astype("<f4")),
        "first": None if first is None else _base64(first),
        "bits": _base64(packed(kept)) if first is None else None,
    }


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


# -- words ---------------------------------------------------------------------------------


def budget_words(budget: Budget) -> str:
    """A budget as a person reads it."""
    if budget.unit == "share":
        return str(budget)
    amount = int(budget.amount)
    return nbytes(amount) if budget.unit == "bytes" else f"{count(amount)} rows"


def rows_words(inspection: Inspection, rung: Rung) -> str:
    """Kept rows per KV head and their share."""
    total, rows = inspection.positions, rung.rows
    if rows == total:
        return f"all {count(total)}"
    shown = count(int(rows)) if rows == int(rows) else f"{rows:,.1f}"
    mean = "" if rung.selection.layers and _equal(rung) else " on average"
    return f"{shown} of {count(total)} per KV head{mean} ({percent(rows, total)})"


def bytes_words(inspection: Inspection, rung: Rung) -> str:
    """Bytes of the cache after and before eviction."""
    exact = inspection.exact_nbytes
    return f"{nbytes(rung.nbytes)} of {nbytes(exact)} ({percent(rung.nbytes, exact)})"


def _equal(rung: Rung) -> bool:
    return len({rows for layer in rung.selection.layers.values() for rows in layer.counts}) == 1


def config_words(config: EvictionConfig) -> list[tuple[str, str]]:
    """Policy, allocation, store, and what differs from the defaults."""
    plain, named = EvictionConfig(), ("policy", "budget", "allocation", "store")
    options = [
        f"{field.name}={value}"
        for field in dataclasses.fields(config)
        if field.name not in named
        and (value := getattr(config, field.name)) != getattr(plain, field.name)
    ]
    words = [
        ("Policy", config.policy),
        ("Allocation, store", f"{config.allocation}, {config.store}"),
    ]
    return [*words, ("Options", ", ".join(options))] if options else words


def _figures(inspection: Inspection) -> str:
    rung = inspection.rungs[inspection.asked]
    heads = sum(layer.heads for layer in inspection.layers)
    other = f", {inspection.other_layers} others never evicted" if inspection.other_layers else ""
    figures = [
        ("Model", inspection.name, None),
        ("Prompt", f"{count(inspection.positions + 1)} tokens", None),
        ("Layers", f"{len(inspection.layers)} with {count(heads)} KV heads{other}", None),
        *((name, value, None) for name, value in config_words(inspection.config)),
        ("Asked budget", budget_words(inspection.config.limit), None),
        ("Rows kept", rows_words(inspection, rung), "rows-kept"),
        ("KV cache", bytes_words(inspection, rung), "bytes-kept"),
    ]
    return "\n".join(
        f"<div><dt>{escaped(name)}</dt><dd{f' id={chr(34)}{mark}{chr(34)}' if mark else ''}>"
        f"{escaped(value)}</dd></div>"
        for name, value, mark in figures
    )


def _notes(inspection: Inspection, shown: Sequence[int]) -> str:
    notes = []
    if inspection.kept_whole:
        notes.append(
            "At the asked budget this prompt is kept whole: it is within the budget, or has at"
            f" most {count(inspection.config.min_tokens)} tokens (min_tokens)."
        )
    if len(shown) < len(inspection.layers):
        total = len(inspection.layers)
        notes.append(f"{len(shown)} of the {total} layers are shown; the figures are of all.")
    return "".join(f'<p class="note">{escaped(note)}</p>' for note in notes)
