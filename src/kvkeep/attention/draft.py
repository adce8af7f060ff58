"""What the model would say next, drafted over its own cache and taken off again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from kvkeep.attention import seam
from kvkeep.attention.facts import ModelFacts
from kvkeep.attention.latent import latent_group
from kvkeep.attention.observe import observing, require_visible
from kvkeep.attention.prefill import LayerDraft, Observation
from kvkeep.attention.undo import require_trimmable, restorer, restorer_of_rows
from kvkeep.caches import leaves_of, row_groups
from kvkeep.policies import Policy


@dataclass(frozen=True)
class DraftStart:
    """Where a draft of the answer starts and ends.

    Attributes:
        token: the one that follows what the cache holds: mostly the prompt's last. None where
            it is not known: the draft then begins with what the model takes for it.
        stop: token ids that end an answer.
    """

    token: int | None = None
    stop: frozenset[int] = frozenset()


def drafted(
    model: Any,
    tokens: Sequence[int],
    cache: list[Any],
    layers: list[int],
    policy: Policy,
    seen: Observation,
    start: DraftStart,
) -> Observation:
    """Let the model answer a few tokens greedily, and keep what its attention looked like.

    Afterwards the cache holds the very rows it held before.

    Args:
        tokens: token ids, of which the last is the last that the cache holds.
        cache: exact or compact layers; unchanged when this returns or raises.
        layers: indices, among the leaves, of the layers to observe.
        policy: says how many tokens (`Policy.draft_length`).
        seen: of the prefill.
        start: where to begin, where to end.

    Returns:
        `seen` with the drafts.

    Raises:
        CacheError: the next token is not known, and the cache cannot be trimmed by one.
        UnsupportedModelError: the seam cannot see the model's queries.
    """
    seam.install(model)
    leaves, first = leaves_of(cache), start.token
    if first is None:  # one step back, for what the model takes for the next token
        require_trimmable(leaves, "draft", "Say which token follows (DraftStart.token).")
        undo = [restorer_of_rows(leaf, 1) for leaf in leaves]
    else:
        undo = [restorer(leaves)]
    drafter = _Drafter(model, cache, leaves, layers, policy.name, seen.facts)
    try:
        if first is None:
            for leaf in leaves:
                leaf.trim(1)
            first = drafter.step(tokens[-1], keep=False)
        drafter.say(first, policy.draft_length, start.stop)
        drafts = drafter.drafts()
    finally:
        for give_back in undo:
            give_back()
    return replace(seen, drafts=drafts)


class _Drafter:
    """Steps a model greedily over its cache, observed."""

    def __init__(
        self,
        model: Any,
        cache: list[Any],
        leaves: list[Any],
        layers: list[int],
        policy: str,
        facts: ModelFacts,
    ) -> None:
        self._model, self._cache, self._leaves = model, cache, leaves
        self._layers, self._policy, self._facts = layers, policy, facts
        self._queries: dict[int, list[mx.array]] = {layer: [] for layer in layers}

    def say(self, first: int, count: int, stop: frozenset[int]) -> None:
        """Take in `first` and what follows it: `count` tokens, fewer where an answer ends."""
        token = first
        for number in range(count):
            if number and token in stop:
                return
            token = self.step(token)

    def step(self, token: int, *, keep: bool = True) -> int:
        """Take one token in; returns the most likely next one."""
        with observing(self._leaves, self._layers, 1, facts=self._facts) as observers:
            logits = self._model(mx.array([[token]]), cache=self._cache)
            require_visible(observers, self._model, self._policy, facts=self._facts)
        queries = {layer: observer.queries for layer, observer in observers.items()}
        chosen = mx.argmax(logits[0, -1])
        mx.eval(chosen, list(queries.values()), [layer.state for layer in self._cache])
        if keep:
            for layer, rows in queries.items():
                assert rows is not None  # require_visible refused models that show none
                self._queries[layer].append(rows)
        return int(np.asarray(chosen))

    def drafts(self) -> dict[int, LayerDraft]:
        """What was seen, by layer, with the keys that the cache holds of it."""
        found = {}
        for layer, rows in self._queries.items():
            groups = row_groups(self._leaves[layer])
            if self._facts.of(layer).latent:
                groups = tuple(latent_group(group) for group in groups)
            keys = [mx.contiguous(group.keys[:, -len(rows) :]) for group in groups]
            heads = [group.heads for group in groups]
            found[layer] = LayerDraft(mx.concatenate(rows, axis=2), heads, keys)
        mx.eval([[draft.queries, draft.keys] for draft in found.values()])
        return found
