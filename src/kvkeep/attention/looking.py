"""Finding a model's facts: forwards are built over caches of its own, and never computed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import CacheList, make_prompt_cache

from kvkeep.attention import seam
from kvkeep.attention.capture import SnapKVAttentionCapture
from kvkeep.attention.facts import ALONG, FAST, OWN, SEAM, LeafFacts, ModelFacts
from kvkeep.attention.latent import absorbers_of, rotated_part
from kvkeep.attention.rotations import hearing_rotations
from kvkeep.caches import (
    PositionPreservingKVCache,
    RaggedKVCache,
    is_plain,
    leaves_of,
    replace_leaves,
)
from kvkeep.errors import KvkeepError
from kvkeep.spec import LayerSelection

_PROMPT = 6  # tokens of the first forward
_STAY = (0, 2, 3, 5)  # positions of it that a stand-in for an evicted cache holds
# What mlx-lm's models call the size of blocks, where they attend to blocks of rows.
_BLOCKS = ("block_sparse", "index_block_size")
_known: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}


def facts_of(model: Any) -> ModelFacts:
    """What a model does with each of its caches; looked at once per model.

    A few tokens are run through it: first with its own caches, then with caches that lost
    rows. Only graphs are built, so it costs milliseconds and no memory of the model's size.
    A model that fails at this has a `failure` and no leaves.
    """
    return _remembered(model, "facts", _look)


def stand_in_fault(model: Any) -> str | None:
    """Why a model cannot do with rows that only their cache can attend to, or None.

    Stores of unequal heads, and batches with one, hand such stand-ins out. Some models work
    on the rows themselves before attention (a change of dtype is enough).
    """
    return _remembered(model, "stand-ins", lambda m: _fault(m, _chosen(m), None, _ragged_stand_in))


def batch_fault(model: Any) -> str | None:
    """Why a model cannot decode evicted requests in a batch, or None.

    A batch's mask is an array that one layer's rows size: a layer that keeps all of its own
    and does more with it than attention fails. What the model fails at without eviction is
    no fault of it.
    """
    return _remembered(model, "batch", _batch_fault)


def _remembered(model: Any, what: str, look: Callable[[Any], Any]) -> Any:
    key = id(model)
    known = _known.get(key)
    found = known[1] if known is not None and known[0]() is model else {}
    if what not in found:
        found[what] = look(model)
        with contextlib.suppress(TypeError):  # what takes no weak reference is looked at again
            _known[key] = weakref.ref(model, lambda _: _known.pop(key, None)), found
    return found[what]


def _chosen(model: Any) -> list[int]:
    return [index for index, leaf in enumerate(facts_of(model).leaves) if leaf.evictable]


def _batch_fault(model: Any) -> str | None:
    def fault(evicted: Sequence[int]) -> str | None:
        requests = [_read(model, evicted, _stand_in) for _ in range(2)]
        try:
            batch = [layers[0].merge(list(layers)) for layers in zip(*requests, strict=True)]
            model(mx.zeros((2, 1), mx.int32), cache=batch)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    found = fault(chosen) if (chosen := _chosen(model)) else None
    return None if found is None or fault([]) is not None else found


def _look(model: Any) -> ModelFacts:
    seam.install(model)
    try:
        cache = make_prompt_cache(model)
        watch = _Watch(cache)
        watch.run(model, _PROMPT)
        several = watch.calls
        offsets = watch.run(model, 1)
        leaves = _with_absorbers(model, watch.facts(several))
        leaves = _without_own_attention(model, leaves)
        return ModelFacts(_without_unfit(model, leaves, offsets))
    except Exception as error:  # any model may fail, in any way: it will fail where it is run
        return ModelFacts(failure=f"{type(error).__name__}: {error}")


class _Watch:
    """Attention calls over the leaves of a fresh cache list, forward by forward.

    Attributes:
        calls: by leaf, the last forward's (array mask, query heads, keys, found by, sinks,
            values are keys).
        updates: by leaf, how often rows were added in the last forward.
    """

    def __init__(self, cache: list[Any]) -> None:
        self.cache, self.leaves = cache, leaves_of(cache)
        self.fast: set[int] = set()
        self._handed: dict[int, tuple[Any, int]] = {}
        self._begin()
        for index, leaf in enumerate(self.leaves):
            if is_plain(leaf):
                leaf.update_and_fetch = self._adding(leaf.update_and_fetch, index)
                leaf.keys_and_values = self._reading(leaf.keys_and_values, index)

    def _begin(self) -> None:
        self.calls: dict[int, list[dict[str, Any]]] = {}
        self.updates = [0] * len(self.leaves)

    def run(self, model: Any, count: int) -> list[Any]:
        """Build one forward of `count` tokens; returns the offsets of its rotations."""
        self._begin()
        offsets: list[Any] = []
        self._rotated: list[mx.array] = []

        def heard(turned: mx.array, offset: Any) -> None:
            offsets.append(_plain_offset(offset))
            self._rotated.append(turned)

        with (
            seam.watched_by(self._called),
            _FastWatch(self._called_fast),
            hearing_rotations(heard),
        ):
            model(mx.zeros((1, count), mx.int32), cache=self.cache)
        return offsets

    def _adding(self, method: Callable[..., Any], index: int) -> Callable[..., Any]:
        def update_and_fetch(keys: Any, values: Any) -> Any:
            rows = method(keys, values)
            self.updates[index] += 1
            self._handed[id(rows[0])] = (rows[0], index)
            return rows

        return update_and_fetch

    def _reading(self, method: Callable[..., Any], index: int) -> Callable[..., Any]:
        def keys_and_values() -> Any:
            rows = method()
            self._handed[id(rows[0])] = (rows[0], index)
            return rows

        return keys_and_values

    def _of(self, keys: Any, cache: Any) -> int | None:
        """The leaf that a call reads: by its array, by itself, or by the layer it is in."""
        if id(keys) in self._handed:
            return self._handed[id(keys)][1]
        own = cache.caches if isinstance(cache, CacheList) else [cache]
        return next((i for i, leaf in enumerate(self.leaves) if leaf is own[0]), None)

    def _called(
        self, queries: Any, keys: Any, values: Any, cache: Any, mask: Any, sinks: Any
    ) -> None:
        index = self._of(keys, cache)
        if index is not None:
            scores = isinstance(mask, mx.array) and mask.dtype != mx.bool_
            self.calls.setdefault(index, []).append(
                {
                    "scores": scores,
                    "by_key": cache is not self.leaves[index] and not isinstance(cache, CacheList),
                    "order": None if scores else self._order(keys, index),
                    "latent": scores
                    and keys is values
                    and cache is self.leaves[index]
                    and self._turned(queries, cache) is not None,
                    "sinks": sinks is not None,
                }
            )

    def _order(self, keys: mx.array, index: int) -> tuple[int, ...] | None:
        """KV head of each head in `keys`, where they are more than the cache's own."""
        leaf = self.leaves[index]
        if keys.shape[1] == leaf.keys.shape[1] or keys.shape[3] != leaf.keys.shape[3]:
            return None
        own = leaf.keys[..., : keys.shape[2], :]
        same = mx.all(keys[0][:, None] == own[0][None], axis=(2, 3))
        order = tuple(np.asarray(mx.argmax(same, axis=1)).tolist())
        return None if list(order) == sorted(order) else order

    def _turned(self, queries: mx.array, leaf: Any) -> mx.array | None:
        return rotated_part(self._rotated, queries.shape, leaf.values.shape[-1])

    def _called_fast(self, keys: Any) -> None:
        if id(keys) in self._handed:
            self.fast.add(self._handed[id(keys)][1])

    def facts(self, several: dict[int, list[dict[str, Any]]]) -> tuple[LeafFacts, ...]:
        """Of every leaf, from the last forward, of one token, and the calls of one of several."""
        places = [i for i, layer in enumerate(self.cache) for _ in leaves_of([layer])]
        found = [
            self._leaf(index, places[index], several.get(index, []))
            for index in range(len(self.leaves))
        ]
        attended = {leaf.layer for leaf in found if leaf.route in (SEAM, FAST)}
        return tuple(
            replace(leaf, route=ALONG) if leaf.route == OWN and leaf.layer in attended else leaf
            for leaf in found
        )

    def _leaf(self, index: int, layer: int, several: list[dict[str, Any]]) -> LeafFacts:
        leaf, calls = self.leaves[index], self.calls.get(index, [])
        facts = LeafFacts(type(leaf).__name__, layer)
        if not is_plain(leaf) or leaf.keys is None:
            return facts
        if not calls and not several:
            return replace(facts, route=FAST if index in self.fast else OWN)
        every = [*calls, *several]
        fixed = None
        if self.updates[index] > 1:
            fixed = "reads one layer's cache from several layers, each of which adds rows"
        return replace(
            facts,
            route=SEAM,
            readers=len(calls),
            by_key=any(call["by_key"] for call in every),
            scores_in_mask=any(call["scores"] for call in every),
            absorb=_unknown if _all_latent(calls, several) else None,
            head_order=next((call["order"] for call in every if call["order"]), None),
            sinks=any(call["sinks"] for call in every),
            fixed=fixed,
        )


