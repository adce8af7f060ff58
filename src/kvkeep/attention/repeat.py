"""Reading a prompt a second time over its own cache, for policies that look at that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from kvkeep.attention import seam
from kvkeep.attention.observe import observing, require_visible
from kvkeep.attention.prefill import Observation, gatherings_of
from kvkeep.attention.undo import restorer
from kvkeep.caches import is_plain, leaves_of
from kvkeep.errors import CacheError
from kvkeep.policies import Policy, Replayed

_LAST_TOKENS = 8  # of the chunk before, which an instruction to go on ends with


@dataclass(frozen=True)
class RepeatPrompt:
    """Token ids of the instructions to repeat the prompt. All may be empty.

    Attributes:
        first: stand before the first chunk.
        later: stand before the last 8 tokens of the previous chunk, which stand before each
            later one.
    """

    first: tuple[int, ...] = ()
    later: tuple[int, ...] = ()

    def before(self, tokens: Sequence[int], start: int) -> list[int]:
        """What stands before the chunk that begins at `start`."""
        if start == 0 or not self.later:
            return list(self.first)
        return [*self.later, *tokens[max(start - _LAST_TOKENS, 0) : start]]


def require_repeatable(cache: list[Any], layers: list[int], policy: str) -> None:
    """Refuse a cache that holds something before the prompt is prefilled.

    Raises:
        CacheError: it does.
    """
    leaves = leaves_of(cache)
    if any(not is_plain(leaves[layer]) or leaves[layer].offset for layer in layers):
        raise CacheError(
            f"policy {policy!r} reads the whole prompt again and knows no tokens of before",
            expected="an empty cache",
            received=f"one at position {leaves[layers[0]].offset}",
            remedy="Prefill the whole prompt at once, or use another policy for later turns.",
        )


def repeated(
    model: Any,
    tokens: Sequence[int],
    cache: list[Any],
    layers: list[int],
    scorer: Policy,
    seen: Observation,
    prompt: RepeatPrompt,
    step: int,
) -> Observation:
    """Read the prompt again, chunk by chunk, and feed the policy's accumulators with that.

    Each chunk follows the whole prompt and the instruction, at positions from T on. After it
    every layer holds what it held before: full-attention layers are trimmed, others (sliding
    windows, states) put back from a copy.

    Args:
        tokens: T token ids, all that the cache holds.
        cache: exact layers, as a prefill left them; unchanged when this returns or raises.
        layers: indices of the layers to observe.
        scorer: has an accumulator, and `chunk_size` as an option.
        seen: of the prefill.
        prompt: instructions.
        step: tokens per forward, at most.

    Returns:
        `seen` with what was gathered.

    Raises:
        UnsupportedModelError: the seam cannot see the model's queries.
    """
    seam.install(model)
    gatherings = gatherings_of(scorer, layers, seen.parts, seen.facts)
    size: int = getattr(scorer, "chunk_size", len(tokens))
    leaves = leaves_of(cache)
    for start in range(0, len(tokens), size):
        stop = min(start + size, len(tokens))
        ids = [*prompt.before(tokens, start), *tokens[start:stop]]
        for gathering in gatherings.values():
            gathering.replayed = Replayed(len(tokens), start, stop)
        give_back = restorer(leaves)
        try:
            for first in range(0, len(ids), step):
                chunk = mx.array(ids[first : first + step])[None]
                with observing(
                    leaves, layers, 0, gatherings=gatherings, facts=seen.facts
                ) as observers:
                    model(chunk, cache=cache)
                require_visible(observers, model, scorer.name, facts=seen.facts)
                mx.eval([layer.state for layer in cache])
        finally:
            give_back()
        mx.clear_cache()
    return replace(seen, gatherings=gatherings)
