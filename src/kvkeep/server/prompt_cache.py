"""mlx-lm's prompt cache, kept exact."""

from __future__ import annotations

import logging
from typing import Any

from mlx_lm.models.cache import (
    LRUPromptCache,
    QuantizedKVCache,
    can_trim_prompt_cache,
    trim_prompt_cache,
)

from kvkeep.caches import CompactCache, PositionPreservingQuantizedKVCache
from kvkeep.server import current

_COMPACT = (CompactCache, PositionPreservingQuantizedKVCache)
_log = logging.getLogger(__name__)


class ExactPromptCache(LRUPromptCache):
    """An `LRUPromptCache` of exact entries only.

    mlx-lm's cache trims entries, and drops the prefixes of a new one: right for exact caches,
    and the loss of rows or of exact prefixes with a compact one.
    """

    def insert_cache(
        self, model: Any, tokens: list[Any], prompt_cache: list[Any], **kwargs: Any
    ) -> None:
        """Keep an exact cache under the tokens that it holds; let a compact one go.

        After speculation mlx-lm's caches hold fewer tokens than they are filed under, the
        draft model's fewer than the model's.
        """
        if any(isinstance(layer, _COMPACT) for layer in prompt_cache):
            _log.debug("Prompt cache: a compact cache of %d tokens is not kept", len(tokens))
            return
        held = min([len(tokens), *(c.offset for c in prompt_cache if hasattr(c, "offset"))])
        if held < len(tokens):
            if held == 0 or not can_trim_prompt_cache(prompt_cache):
                return
            for layer in prompt_cache:
                layer.trim(layer.offset - held)
        super().insert_cache(model, tokens[:held], prompt_cache, **kwargs)

    def fetch_nearest_cache(
        self, model: Any, tokens: list[Any]
    ) -> tuple[list[Any] | None, list[Any]]:
        """The cache of the longest prefix that leaves unread what this thread's request asks.

        At least one token is left: mlx-lm's generators do not take an empty prompt.
        """
        cache, rest = super().fetch_nearest_cache(model, tokens)
        plan = current.peek()
        unread = 1 if plan is None else plan.unread
        evicted = plan is not None and plan.kv.config is not None
        if cache is None or (evicted and any(isinstance(c, QuantizedKVCache) for c in cache)):
            return None, tokens
        surplus = unread - len(rest)
        if surplus <= 0:
            return cache, rest
        if unread >= len(tokens) or not can_trim_prompt_cache(cache):
            return None, tokens
        trim_prompt_cache(cache, surplus)
        return cache, tokens[-unread:]
