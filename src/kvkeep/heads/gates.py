"""Gates per KV head, trained so that closing one costs little: DuoAttention's classification.

Source: arXiv:2410.10819, section 2.2 and appendix, and the configuration files of its
authors' repository (learning rate 0.02, weight 0.05, 2,000 steps, a ramp over the first and the
last fifth of them, gates clamped to [0, 1], loss on recalled passkeys).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from kvkeep.attention import body_of
from kvkeep.heads.forward import HeadShape, Prefilled
from kvkeep.heads.layers import GatedLayer
from kvkeep.heads.samples import MakeSample, Sample
from kvkeep.heads.settings import ProfileSettings

State = dict[str, mx.array]


class GateLoss:
    """The loss of a gate array on one sample.

    Mean squared difference of the last hidden states, gated from full, at the positions that
    predict a recalled passkey's tokens; plus `reg` times the mean absolute gate.

    Args:
        model: mlx-lm's; its weights stay as they are.
        shape: its heads.
        sample: the text.
        settings: streaming rows, weight, and from where heads stream.
    """

    def __init__(
        self, model: Any, shape: HeadShape, sample: Sample, settings: ProfileSettings
    ) -> None:
        self._body, self._shape, self._settings = body_of(model), shape, settings
        start = sample.recall_start if settings.streaming_from == "question" else 0
        self._inputs = mx.array(list(sample.tokens[start:]))[None]
        self._rows = mx.array([position - start for position in sample.labels])
        self._prefilled = Prefilled(self._body, model, shape, sample.tokens[:start])
        stock = self._body(self._inputs, cache=self._prefilled.cache)
        self._target = stock[0, self._rows].astype(mx.float32)
        mx.eval(self._target)

    def hidden(self, gates: mx.array) -> mx.array:
        """Last hidden states [labels, hidden] under gates [L, H_kv], in float32."""
        by_layer = dict(zip(self._shape.layers, gates, strict=True))
        streaming = self._settings.streaming
        cache, _ = self._prefilled.light(
            lambda index, rows: GatedLayer(by_layer[index], streaming, rows)
        )
        return self._body(self._inputs, cache=cache)[0, self._rows].astype(mx.float32)

    def difference(self, gates: mx.array) -> mx.array:
        """The first term alone."""
        return mx.square(self.hidden(gates) - self._target).mean()

    def __call__(self, gates: mx.array) -> mx.array:
        """The loss of gates [L, H_kv]."""
        return self.difference(gates) + self._settings.reg * mx.abs(gates).mean()


class GateTraining:
    """Adam on the gates, one sample per step.

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
        self._read: dict[int, GateLoss] = {}  # by text, where each comes more than once

    def start(self) -> State:
        """All gates open, an optimiser that has seen nothing."""
        gates = mx.ones((len(self._shape.layers), self._shape.kv_heads))
        return {"gates": gates, "m": mx.zeros_like(gates), "v": mx.zeros_like(gates)}

    def advance(self, state: State, index: int) -> State:
        """The state after step `index`; `state` stays as it is."""
        settings, loss = self._settings, self._loss(index)
        value, gradient = mx.value_and_grad(loss)(state["gates"])
        adam = optim.Adam(settings.lr * ramp(index, settings.samples), bias_correction=True)
        adam.init({"gates": state["gates"]})
        adam.state = adam.state | {
            "gates": {"m": state["m"], "v": state["v"]},
            "step": mx.array(index, mx.uint64),
        }
        gates = adam.apply_gradients({"gates": gradient}, {"gates": state["gates"]})["gates"]
        moments = adam.state["gates"]
        new = {"gates": mx.clip(gates, 0, 1), "m": moments["m"], "v": moments["v"]}
        mx.eval(new, value)
        return new

    def _loss(self, index: int) -> GateLoss:
        texts = self._settings.texts
        if texts == 0:
            return GateLoss(self._model, self._shape, self._samples(index), self._settings)
        text = index % texts
        if text not in self._read:
            self._read[text] = GateLoss(
                self._model, self._shape, self._samples(text), self._settings
            )
        return self._read[text]

    def scores(self, state: State, steps: int) -> mx.array:
        """The gates [L, H_kv]."""
        return state["gates"]

    def shown(self, state: State, steps: int) -> str:
        """How far the gates are, in a few words."""
        return f"mean gate {float(np.asarray(state['gates']).mean()):.2f}"


def ramp(step: int, steps: int) -> float:
    """Share of the peak learning rate: up over a fifth of the steps, down over the last one."""
    width = max(steps // 5, 1)
    return max(0.1, min(1.0, (step + 1) / width, (steps - step) / width))
