"""The prompt cache as mlx-lm's server asks for it."""

from __future__ import annotations

import logging
from typing import Any

from mlx_lm.models.cache import QuantizedKVCache, can_trim_prompt_cache

from kvkeep.caches import CompactCache, PositionPreservingQuantizedKVCache
from kvkeep.errors import CacheError
from kvkeep.reuse import Hit, PromptStore, StoredPrompt
from kvkeep.reuse.store import ROLES
from kvkeep.server import current
from kvkeep.server.current import HeldLayers, Plan, Reused
from kvkeep.server.monitor import Stored

_QUANTIZED = (QuantizedKVCache, PositionPreservingQuantizedKVCache)
_log = logging.getLogger(__name__)


class ServerPromptCache(PromptStore):
    """A `PromptStore` with the methods of mlx-lm's `LRUPromptCache` that its server calls.

    Args:
        max_entries, max_nbytes: as in `PromptStore`.
        keep_compact: whether compact caches are kept, too.
    """

    def __init__(
        self, max_entries: int = 10, max_nbytes: int | None = None, *, keep_compact: bool = False
    ) -> None:
        super().__init__(max_entries, max_nbytes)
        self.keep_compact = keep_compact

    def insert_cache(
        self, model: Any, tokens: list[Any], prompt_cache: list[Any], cache_type: str = "assistant"
    ) -> None:
        """Keep a request's cache under the tokens that it holds.

        After speculation mlx-lm's caches hold fewer tokens than they are filed under, the
        draft model's fewer than the model's. An empty list is a checkpoint that is not kept.
        """
        if not prompt_cache:
            return
        layers = list(prompt_cache)
        if isinstance(prompt_cache, HeldLayers):
            prompt_cache.clear()  # mlx-lm's loop holds on to the list
        plan = prompt_cache.plan if isinstance(prompt_cache, HeldLayers) else current.peek()
        config, compacted_at = None, 0
        if any(isinstance(layer, CompactCache) for layer in layers):
            if not self.keep_compact or plan is None or not plan.compacted_at:
                return
            if any(isinstance(c, PositionPreservingQuantizedKVCache) for c in layers):
                return  # its rows cannot be chosen again
            config, compacted_at = plan.kv.config, plan.compacted_at
        held = min([len(tokens), *(c.offset for c in layers if hasattr(c, "offset"))])
        if held < max(compacted_at, 1):
            return
        if any(getattr(c, "offset", held) != held for c in layers):
            if not can_trim_prompt_cache(layers):
                return
            for layer in layers:
                layer.trim(layer.offset - held)
        try:
            self.insert(
                model,
                tokens[:held],
                layers,
                config=config,
                compacted_at=compacted_at,
                role=cache_type,
            )
        except Exception as error:  # the answer is given already
            _log.warning("A cache of %d tokens is not kept: %s", held, error)

    def fetch_nearest_cache(
        self, model: Any, tokens: list[Any]
    ) -> tuple[list[Any] | None, list[Any]]:
        """Layers of the longest prefix that leaves unread what this thread's request asks.

        At least one token is left: mlx-lm's generators do not take an empty prompt.
        """
        plan = current.peek() or Plan(current.KvRequest(), tokens)
        hit, plan.expected, plan.hit = self.look_up(model, tokens, plan), None, None
        if hit is None:
            plan.kv.entry.admitted(len(tokens))
            return None, tokens
        try:
            layers = self.take(hit)
        except CacheError:
            _log.exception("A cache of %d tokens cannot be reused", hit.length)
            plan.kv.entry.admitted(len(tokens))
            return None, tokens
        plan.hit = Reused(hit.entry.kind, hit.length, hit.entry.compacted_at)
        plan.kv.entry.admitted(len(tokens), hit.length, hit.entry.kind)
        return layers, tokens[hit.length :]

    def look_up(self, model: Any, tokens: list[Any], plan: Plan) -> Hit | None:
        """What `fetch_nearest_cache` would take."""
        evicted = plan.kv.config is not None

        def accept(entry: StoredPrompt) -> bool:
            return not (evicted and any(isinstance(c, _QUANTIZED) for c in entry.layers))

        def ready(entry: StoredPrompt) -> bool:
            return entry.compacted_at == len(tokens) - 1 and accept(entry)

        kinds = {"config": plan.kv.config, "unread": plan.unread}
        if evicted and (hit := self.find(model, tokens, **kinds, compact_unread=1, accept=ready)):
            return hit
        return self.find(model, tokens, **kinds, compact_unread=plan.compact_unread, accept=accept)

    def by_kind(self) -> dict[str, Stored]:
        """Entries and bytes, exact and compact; reads numbers only, from any thread."""
        stored: dict[str, Stored] = {}
        for entry in self:
            past = stored.get(entry.kind, Stored())
            stored[entry.kind] = Stored(past.entries + 1, past.bytes + entry.nbytes)
        return stored

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Entries and bytes by role, for mlx-lm's log line."""
        stats = {role: {"n_sequences": 0, "n_bytes": 0} for role in ROLES}
        for entry in self:
            stats[entry.role]["n_sequences"] += 1
            stats[entry.role]["n_bytes"] += entry.nbytes
        return stats
