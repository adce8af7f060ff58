"""Observers: the last W post-RoPE queries of one layer of one request."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvkeep.attention.facts import UNKNOWN, ModelFacts
from kvkeep.attention.gathering import Gathering
from kvkeep.attention.latent import Absorber
from kvkeep.attention.rotations import hearing_rotations
from kvkeep.errors import UnsupportedModelError

_ATTRIBUTE = "_kvkeep_observer"


class WindowObserver:
    """Collects a layer's window queries while a prompt is prefilled, across chunk borders.

    Args:
        window: W.
        end: rows the layer will hold when the prefill is done, where known: chunks
            before the window are then not looked at.
        seen: rows it holds already.
        gathering: feeds a policy's accumulator with every chunk, or None.
        readers: attention calls per forward that read these rows: layers that share them.
            Their queries count as further heads of the group.
        order: KV head of each query head, where those of one KV head do not stand together.
        absorb: makes queries over latent rows, which `queries` then are.

    Attributes:
        queries: [1, H_q, <= W, D], the last ones so far, or None.
        scale: what the model multiplies q.k by.
        sinks: the model's attention sinks [H_q], or None.
        calls: forwards seen.
        additive_mask: whether the model passed a float mask (a bias inside the softmax).
    """

    def __init__(
        self,
        window: int,
        end: int | None = None,
        seen: int = 0,
        gathering: Gathering | None = None,
        readers: int = 1,
        order: Sequence[int] | None = None,
        absorb: Absorber | None = None,
    ) -> None:
        self.window, self.end, self.seen = window, end, seen
        self.gathering, self.readers = gathering, readers
        self._absorb = absorb
        self._order = None if order is None else mx.array(np.argsort(order, kind="stable"))
        self._read: list[tuple[mx.array, float, mx.array | None]] = []  # so far in this forward
        self.queries: mx.array | None = None
        self.scale = 1.0
        self.sinks: mx.array | None = None
        self.calls = 0
        self.additive_mask = False

    def observe(
        self,
        queries: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
        cache: Any = None,
    ) -> mx.array:
        """Look at one chunk's queries [1, H_q, n, D]; returns what attention should use.

        The returned array has the same values. It depends on the window's copy, so that
        the copy is made at once and the chunk's queries are not kept alive for it.
        An accumulator is fed the rows of `cache`, which hold the chunk's own already.
        """
        used = queries
        if self._absorb is not None:
            queries = self._absorb(queries, cache)
        elif isinstance(mask, mx.array) and mask.dtype != mx.bool_:
            self.additive_mask = True
        if self._order is not None:
            queries = mx.take(queries, self._order, axis=1)
            sinks = None if sinks is None else mx.take(sinks, self._order)
        if self.readers > 1:
            self._read.append((queries, scale, sinks))
            if len(self._read) < self.readers:
                return used
            queries, scale, sinks = together(self._read, cache)
            self._read = []
        self.calls += 1
        self.seen += queries.shape[2]
        self.scale, self.sinks = scale, sinks
        if self.gathering is not None and not self.additive_mask:
            self.gathering.add(queries[0], cache, scale, sinks)
        if self.window == 0 or (self.end is not None and self.seen <= self.end - self.window):
            return used
        tail = queries[:, :, -self.window :, :]
        if self.queries is not None and tail.shape[2] < self.window:
            tail = mx.concatenate([self.queries, tail], axis=2)[:, :, -self.window :, :]
        self.queries = mx.contiguous(tail)
        return mx.depends([used], [self.queries])[0]


def together(
    read: Sequence[tuple[mx.array, float, mx.array | None]], cache: Any
) -> tuple[mx.array, float, mx.array | None]:
    """Queries of several layers over the same rows, as heads of one: [1, n H_q, w, D].

    The heads that read one KV head stand together, layer by layer. Scales become the first's.
    """
    scale = read[0][1]
    kv_heads = cache.keys.shape[1]

    def joined(parts: list[mx.array], axis: int) -> mx.array:
        grouped = [mx.unflatten(part, axis, (kv_heads, -1)) for part in parts]
        return mx.flatten(mx.concatenate(grouped, axis=axis + 1), axis, axis + 1)

    queries = [q if s == scale else q * (s / scale) for q, s, _ in read]
    sinks = [
        mx.full((q.shape[1],), -mx.inf, mx.float32) if extra is None else extra
        for q, _, extra in read
    ]
    bare = all(extra is None for _, _, extra in read)
    return joined(queries, 1), scale, None if bare else joined(sinks, 0)


def observer_of(cache: Any) -> WindowObserver | None:
    """The observer that a cache carries, if any."""
    return getattr(cache, _ATTRIBUTE, None)


@contextlib.contextmanager
def observing(
    cache: list[Any],
    layers: list[int],
    window: int,
    new_tokens: int | None = None,
    gatherings: Mapping[int, Gathering] | None = None,
    observer: type[WindowObserver] = WindowObserver,
    facts: ModelFacts = UNKNOWN,
) -> Iterator[Mapping[int, WindowObserver]]:
    """Attach an observer to these layers' caches, and take it off whatever happens.

    Args:
        cache: the leaves of a cache list.
        layers: indices of those to observe.
        window: W.
        new_tokens: tokens about to be prefilled, where known.
        gatherings: by layer, what feeds a policy's accumulators.
        observer: the class to observe with.
        facts: of the model.
    """
    observers, gatherings = {}, gatherings or {}
    rotated: deque[mx.array] = deque(maxlen=4)  # of one layer: more would stay alive
    hearing = contextlib.ExitStack()
    if any(facts.of(layer).latent for layer in layers):
        hearing.enter_context(hearing_rotations(lambda turned, _: rotated.append(turned)))
    try:
        for layer in layers:
            rows = cache[layer].size()
            end = None if new_tokens is None else rows + new_tokens
            known = facts.of(layer)
            readers, order = max(known.readers, 1), known.head_order
            absorb = None if known.absorb is None else Absorber(known.absorb, rotated)
            gathering = gatherings.get(layer)
            observers[layer] = observer(window, end, rows, gathering, readers, order, absorb)
            setattr(cache[layer], _ATTRIBUTE, observers[layer])
        yield observers
    finally:
        hearing.close()
        rotated.clear()
        for layer in observers:
            if hasattr(cache[layer], _ATTRIBUTE):
                delattr(cache[layer], _ATTRIBUTE)


def require_visible(
    observers: Mapping[int, WindowObserver],
    model: object,
    policy: str,
    *,
    queries: bool = True,
    facts: ModelFacts = UNKNOWN,
) -> None:
    """Refuse a model whose attention the seam cannot follow, after its first forward.

    Args:
        queries: whether the policy needs them; one that does not is content with a model
            whose attention is not seen at all.
        facts: of the model: scores in a mask are then expected where it says so.

    Raises:
        UnsupportedModelError: names the model, the reason and what would work.
    """
    name = model_name(model)
    unseen = [layer for layer, observer in observers.items() if observer.calls == 0]
    if unseen and queries:
        other = ", use a policy that needs no queries (`kvkeep policies` lists them)"
        if policy != "snapkv-d":
            other += ", or, where the model calls mx.fast attention itself, use policy 'snapkv-d'"
        raise UnsupportedModelError(
            f"model {name!r} computes attention on its own in {len(unseen)} of"
            f" {len(observers)} layers, so policy {policy!r} cannot see its queries",
            expected="attention through mlx_lm.models.base.scaled_dot_product_attention",
            received=f"none in layers {_few(unseen)}",
            remedy=f"Run it with eviction off{other}.",
        )
    shared = [layer for layer, observer in observers.items() if observer.calls > 1]
    if shared:
        raise UnsupportedModelError(
            f"model {name!r} reads one layer's cache from several layers",
            expected="one attention call per cache and forward",
            received=f"more in layers {_few(shared)}",
            remedy="Run it with eviction off.",
        )
    biased = [
        layer
        for layer, observer in observers.items()
        if observer.additive_mask and (queries or not facts.of(layer).scores_in_mask)
    ]
    if biased:
        raise UnsupportedModelError(
            f"model {name!r} adds positional scores to its attention through the mask,"
            + (f" which policy {policy!r} would leave out" if queries else " for every position"),
            expected="a boolean or causal mask",
            received=f"a float mask in layers {_few(biased)}",
            remedy="Run it with eviction off.",
        )


def model_name(model: object) -> str:
    """The model type as its configuration spells it, else its class."""
    kind = getattr(getattr(model, "args", None), "model_type", None)
    return str(kind or getattr(model, "model_type", None) or type(model).__name__)


def _few(layers: list[int]) -> str:
    shown = ", ".join(map(str, layers[:6]))
    return shown if len(layers) <= 6 else f"{shown}, … ({len(layers)} in all)"
