"""R-KV: attended rows that do not repeat others stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.policies.base import Need, Scope, WindowPolicy
from kvkeep.policies.pieces import by_position, mean_direction, squares, unit
from kvkeep.policies.window import pooled, window_mass
from kvkeep.spec import LayerView


@dataclass(frozen=True)
class RKV(WindowPolicy):
    """mix * attention - (1 - mix) * redundancy, per KV head.

    Attention is the mean over the window and the group of softmax attention, then max pooled.
    Redundancy is the softmax over all T keys of a key's mean cosine similarity to the others
    (sum over the others, divided by T). Window rows hold the layer's maximum + 1.

    The authors' code spares, for each key, its last similar one from the mean, which takes
    T^2 similarities. Here none is spared, so the mean comes from one pass over the keys.

    Source: Cai et al., "R-KV", arXiv:2505.24133, section 3: made for the tokens of a long
    answer, here applied to the prompt. Query-aware.

    Attributes:
        window: W, the last prompt queries that score.
        pool_kernel: odd width of the pooling, in positions.
        mix: share of attention, between 0 and 1.

    Raises:
        ConfigError: an option is out of range.
    """

    window: int = 8
    pool_kernel: int = 7
    mix: float = 0.07

    name: ClassVar[str] = "rkv"
    needs: ClassVar[frozenset[Need]] = frozenset({"queries", "keys"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = True
    summary: ClassVar[str] = "attention of the last W queries, less the key's likeness to others"
    source: ClassVar[str] = "R-KV, arXiv:2505.24133"

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32; window rows hold the layer's maximum + 1."""
        kv_heads, length, _ = view.keys.shape
        mass = window_mass(view)
        width = view.queries.shape[1]  # type: ignore[union-attr]  # window_mass refused None
        prefix = length - width
        if prefix == 0:
            return mx.ones((kv_heads, length))
        attention = mass[:, :prefix].reshape(kv_heads, -1, prefix).mean(axis=1) / width
        total = mean_direction(view.keys)

        def likeness(keys: mx.array) -> mx.array:
            keys = unit(keys)
            return (keys * total).sum(axis=-1) - squares(keys) / length

        redundancy = mx.softmax(by_position(view.keys, likeness), axis=-1)[:, :prefix]
        scores = self.mix * pooled(attention, self.pool_kernel, "max")
        scores = scores - (1 - self.mix) * redundancy
        window = mx.broadcast_to(scores.max() + 1, (kv_heads, width))
        return mx.concatenate([scores, window], axis=1)