class _FastWatch(SnapKVAttentionCapture):
    """Hears of attention calls that a model makes itself."""

    def __init__(self, heard: Callable[[Any], None]) -> None:
        super().__init__(1)
        self._heard = heard

    def record(
        self, queries: mx.array, keys: mx.array, scale: float, mask: Any, sinks: Any
    ) -> None:
        self._heard(keys)


def _plain_offset(offset: Any) -> Any:
    """A rotation's offset as a number, where it is one; arrays of one number hold a constant."""
    if isinstance(offset, mx.array):
        return offset.item() if offset.size == 1 else None
    return offset


def _all_latent(single: list[dict[str, Any]], several: list[dict[str, Any]]) -> bool:
    """Whether one token's queries come absorbed, and several tokens' with scores in the mask."""
    scored = all(call["scores"] for call in several)
    return bool(single) and scored and all(call["latent"] for call in single)


def _unknown(queries: mx.array) -> mx.array:
    raise NotImplementedError  # stands for an absorber that is not looked up yet


def _with_absorbers(model: Any, leaves: tuple[LeafFacts, ...]) -> tuple[LeafFacts, ...]:
    latent = [index for index, leaf in enumerate(leaves) if leaf.latent]
    found = dict(zip(latent, absorbers_of(model, len(latent)), strict=False))
    return tuple(replace(leaf, absorb=found.get(i)) for i, leaf in enumerate(leaves))


