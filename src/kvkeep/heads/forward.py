"""Stock models run over light caches: which layers have heads, and that the run is theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from kvkeep.attention import install, model_name
from kvkeep.caches import is_plain
from kvkeep.errors import HeadProfileError, UnsupportedModelError
from kvkeep.heads.layers import GatedLayer, OnePassLayer, Streaming, require_called_once

Rows = tuple[mx.array, mx.array]
Light = TypeVar("Light", bound=OnePassLayer)

_STEP = 2048  # tokens per forward of a prefill, as in mlx-lm


@dataclass(frozen=True)
class HeadShape:
    """The KV heads of a model that can be told apart.

    Attributes:
        layers: indices in the cache list of plain full attention.
        kv_heads: H_kv.
    """

    layers: tuple[int, ...]
    kv_heads: int


def head_shape(model: Any) -> HeadShape:
    """Which layers have heads to profile; sliding-window, state and other layers have none.

    Raises:
        HeadProfileError: there is no such layer, or they have unequal numbers of heads.
    """
    cache = make_prompt_cache(model)
    layers = [index for index, layer in enumerate(cache) if is_plain(layer)]
    model(mx.array([[0]]), cache=cache)  # never computed: the shapes are known before
    filled = [index for index in layers if cache[index].keys is not None]
    counts = {int(cache[index].keys.shape[1]) for index in filled}
    if not filled or len(counts) > 1:
        raise HeadProfileError(
            f"the heads of model {model_name(model)!r} cannot be profiled",
            expected="layers of plain full attention with one number of KV heads",
            received=f"{len(filled)} such layers with {sorted(counts)} KV heads",
        )
    return HeadShape(tuple(filled), counts.pop())


class Prefilled:
    """A text read by the stock model up to some token, from which light caches go on.

    Args:
        run: the model or its body.
        model: whose caches they are.
        shape: its heads.
        tokens: what is read; none for a light cache from the start.
    """

    def __init__(self, run: Any, model: Any, shape: HeadShape, tokens: Sequence[int]) -> None:
        self.shape, self.length = shape, len(tokens)
        self.cache = make_prompt_cache(model)
        for start in range(0, len(tokens), _STEP):
            run(mx.array(list(tokens[start : start + _STEP]))[None], cache=self.cache)
            mx.eval([layer.state for layer in self.cache])
        self.rows: dict[int, Rows | None] = dict.fromkeys(shape.layers)
        if tokens:
            for index in shape.layers:
                keys, values = self.cache[index].keys_and_values()
                self.rows[index] = (mx.contiguous(keys), mx.contiguous(values))
            mx.eval([rows for rows in self.rows.values() if rows is not None])
        self._others = [
            None if index in self.rows else copy.deepcopy(layer)
            for index, layer in enumerate(self.cache)
        ]

    def light(
        self, make: Callable[[int, Rows | None], Light]
    ) -> tuple[list[Any], dict[int, Light]]:
        """A cache list with light layers where there are heads, and those layers.

        Args:
            make: (index in the cache list, rows of the prefix) -> the light layer to use there.
        """
        made = {index: make(index, rows) for index, rows in self.rows.items()}
        return [
            made[index] if index in made else copy.deepcopy(other)
            for index, other in enumerate(self._others)
        ], made


def require_reproducible(model: Any, shape: HeadShape, tokens: Sequence[int]) -> None:
    """Refuse a model that light caches would run otherwise than its own.

    Raises:
        HeadProfileError: its attention is not seen, or does more than plain causal attention
            (a bias, a window over full-attention caches).
    """
    install(model)
    name = model_name(model)
    inputs = mx.array(list(tokens))[None]
    gates = mx.ones(shape.kv_heads)
    cache, made = Prefilled(model, model, shape, ()).light(
        lambda index, rows: GatedLayer(gates, Streaming(0, 1), rows)
    )
    try:
        light = model(inputs, cache=cache)[0, -1]
    except UnsupportedModelError as refusal:  # by the seam: the mask carries scores
        raise HeadProfileError(
            f"the heads of model {name!r} cannot be profiled",
            expected="plain causal attention in the layers that hold a KVCache",
            received=str(refusal),
        ) from refusal
    require_called_once(made, name)
    stock = model(inputs, cache=make_prompt_cache(model))[0, -1]
    share = 1e-3 if stock.dtype == mx.float32 else 5e-2
    light, stock = light.astype(mx.float32), stock.astype(mx.float32)
    expected, found = np.asarray(stock), np.asarray(light)
    error = float(np.abs(found - expected).max())
    if not error <= share * float(np.abs(expected).max()):
        raise HeadProfileError(
            f"the heads of model {name!r} cannot be profiled",
            expected="plain causal attention in the layers that hold a KVCache",
            received=f"logits that differ by {error:.3g} from it",
            remedy="Its mask says more than that.",
        )
