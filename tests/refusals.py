"""Checking that a refusal says why and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bare_models import cache_bytes
from kvkeep import evict_prompt_cache
from kvkeep.errors import KvkeepError
from oracles import prefilled
from tiny_models import random_tokens, tiny_llama

TOKENS = random_tokens(40)


def exact_cache() -> list[Any]:
    """The cache of `TOKENS` as mlx-lm leaves it."""
    return prefilled(tiny_llama(), TOKENS)


def compact_cache() -> list[Any]:
    """The same with four rows kept."""
    return evict_prompt_cache(exact_cache(), [0, 1, 20, 39], true_offset=40).cache


def snapshot(cache: list[Any]) -> list[str]:
    """Everything that a cache list holds."""
    return [repr(layer) for layer in cache_bytes(cache)]


def expect_refused(
    cache: list[Any], act: Callable[[list[Any]], Any], error: type[KvkeepError], *parts: str
) -> None:
    """`act` on the cache raises that error with these parts, in order, and changes nothing."""
    before, entries = snapshot(cache), list(cache)
    with pytest.raises(error) as caught:
        act(cache)
    assert type(caught.value) is error
    message, at = str(caught.value), 0
    for part in parts:
        assert part in message[at:], message
        at = message.index(part, at) + len(part)
    assert len(cache) == len(entries)
    assert all(a is b for a, b in zip(cache, entries, strict=True))
    assert snapshot(cache) == before