def _without_own_attention(model: Any, leaves: tuple[LeafFacts, ...]) -> tuple[LeafFacts, ...]:
    """Fix layers whose own arithmetic may look at more than which rows there are.

    A model that attends itself in every layer (a soft cap) reads its rows as a set. One that
    does so in some layers only has a reason, such as blocks counted by row.
    """
    others = any(leaf.route in (SEAM, FAST) for leaf in leaves)
    modules = model.modules() if isinstance(model, nn.Module) else []
    blocks = {name for module in modules for name in _BLOCKS if getattr(module, name, None)}
    reason = "attends here in arithmetic of its own, which may count rows for positions"
    indexed = {leaf.layer for leaf in leaves if leaf.route == ALONG} if blocks else set()
    return tuple(
        replace(leaf, fixed="attends here to blocks of rows, cut by their number")
        if leaf.layer in indexed
        else replace(leaf, fixed=reason)
        if leaf.route == OWN and (others or blocks)
        else leaf
        for leaf in leaves
    )


def _without_unfit(
    model: Any, leaves: tuple[LeafFacts, ...], offsets: Sequence[Any]
) -> tuple[LeafFacts, ...]:
    """Fix layers without all of whose rows the model rotates by other offsets, or fails."""
    every = [index for index, leaf in enumerate(leaves) if leaf.evictable]
    if not every or _fault(model, every, offsets) is None:
        return leaves
    found = list(leaves)
    for index in every:
        if leaves[index].route == ALONG:
            continue
        beside = [i for i in every if leaves[i].layer == leaves[index].layer]
        if (fault := _fault(model, beside, offsets)) is not None:
            found[index] = replace(found[index], fixed=fault)
    return tuple(found)


def _fault(
    model: Any,
    evicted: Sequence[int],
    offsets: Sequence[Any] | None,
    stand_in: Callable[[Any], Any] | None = None,
) -> str | None:
    """What goes wrong where these leaves have lost rows; None where nothing does.

    Args:
        offsets: what the next token is rotated by, where that is to be compared.
        stand_in: makes the cache of a leaf that lost rows.
    """
    cache = _read(model, evicted, stand_in or _stand_in)
    heard: list[Any] = []
    try:
        with hearing_rotations(lambda _, offset: heard.append(_plain_offset(offset))):
            model(mx.zeros((1, 1), mx.int32), cache=cache)
        model(mx.zeros((1, 2), mx.int32), cache=cache)
    except KvkeepError as error:
        return f"cannot do without rows here: {error.problem}"
    except Exception as error:
        return f"cannot do without rows here ({type(error).__name__}: {error})"
    if offsets is not None and heard != list(offsets):
        return "has other layers that read these rows and count them for positions"
    return None


def _read(model: Any, evicted: Sequence[int], stand_in: Callable[[Any], Any]) -> list[Any]:
    """A cache list of the first forward, with stand-ins for some leaves."""
    cache = make_prompt_cache(model)
    model(mx.zeros((1, _PROMPT), mx.int32), cache=cache)
    leaves = leaves_of(cache)
    replace_leaves(cache, {index: stand_in(leaves[index]) for index in evicted})
    return cache


def _stand_in(leaf: Any) -> PositionPreservingKVCache:
    """A cache that lost rows, of the shapes and dtypes of a fresh one."""
    rows = list(_STAY)
    keys, values = (side[..., : len(rows), :] for side in leaf.keys_and_values())
    return PositionPreservingKVCache(keys, values, offset=_PROMPT, positions=rows)


def _ragged_stand_in(leaf: Any) -> RaggedKVCache:
    keys, values = leaf.keys_and_values()
    kept = LayerSelection((np.array(_STAY),) * keys.shape[1])
    return RaggedKVCache.from_selection(keys, values, kept, _PROMPT)
