"""Put a cache list back as it was when what was run into it fails."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from kvkeep.caches import is_compact, is_exact, is_plain
from kvkeep.errors import CacheError


@contextlib.contextmanager
def unchanged_on_error(cache: list[Any]) -> Iterator[None]:
    """Restore every layer of a cache list if the body raises; the error goes on.

    The body may append tokens to the layers, but trim nothing that was there before.
    Full-attention rows are never written over by that, so only their number is noted; the
    other layers (sliding windows, states: small) are copied.
    """
    give_back = restorer(cache)
    try:
        yield
    except Exception:
        give_back()
        raise


def restorer(cache: list[Any]) -> Callable[[], None]:
    """What takes appended tokens off every layer again; see `unchanged_on_error`."""
    restore = [_restorer(layer) for layer in cache]

    def give_back() -> None:
        for undo in restore:
            undo()

    return give_back


def _restorer(layer: Any) -> Callable[[], None]:
    if is_plain(layer) and layer.keys is not None:
        return _plain(layer, layer.offset)
    if is_compact(layer) and layer.keys is not None:
        return _compact(layer, layer.offset)
    return restorer_of_copy(layer)


def _plain(layer: Any, offset: int) -> Callable[[], None]:
    def give_back() -> None:
        layer.offset = offset

    return give_back


def _compact(layer: Any, offset: int) -> Callable[[], None]:
    def give_back() -> None:
        layer.trim(layer.offset - offset)

    return give_back


def restorer_of_copy(layer: Any) -> Callable[[], None]:
    """What gives a layer's cache everything back that it holds now."""
    before = copy.deepcopy(layer)

    def give_back() -> None:
        layer.__dict__.clear()
        layer.__dict__.update(before.__dict__)

    return give_back


def restorer_of_rows(layer: Any, width: int) -> Callable[[], None]:
    """What puts a layer back after its last `width` rows were trimmed and written over."""
    if not is_exact(layer):
        return restorer_of_copy(layer)
    offset = layer.offset
    rows = slice(offset - width, offset)
    # Copies of the rows alone: a second reference to the buffer would have it copied whole.
    keys, values = (mx.contiguous(a[..., rows, :]) for a in layer.keys_and_values())
    mx.eval(keys, values)

    def give_back() -> None:
        layer.keys[..., rows, :] = keys
        layer.values[..., rows, :] = values
        layer.offset = offset
        mx.eval(layer.keys, layer.values)

    return give_back


def require_trimmable(leaves: Sequence[Any], purpose: str, remedy: str) -> None:
    """Refuse caches that cannot be trimmed.

    Raises:
        CacheError: names their kinds.
    """
    stuck = sorted({type(leaf).__name__ for leaf in leaves if not leaf.is_trimmable()})
    if stuck:
        raise CacheError(
            f"cannot {purpose} over a cache that cannot be trimmed",
            expected="trimmable layers",
            received=", ".join(stuck),
            remedy=remedy,
        )
