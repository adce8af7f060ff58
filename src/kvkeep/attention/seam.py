"""The one place where kvkeep joins mlx-lm's attention.

`mlx_lm.models.base.scaled_dot_product_attention` gets `cache=`, that is, layer and request
in one. A dispatcher takes its place there and in every loaded `mlx_lm.models.*` module that
holds it by name. For caches that are not kvkeep's and carry no observer it calls mlx-lm's
function unchanged.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm.models.base as base

from kvkeep.attention import capture
from kvkeep.attention.observe import observer_of
from kvkeep.caches import on_seam_needed

_NAME = "scaled_dot_product_attention"
_lock = threading.Lock()
_original = base.scaled_dot_product_attention


def install(model: object | None = None) -> None:
    """Put the dispatcher in place. Idempotent; later imports find it in `base`.

    Args:
        model: its module is covered as well, for models that live outside mlx-lm.
    """
    global _original
    with _lock:
        if base.scaled_dot_product_attention is not _dispatch:
            _original = base.scaled_dot_product_attention
        for module in _modules(model):
            if module.__dict__.get(_NAME) is _original:
                setattr(module, _NAME, _dispatch)


def remove() -> None:
    """Give mlx-lm its own function back, wherever the dispatcher still stands."""
    with _lock:
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and module.__dict__.get(_NAME) is _dispatch:
                setattr(module, _NAME, _original)


def installed() -> bool:
    """Whether the dispatcher stands in `mlx_lm.models.base`."""
    return base.scaled_dot_product_attention is _dispatch


def _modules(model: object | None) -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and isinstance(module, ModuleType):
            yield module
    own = sys.modules.get(type(model).__module__)
    if model is not None and own is not None:
        yield own


def _dispatch(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    observer = observer_of(cache)
    if observer is not None:
        queries = observer.observe(queries, scale, mask, sinks)
    if capture.any_open():
        with capture.seen_by_seam():
            return _attend(queries, keys, values, cache, scale, mask, sinks)
    return _attend(queries, keys, values, cache, scale, mask, sinks)


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
        return cache.attend(_original, queries, keys, values, scale=scale, sinks=sinks)
    return _original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


on_seam_needed(install)
