"""A cache that was filled unobserved is compacted as one that was observed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvkeep
from bare_models import cache_bytes, tiny_model
from batched import positions_of
from kvkeep.compaction import compact_prefilled
from kvkeep.errors import ConfigError, UnsupportedModelError
from kvkeep.spec import EvictionConfig
from oracles import logits_of, prefilled
from tiny_models import random_tokens, tiny_llama

TOKENS = random_tokens(90)


def settings(**more: Any) -> EvictionConfig:
    return EvictionConfig.parse({"budget": 30, "min_tokens": 0, **more})


@pytest.mark.parametrize(
    "more",
    [
        {"policy": "snapkv", "window": 8},
        {"policy": "snapkv-d"},
        {"policy": "knorm"},
        {"policy": "rkv"},
        {"policy": "criticalkv"},
        {"policy": "snapkv", "allocation": "adaptive"},
        {"policy": "knorm", "allocation": "cake"},
        {"policy": "snapkv", "budget": "20KB", "store": "shared"},
    ],
    ids=str,
)
def test_the_same_rows_as_in_an_observed_prefill(more: dict[str, Any]) -> None:
    model, config = tiny_llama(), settings(**more)
    cache = prefilled(model, TOKENS, 17)
    before = cache_bytes(cache)
    ours = compact_prefilled(model, TOKENS, cache, config)
    theirs = kvkeep.compact_prompt_cache(model, TOKENS, config=config, prefill_step_size=17)
    assert cache_bytes(cache) == before
    assert [positions_of(c) for c in ours.cache] == [positions_of(c) for c in theirs.cache]
    assert ours.evicted and ours.compact_cache_nbytes == theirs.compact_cache_nbytes
    np.testing.assert_array_equal(
        logits_of(model, ours.cache, [3, 4]), logits_of(model, theirs.cache, [3, 4])
    )


@pytest.mark.parametrize("more", [{"min_tokens": 90}, {"budget": 90}, {"budget": "100%"}])
def test_what_fits_stays_exact(more: dict[str, Any]) -> None:
    model = tiny_llama()
    cache = prefilled(model, TOKENS, 40)
    result = compact_prefilled(model, TOKENS, cache, settings(**more))
    assert not result.evicted
    assert all(ours is theirs for ours, theirs in zip(result.cache, cache, strict=True))


def test_what_an_unseen_model_allows() -> None:
    model = tiny_model("gemma2")
    cache = prefilled(model, TOKENS, 40)
    result = compact_prefilled(model, TOKENS, cache, settings(policy="knorm"))
    rows = [positions_of(layer) for layer in result.cache]
    assert result.evicted and all(row == rows[0] for row in rows)
    with pytest.raises(UnsupportedModelError):
        compact_prefilled(model, TOKENS, cache, settings(policy="snapkv"))


def test_a_policy_that_must_see_the_prefill_is_refused() -> None:
    model = tiny_llama()
    cache = prefilled(model, TOKENS, 40)
    with pytest.raises(ConfigError, match="whole prefill"):
        compact_prefilled(model, TOKENS, cache, settings(policy="observed_attention"))
