"""Lookahead: span's scores, by the queries of a drafted answer as well."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import mlx.core as mx

from kvkeep.errors import ConfigError
from kvkeep.policies.base import Need
from kvkeep.policies.span import Span
from kvkeep.spec import LayerView


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

    draft_tokens: int = 16

    name: ClassVar[str] = "lookahead"
    needs: ClassVar[frozenset[Need]] = frozenset({"queries", "keys", "draft"})
    summary: ClassVar[str] = "as span, by the last W queries and those of a drafted answer"
    source: ClassVar[str] = "kvkeep, after span and Lookahead Q-Cache, arXiv:2505.20334"

    @property
    def draft_length(self) -> int:
        """K."""
        return self.draft_tokens

    def score(self, view: LayerView) -> mx.array:
        """[H_kv, T] float32.

        Raises:
            ConfigError: the view has no window, or nothing was drafted for it.
        """
        draft, length = view.draft, view.keys.shape[1]
        if draft is None or view.queries is None:
            raise ConfigError(
                "no draft for a policy that needs one",
                expected="a LayerView with queries [H_q, W, D] and a draft",
                received="none",
            )
        longer = replace(
            view,
            keys=mx.concatenate([view.keys, draft.keys], axis=1),
            queries=mx.concatenate([view.queries, draft.queries], axis=1),
        )
        return super().score(longer)[:, :length]
