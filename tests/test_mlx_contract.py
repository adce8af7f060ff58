"""What mlx-lm asks of a cache, read off the installed version: a new demand fails here first."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.base as mlx_base
import mlx_lm.models.cache as mlx_cache
import mlx_lm.server as mlx_server
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from kvkeep import (
    PositionPreservingKVCache,
    PositionPreservingQuantizedKVCache,
)

# `mlx_lm.generate` is the function of that name.
mlx_generate = importlib.import_module("mlx_lm.generate")

PAIRS: dict[str, tuple[Any, Any]] = {
    "single": (KVCache(), PositionPreservingKVCache()),
    "quantised": (QuantizedKVCache(), PositionPreservingQuantizedKVCache()),
    "batch": (BatchKVCache([0, 0]), PositionPreservingKVCache.merge([KVCache(), KVCache()])),
}
BOTH = pytest.mark.parametrize("kind", PAIRS)

# Public names of the stock classes that ours do without, and why.
DO_WITHOUT = {
    "step": "how far a buffer grows is a matter of the class itself; nothing in mlx-lm reads it",
}
# Names that mlx-lm reads off other kinds of cache, or off lists of caches.
NOT_OURS = {
    "append": "a list's",
    "items": "a dictionary's",
}


def public(cache: Any) -> set[str]:
    return {name for name in dir(cache) if not name.startswith("_")}


def methods(cache: Any) -> set[str]:
    return {name for name in public(cache) if callable(getattr(type(cache), name, None))}


@BOTH
def test_every_public_name_of_the_stock_cache_is_there(kind: str) -> None:
    stock, ours = PAIRS[kind]
    missing = public(stock) - public(ours)
    assert missing <= set(DO_WITHOUT), f"mlx-lm's {type(stock).__name__} has {missing}"


def test_the_exceptions_are_still_needed() -> None:
    missing = set().union(*(public(stock) - public(ours) for stock, ours in PAIRS.values()))
    assert missing == set(DO_WITHOUT)


@BOTH
def test_a_property_stays_a_property_and_a_method_a_method(kind: str) -> None:
    stock, ours = PAIRS[kind]
    assert methods(stock) == methods(ours) & public(stock)


@BOTH
def test_methods_take_what_the_stock_ones_take(kind: str) -> None:
    stock, ours = PAIRS[kind]
    assert {"update_and_fetch", "trim", "make_mask", "is_trimmable", "empty"} <= methods(stock)
    for name in sorted(methods(stock)):
        asked = inspect.signature(getattr(stock, name)).parameters.values()
        taken = inspect.signature(getattr(ours, name))
        if any(p.kind is p.VAR_POSITIONAL for p in asked):
            taken.bind(1)  # `make_mask(*args, **kwargs)`: its keywords are a test of their own
            continue
        positional = [p for p in asked if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = [p.name for p in asked if p.kind is p.KEYWORD_ONLY]
        # Positional ones by place (mlx-lm calls them so), defaulted ones by name as well.
        taken.bind(*positional, **dict.fromkeys(keywords))
        named = {p.name: None for p in positional if p.default is not p.empty}
        taken.bind(*(p for p in positional if p.default is p.empty), **named)


@BOTH
def test_masks_are_asked_for_with_these_keywords(kind: str) -> None:
    """`create_attention_mask` passes them by name; the stock signature hides them."""
    ours = PAIRS[kind][1]
    assert {"n", "return_array", "window_size"} == set(inspect.signature(ours.make_mask).parameters)
    hidden = mx.zeros((1, 3, 8))
    mask = mlx_base.create_attention_mask(hidden, PositionPreservingKVCache())
    assert mask == "causal"


def test_keys_can_be_assigned() -> None:
    """Pipeline models put `mx.depends(...)` there."""
    for cache in (PositionPreservingKVCache(), PAIRS["batch"][1]):
        cache.keys = mx.zeros((1, 1, 1, 1))
        assert cache.keys.shape == (1, 1, 1, 1)
        cache.keys = None


CACHE_NAMES = {"c", "ca", "cb", "cache", "prompt_cache", "cache_a", "cache_b", "caches"}


def asked_of_caches(source: str) -> Iterator[str]:
    """Attributes that a module reads off variables named like caches, `hasattr` included."""
    for node in ast.walk(ast.parse(source)):
        target, name = None, None
        if isinstance(node, ast.Attribute):
            target, name = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("hasattr", "getattr"):
            target, name = node.args[0], getattr(node.args[1], "value", None)
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(name, str) and isinstance(target, ast.Name) and target.id in CACHE_NAMES:
            yield name


MODULES = [mlx_generate, mlx_base, mlx_server]


def test_nothing_else_is_asked_of_a_cache() -> None:
    known = set().union(*(public(ours) for _, ours in PAIRS.values())) | set(NOT_OURS)
    asked = {
        name
        for module in MODULES
        for name in asked_of_caches(Path(str(module.__file__)).read_text(encoding="utf-8"))
    }
    assert {"merge", "extract", "filter", "state", "to_quantized", "is_trimmable"} <= asked, (
        "the scan no longer finds the calls that are known: has mlx-lm renamed its variables?"
    )
    assert asked <= known, f"mlx-lm now also reads {asked - known}"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (mlx_generate, "_merge_caches"),
        (mlx_generate, "_extend_cache"),
        (mlx_generate, "maybe_quantize_kv_cache"),
        (mlx_cache, "save_prompt_cache"),
        (mlx_cache, "load_prompt_cache"),
        (mlx_base, "scaled_dot_product_attention"),
    ],
)
def test_the_functions_that_our_caches_rely_on_exist(module: Any, name: str) -> None:
    assert callable(getattr(module, name, None))


def test_mlx_lm_finds_our_classes_by_name() -> None:
    for _, ours in PAIRS.values():
        assert getattr(mlx_cache, type(ours).__name__) is type(ours)


def test_stock_methods_that_we_stand_in_for_keep_their_names() -> None:
    """`KVCache.merge` and `BatchKVCache.extend` hand compact caches over to ours."""
    assert KVCache.merge.__func__.__module__ == "kvkeep.caches.mixing"
    assert BatchKVCache.extend.__module__ == "kvkeep.caches.mixing"
    source = Path(str(mlx_cache.__file__)).read_text(encoding="utf-8")
    defined = {
        node.name: {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }
    assert "merge" in defined["KVCache"]
    assert "extend" in defined["BatchKVCache"]
