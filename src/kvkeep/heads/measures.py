"""Scores without training: what the heads look at while a passkey is recalled."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from kvkeep.attention import model_name
from kvkeep.heads.forward import HeadShape, Prefilled
from kvkeep.heads.layers import Measure, MeasuredLayer, late_attention, require_called_once
from kvkeep.heads.samples import MakeSample, Sample
from kvkeep.heads.settings import ProfileSettings

State = dict[str, mx.array]
_LATE = 64  # late queries of the running text


class HeadMeasuring:
    """The mean over samples of a measure of each head.

    Args:
        model: mlx-lm's.
        shape: its heads.
        samples: sample of a step.
        settings: see `ProfileSettings`.
    """

    def __init__(
        self, model: Any, shape: HeadShape, samples: MakeSample, settings: ProfileSettings
    ) -> None:
        self._model, self._shape, self._samples = model, shape, samples
        self._settings = settings

    def start(self) -> State:
        """Nothing measured."""
        return {"total": mx.zeros((len(self._shape.layers), self._shape.kv_heads))}

    def advance(self, state: State, index: int) -> State:
        """The state after sample `index`; `state` stays as it is."""
        sample = self._samples(index)
        measure = measure_of(sample, self._settings)
        cache, made = Prefilled(self._model, self._model, self._shape, ()).light(
            lambda _, rows: MeasuredLayer(measure, rows)
        )
        # The logits are not computed: only what was measured is asked for.
        self._model(mx.array(list(sample.tokens))[None], cache=cache)
        require_called_once(made, model_name(self._model))
        measured = [layer.measured for layer in made.values() if layer.measured is not None]
        total = state["total"] + mx.stack(measured)
        mx.eval(total)
        return {"total": total}

    def scores(self, state: State, steps: int) -> mx.array:
        """Means [L, H_kv]."""
        return state["total"] / max(steps, 1)

    def shown(self, state: State, steps: int) -> str:
        """How much was found, in a few words."""
        return f"highest {float(np.asarray(self.scores(state, steps)).max()):.2f}"


def measure_of(sample: Sample, settings: ProfileSettings) -> Measure:
    """The measure of a sample that the method asks for."""
    if settings.method == "estimate":
        return outside_mass(sample, settings)
    return recall_mass(sample)


def outside_mass(sample: Sample, settings: ProfileSettings) -> Measure:
    """Attention that late queries give to rows a streaming head would not hold.

    The queries are those of the recalled part and the last 64 of the running text before
    it; both kinds count equally. Mean over them and over the group's query heads.
    The idea is kvpress's stand-in for DuoAttention's gates (mean attention of late queries).
    """
    start, stop = sample.recall_start, len(sample.tokens)
    running = np.arange(max(start - _LATE, 0), start)
    rows = np.concatenate([running, np.arange(start, stop)])
    weight = np.where(rows < start, 0.5 / max(len(running), 1), 0.5 / max(stop - start, 1))
    columns = np.arange(stop)[None]
    outside = (columns >= settings.sinks) & (columns <= rows[:, None] - settings.recent)
    return _weighted(rows, outside * weight[:, None], by_mean=True)


def recall_mass(sample: Sample) -> Measure:
    """Attention that a recalled token's query gives to the needle it is copied from.

    The query is that of the position before, which predicts the token. Mean over
    the tokens, the highest of the group's query heads: a KV head is needed if one reads it.
    The retrieval score of arXiv:2404.15574 (section 2) counts how often a head's highest weight
    lies on the copied token; here the weights themselves are added up.
    """
    rows = np.array(sample.labels)
    table = np.zeros((len(rows), len(sample.tokens)))
    at = 0
    for recall in sample.recalls:
        count = recall.answer[1] - recall.answer[0]
        table[at : at + count, slice(*recall.needle)] = 1 / len(rows)
        at += count
    return _weighted(rows, table, by_mean=False)


def _weighted(rows: np.ndarray, table: np.ndarray, *, by_mean: bool) -> Measure:
    """Sum of attention weights times `table` [rows, T], reduced over the group."""
    queries_at = mx.array(rows.astype(np.int32))
    factors = mx.array(table.astype(np.float32))

    def measure(
        queries: mx.array, keys: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        weights = late_attention(queries, keys, scale, sinks, queries_at)
        per_head = (weights * factors).sum(axis=-1).sum(axis=-1)
        return per_head.mean(axis=1) if by_mean else per_head.max(axis=1)

    return measure
