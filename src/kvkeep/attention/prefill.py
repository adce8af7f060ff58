"""Prefill in chunks under observation, with mlx-lm's own caches and chunk borders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from kvkeep.attention import seam
from kvkeep.attention.capture import SnapKVAttentionCapture
from kvkeep.attention.facts import UNKNOWN, ModelFacts
from kvkeep.attention.gathering import Gathering, query_heads
from kvkeep.attention.looking import facts_of
from kvkeep.attention.observe import WindowObserver, observing, require_visible
from kvkeep.attention.parts import LayerParts, find_parts
from kvkeep.caches import RowGroup, leaves_of
from kvkeep.policies import Accumulator, Policy
from kvkeep.spec import Drafted

ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class LayerDraft:
    """What was drafted, of one layer.

    Attributes:
        queries: [1, H_q, n, D].
        heads: int [h], KV heads, by group of heads that hold equally many rows.
        keys: [h, n, D], likewise.
    """

    queries: mx.array
    heads: list[np.ndarray]
    keys: list[mx.array]

    def of(self, group: RowGroup) -> Drafted:
        """The part of a group's heads."""
        order = np.argsort(np.concatenate(self.heads))[group.heads].astype(np.int32)
        keys = mx.take(mx.concatenate(self.keys, axis=0), mx.array(order), axis=0)
        return Drafted(query_heads(self.queries[0], group), keys)


@dataclass(frozen=True)
class Observation:
    """What a prefill saw of the queries, and what was found of the model for the policy.

    Attributes:
        observers: by layer index, of the layers that the seam saw.
        capture: summed scores of the layers that call `mx.fast` attention themselves, where
            some evictable ones do, else None.
        parts: by layer index, the rotation and output weights that the policy asked for.
        gatherings: by layer index, what the policy's accumulators gathered.
        facts: of the model.
        drafts: by layer index, what was drafted of the answer.
    """

    observers: Mapping[int, WindowObserver]
    capture: SnapKVAttentionCapture | None = None
    parts: Mapping[int, LayerParts] = field(default_factory=dict)
    gatherings: Mapping[int, Gathering] = field(default_factory=dict)
    facts: ModelFacts = UNKNOWN
    drafts: Mapping[int, LayerDraft] = field(default_factory=dict)

    @property
    def one_set(self) -> bool:
        """Whether all layers and heads must keep the same positions: one mask serves them."""
        unseen = any(not observer.calls for observer in self.observers.values())
        return unseen or self.facts.one_set


def observed_prefill(
    model: Any,
    tokens: Sequence[int],
    cache: list[Any],
    layers: list[int],
    *,
    window: int,
    policy: str,
    scorer: Policy | None = None,
    allow_capture: bool = False,
    score_chunk_size: int = 8,
    step: int = 2048,
    progress: ProgressCallback | None = None,
) -> Observation:
    """Run `tokens` through the model into `cache`, keeping the last W queries per layer.

    Chunks, evaluation and `progress(done, total)` are as in mlx-lm's `generate_step`, so
    the rows are bit-equal to those of a stock prefill with the same step.

    Args:
        layers: indices, among the leaves, of what will be evicted; they are observed.
        window: W; 0 keeps no query, for policies that need none: a model whose queries
            cannot be seen is then accepted.
        policy: named in refusals.
        scorer: the policy itself, where it may have an accumulator or need parts of the model.
        allow_capture: let a model that calls `mx.fast` attention itself be scored by
            `SnapKVAttentionCapture` (scores of the whole model only).

    Raises:
        UnsupportedModelError: the model has no such part as the policy needs (raised at once);
            its queries cannot be seen; or the seam sees that several layers read one cache,
            or that attention's mask carries scores. Those are raised after the first chunk
            was built and before it was computed (but for what accumulators took in).
    """
    seam.install(model)
    facts = facts_of(model) if layers else UNKNOWN
    needs = frozenset() if scorer is None else scorer.needs
    parts = find_parts(model, cache, layers, needs, policy)
    gatherings = {}
    if scorer is not None and "attention" in needs:
        gatherings = gatherings_of(scorer, layers, parts, facts)
    total, done = len(tokens), 0
    report = progress or (lambda *_: None)
    report(0, total)
    use_capture = allow_capture and window > 0
    capture = SnapKVAttentionCapture(window, score_chunk_size) if use_capture else None
    leaves = leaves_of(cache)
    with observing(leaves, layers, window, total, gatherings, facts=facts) as observers:
        while done < total:
            chunk = mx.array(list(tokens[done : done + step]))[None]
            # The first chunk is captured too: it tells early whether there is anything to see.
            if capture is not None and (done == 0 or done + chunk.shape[1] > total - window):
                with capture:
                    model(chunk, cache=cache)
            else:
                model(chunk, cache=cache)
            if done == 0:
                if capture is not None and (
                    capture.calls == 0 or len(_seen(observers)) == len(layers)
                ):
                    capture = None
                seen = observers if capture is None else _seen(observers)
                every = bool({"attention", "replay"} & needs)
                require_visible(seen, model, policy, queries=window > 0 or every, facts=facts)
            windows = [o.queries for o in observers.values() if o.queries is not None]
            mx.eval([c.state for c in cache], windows)
            done += chunk.shape[1]
            report(done, total)
            mx.clear_cache()
    seen = observers if capture is None else _seen(observers)
    return Observation(seen, capture, parts, gatherings, facts)


def gatherings_of(
    scorer: Policy,
    layers: list[int],
    parts: Mapping[int, LayerParts],
    facts: ModelFacts = UNKNOWN,
) -> dict[int, Gathering]:
    """New accumulators of a policy for each of these layers."""

    def start() -> Accumulator:
        accumulator = scorer.accumulator()
        assert accumulator is not None  # a policy that needs "attention" or "replay" has one
        return accumulator

    ropes = {layer: parts[layer].rope for layer in layers if layer in parts}
    return {
        layer: Gathering(start, ropes.get(layer), latent=facts.of(layer).latent) for layer in layers
    }


def _seen(observers: Mapping[int, WindowObserver]) -> Mapping[int, WindowObserver]:
    return {layer: observer for layer, observer in observers.items() if observer.calls}
