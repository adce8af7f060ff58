"""The one place where kvkeep joins mlx-lm's attention.

`mlx_lm.models.base.scaled_dot_product_attention` gets `cache=`, that is, layer and request
in one. A dispatcher takes its place there and in every loaded `mlx_lm.models.*` module that
holds it by name. For caches that are not kvkeep's and carry no observer it calls mlx-lm's
function unchanged.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm.models.base as base
from mlx_lm.models.cache import CacheList

from kvkeep.attention import capture
from kvkeep.attention.observe import observer_of
from kvkeep.caches import (
    BatchMixedKVCache,
    BatchPositionPreservingKVCache,
    CompactCache,
    RowsForAttentionOnly,
    is_own_mask,
    is_window_mask,
    on_seam_needed,
)
from kvkeep.errors import UnsupportedModelError

_KVKEEPS = (CompactCache, BatchPositionPreservingKVCache, BatchMixedKVCache)
_NAME = "scaled_dot_product_attention"
_lock = threading.Lock()
_stock = base.scaled_dot_product_attention
_replaced = _stock  # what stood where the dispatcher stands
_original = _stock  # what the dispatcher calls for it
_held: dict[str, Any] = {}  # module name -> its own function, where the dispatcher stands
_was_installed = False
_chained = False  # a function that may call the dispatcher stands behind it
_inner = threading.local()
_watches: dict[int, Callable[..., None]] = {}  # by thread
_notes = threading.local()  # .owners: id of a rows' array -> that array and its cache, weakly


def install(model: object | None = None) -> None:
    """Put the dispatcher in place. Idempotent; later imports find it in `base`.

    Args:
        model: its module is covered as well, for models that live outside mlx-lm.
    """
    global _replaced, _original, _was_installed, _chained
    with _lock:
        if base.scaled_dot_product_attention is not _dispatch:
            _replaced = base.scaled_dot_product_attention
            _chained = _was_installed and _replaced is not _stock
            _original = _once_inside(_replaced) if _chained else _replaced
        _was_installed = True
        for module in _modules(model):
            if (own := module.__dict__.get(_NAME)) in (_replaced, _stock):
                _held[module.__name__] = own
                setattr(module, _NAME, _dispatch)


def remove() -> None:
    """Give each module its own function back, wherever the dispatcher still stands."""
    with _lock:
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and module.__dict__.get(_NAME) is _dispatch:
                setattr(module, _NAME, _held.get(name, _replaced))
        _held.clear()


def installed() -> bool:
    """Whether the dispatcher stands in `mlx_lm.models.base`."""
    return base.scaled_dot_product_attention is _dispatch


def _once_inside(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Another tool's function that may wrap our dispatcher: let it not come round again."""

    def call(*args: Any, **kwargs: Any) -> mx.array:
        _inner.on = True
        try:
            return function(*args, **kwargs)
        finally:
            _inner.on = False

    return call


def _modules(model: object | None) -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and isinstance(module, ModuleType):
            yield module
    own = sys.modules.get(type(model).__module__)
    if model is not None and own is not None:
        yield own


@contextlib.contextmanager
def watched_by(watch: Callable[..., None]) -> Iterator[None]:
    """Tell `watch` of this thread's calls: (queries, keys, values, cache, mask, sinks)."""
    thread = threading.get_ident()
    before = _watches.get(thread)
    _watches[thread] = watch
    try:
        yield
    finally:
        del _watches[thread]
        if before is not None:
            _watches[thread] = before


def _dispatch(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    if _chained and getattr(_inner, "on", False):
        return _stock(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    if _watches and (watch := _watches.get(threading.get_ident())) is not None:
        watch(queries, keys, values, cache, mask, sinks)
    cache = _owner(keys, cache)
    observer = observer_of(cache.caches[0] if isinstance(cache, CacheList) else cache)
    if observer is not None:
        queries = observer.observe(queries, scale, mask, sinks, cache)
    if capture.any_open():
        with capture.seen_by_seam():
            return _attend(queries, keys, values, cache, scale, mask, sinks)
    return _attend(queries, keys, values, cache, scale, mask, sinks)


def _owner(keys: Any, cache: Any) -> Any:
    """The cache whose rows a call reads: another than it says where layers share them.

    Rows of kvkeep's caches, and of those that are observed, are known again by their array.
    Both are held weakly: a view that outlives its step would have the buffer copied, and a
    full buffer is handed out itself.
    """
    owners = _notes.__dict__.setdefault("owners", {})
    known = owners.get(id(keys))
    if known is not None and known[0]() is keys and (owner := known[1]()) is not None:
        return owner
    if isinstance(cache, _KVKEEPS) or observer_of(cache) is not None:
        key = id(keys)
        with contextlib.suppress(TypeError):  # quantised rows are tuples
            row = weakref.ref(keys, lambda _: owners.pop(key, None))
            owners[key] = row, weakref.ref(cache)
    return cache


def _attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    if getattr(cache, "owns_attention", False):
        if _scored_for(mask, cache, queries.shape[2]):
            return _original(
                queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
            )
        if isinstance(mask, mx.array):
            _require_causal(mask, "a cache with rows of its own")
        return cache.attend(_original, queries, keys, values, scale=scale, sinks=sinks)
    if _of_another_layer(mask, cache):
        return cache.attend(_original, queries, keys, values, scale=scale, sinks=sinks)
    if type(keys) is RowsForAttentionOnly:
        keys.read_by_another_layer()
    if isinstance(mask, mx.array) and is_own_mask(mask):
        # The first layer's heads see other rows each; of this layer they see all.
        mask = None if queries.shape[2] == 1 else "causal"
    return _original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def _scored_for(mask: Any, cache: Any, n: int) -> bool:
    """Whether a mask carries scores and was made for the very rows of this batch."""
    if not isinstance(mask, mx.array) or mask.dtype == mx.bool_:
        return False
    return isinstance(cache, BatchPositionPreservingKVCache) and cache.made_last_mask(n)


def _of_another_layer(mask: Any, cache: Any) -> bool:
    """Whether a model's mask was sized by a layer with other rows than this compact cache.

    Raises:
        UnsupportedModelError: it says more than "causal", which these rows would lose.
    """
    if not isinstance(mask, mx.array) or not isinstance(cache, CompactCache):
        return False
    if mask.shape[-1] == cache.size():
        return False
    _require_causal(mask, f"a layer of {cache.size()} rows")
    return True


def _require_causal(mask: mx.array, layer: str) -> None:
    """Refuse to leave out a mask array that says more than "causal".

    Raises:
        UnsupportedModelError: it carries scores, or is a sliding window.
    """
    if mask.dtype != mx.bool_ or is_window_mask(mask):
        raise UnsupportedModelError(
            "the model's mask is made for a layer with other rows, and is no plain causal one",
            expected=f"a mask for {layer}",
            received=f"{mask.dtype} over {mask.shape[-1]} rows",
            remedy="Keep equally many rows in every layer and head.",
        )


on_seam_needed(install)
