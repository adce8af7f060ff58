"""Lookahead: span's scores, by the queries of a drafted answer as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvkeep.errors import ConfigError
from kvkeep.policies.base import Need
from kvkeep.policies.span import GAP, Span
from kvkeep.policies.window import apart, window_attention
from kvkeep.spec import Drafted, LayerView


@dataclass(frozen=True)
class Lookahead(Span):
    """As `span`, over the window's queries and those of the answer that the model drafts.

    After the prefill the model answers `draft_tokens` tokens greedily over the exact cache;
    their rows are taken off again and nothing of the draft is answered. Its queries join the
    window's as the latest ones, which count most. They look where the answer will look, also
    where the prompt's end does not say what is asked: the task stands before the text, one
    question asks for several things, or what is asked hangs on what was found.

    Costs `draft_tokens` steps over the exact cache, beside the prefill.

    Source: kvkeep; queries of a drafted answer as in Wang et al., "Lookahead Q-Cache",
    arXiv:2505.20334, which drafts over an evicted cache. Query-aware.

    Attributes:
        window, pool_kernel, pooling, group: as `span` has them.
        draft_tokens: K, tokens to draft at most; fewer where the answer ends.

    Raises:
        ConfigError: an option is out of range.
    """

    draft_tokens: int = 32

    name: ClassVar[str] = "lookahead"
    needs: ClassVar[frozenset[Need]] = frozenset({"queries", "keys", "draft"})
    summary: ClassVar[str] = "as span, by the last W queries and those of a drafted answer"
    source: ClassVar[str] = "kvkeep, after span and Lookahead Q-Cache, arXiv:2505.20334"

    @property
    def draft_length(self) -> int:
        """K."""
        return self.draft_tokens

    def _cubes(self, view: LayerView) -> mx.array:
        """[H_q, T] float32: of the window and the draft, as if they were one window.

        Raises:
            ConfigError: the view has no window, or nothing was drafted for it.
        """
        draft = view.draft
        if draft is None or view.queries is None:
            raise ConfigError(
                "no draft for a policy that needs one",
                expected="a LayerView with queries [H_q, W, D] and a draft",
                received="none",
            )
        window, count = view.queries.shape[1], draft.queries.shape[1]
        whole = (window + count) * (window + count + 1)
        lateness = mx.arange(window + 1, window + count + 1, dtype=mx.float32) * (2 / whole)
        before = super()._cubes(view) * (window * (window + 1) / whole)
        return before + _draft_cubes(view, draft, lateness)


def _draft_cubes(view: LayerView, draft: Drafted, lateness: mx.array) -> mx.array:
    """[H_q, T] float32: cubed attention of the draft's queries to the rows before it.

    The drafted keys share the softmax and get no score. They are not joined to the others,
    which would copy all of them.

    Args:
        lateness: [n] float32, what each query counts.
    """
    heads, count, _ = draft.queries.shape
    length = view.keys.shape[1]
    total = mx.zeros((heads, length))
    for start in range(0, count, view.score_chunk_size):
        stop = min(start + view.score_chunk_size, count)
        late = lateness[start:stop, None]

        def cubes(weights: mx.array, late: mx.array = late) -> mx.array:
            return (weights * weights * weights * late).sum(axis=2)

        part = window_attention(
            draft.queries[:, start:stop],
            view.keys,
            view.scale,
            cubes,
            sinks=view.sinks,
            bias=lambda start, stop: mx.array(0.0),  # all rows lie before the draft
            factors=apart(length + start, stop - start, GAP),
            beside=_own_mass(draft, start, stop, view.scale),
        )
        total = total + part.reshape(heads, length)
        mx.eval(total)
    return total


def _own_mass(draft: Drafted, start: int, stop: int, scale: float) -> mx.array:
    """[H_q, w] float32: log-sum-exp of the logits that drafted tokens give each other."""
    kv_heads, _, dim = draft.keys.shape
    queries = draft.queries[:, start:stop].astype(mx.float32) * scale
    keys = draft.keys[:, :stop].astype(mx.float32)
    logits = queries.reshape(kv_heads, -1, stop - start, dim) @ keys[:, None].swapaxes(-1, -2)
    seen = mx.arange(stop)[None] <= mx.arange(start, stop)[:, None]
    mass = mx.logsumexp(mx.where(seen, logits, -mx.inf), axis=-1)
    return mass.reshape(-1, stop - start)
