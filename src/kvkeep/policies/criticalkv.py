"""CriticalKV: half by attention, half by attention times what the value does to the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np

from kvkeep.errors import ConfigError
from kvkeep.policies.base import Need, Scope, WindowPolicy
from kvkeep.policies.snapkv import SnapKV
from kvkeep.policies.window import PIECE_BYTES
from kvkeep.spec import LayerView, OutputWeights


@dataclass(frozen=True)
class CriticalKV(WindowPolicy):
    """SnapKV's best rows fill a share of the budget; (s + epsilon) * ||v W_o||_1 the rest.

    Per KV head the max(1, floor(stage_share * n)) highest of SnapKV's scores s hold the
    layer's maximum + 1, n being the rows to keep; of equal ones the later go first. The others
    hold s + epsilon times the mean over the group of the L1 norm of what the value becomes in
    the output projection. Multiplying all values by all output weights costs as much as that
    projection does in a prefill.

    Source: Feng et al., "Identify Critical KV Cache in LLM Inference from an Output
    Perturbation Perspective", arXiv:2502.03805; kvpress 0.5.5 criticalkv_press.py over
    snapkv_press.py, which window 64 and kernel 5 reproduce. Query-aware.

    Attributes:
        window, pool_kernel, pooling: of the SnapKV scores.
        stage_share: share of the budget that attention alone chooses.
        epsilon: added to the others' attention.

    Raises:
        ConfigError: an option is out of range.
    """

    window: int = 8
    pool_kernel: int = 31
    pooling: str = "avg"
    stage_share: float = 0.5
    epsilon: float = 1e-4

    name: ClassVar[str] = "criticalkv"
    needs: ClassVar[frozenset[Need]] = frozenset({"queries", "keys", "values", "output_weights"})
    scope: ClassVar[Scope] = "head"
    query_aware: ClassVar[bool] = True
    budget_aware: ClassVar[bool] = True
    summary: ClassVar[str] = "SnapKV's best, then its scores times the value's share of the output"
    source: ClassVar[str] = "CriticalKV, arXiv:2502.03805"

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32.

        Raises:
            ConfigError: the view has no queries, no output weights or no number of rows.
        """
        if view.keep is None or view.output_weights is None or view.queries is None:
            raise ConfigError(
                "a view that lacks what the policy needs",
                expected="a view with queries, keep and output_weights",
            )
        base = SnapKV(self.window, self.pool_kernel, self.pooling).score(view)
        scores = (base + self.epsilon) * _output_norms(
            view.values, len(view.queries), view.output_weights
        )
        promoted = _highest(np.asarray(base), max(1, int(self.stage_share * view.keep)))
        return mx.where(mx.array(promoted), scores.max() + 1, scores)


def _highest(scores: np.ndarray, count: int) -> np.ndarray:
    """Which [H, T]: the `count` highest of each head, the later of equal ones."""
    best = np.argsort(-scores[:, ::-1], axis=1, kind="stable")[:, :count]
    chosen = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(chosen, scores.shape[1] - 1 - best, True, axis=1)
    return chosen


def _output_norms(values: mx.array, heads: int, weights: OutputWeights) -> mx.array:
    """||v W_o||_1, mean over the group: [H_kv, T, D_v] to [H_kv, T] float32."""
    kv_heads, length, _ = values.shape
    group = heads // kv_heads
    rows = []
    for kv_head in range(kv_heads):
        norms = mx.zeros(length)
        for head in range(kv_head * group, (kv_head + 1) * group):
            projection = weights(head).astype(mx.float32)
            step = max(PIECE_BYTES // (4 * projection.shape[1]), 1)
            pieces = []
            for start in range(0, length, step):
                piece = values[kv_head, start : start + step].astype(mx.float32)
                pieces.append(mx.abs(piece @ projection).sum(axis=-1))
                mx.eval(pieces[-1])
            norms = norms + mx.concatenate(pieces) / group
        rows.append(norms)
    return mx.stack(rows)
