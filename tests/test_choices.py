"""Every policy with every allocation and every store: what holds for all of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import EvictionConfig, HeadPartitionedKVCache, RaggedKVCache, compact_prompt_cache
from kvkeep.allocation import ALLOCATIONS, allocation_of
from kvkeep.choosing import require_compatible
from kvkeep.compaction import cache_nbytes, prefill_and_compact
from kvkeep.errors import ConfigError, KvkeepError
from kvkeep.heads import model_identity
from kvkeep.policies import POLICIES, policy_of
from kvkeep.spec import STORES, HeadProfile
from oracles import evicted_mask, logits_of, numpy_llama
from tiny_models import random_tokens, tiny_llama

LAYERS, KV_HEADS, LENGTH = 3, 2, 80
TOKENS, NEXT = random_tokens(LENGTH), [7, 11, 3]
BY_HEAD = ("adaptive", "global", "duo")
ONE_SET = ("snapkv-d",)  # policies with one score for all heads

EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES)
EVERY_ALLOCATION = pytest.mark.parametrize("allocation", ALLOCATIONS)
EVERY_STORE = pytest.mark.parametrize("store", STORES)


@cache
def model_of(kv_heads: int = KV_HEADS, heads: int = 4) -> Any:
    return tiny_llama(layers=LAYERS, kv_heads=kv_heads, heads=heads)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of made-up head profiles, `HEADS.json` by KV heads and query heads."""
    folder = tmp_path_factory.mktemp("profiles")
    for kv_heads, heads in ((2, 4), (1, 2), (3, 3)):
        random = np.random.default_rng(kv_heads)
        scores = {layer: tuple(random.random(kv_heads).tolist()) for layer in range(LAYERS)}
        identity = model_identity(model_of(kv_heads, heads))
        profile = HeadProfile(identity, scores, sinks=2, recent=5, method="made up")
        profile.save(folder / f"{kv_heads}.json")
    return folder


def config_of(policy: str, allocation: str, store: str, profiles: Path, **more: Any) -> Any:
    """The config, or None where the combination has no meaning and is refused as such."""
    given = {"budget": 24, "min_tokens": 0, **more}
    if allocation == "duo":
        given["head_profile"] = str(profiles / f"{given.pop('kv_heads', KV_HEADS)}.json")
    given.pop("kv_heads", None)
    config = EvictionConfig(policy=policy, allocation=allocation, store=store, **given)
    try:
        require_compatible(config, policy_of(config), allocation_of(config))
    except ConfigError as refusal:
        with pytest.raises(ConfigError) as caught:
            compact_prompt_cache(model_of(), TOKENS, config=config)
        assert str(caught.value) == str(refusal)
        assert "expected" in str(refusal)
        return None
    return config


def heads_of(layer: Any, kv_heads: int = KV_HEADS) -> list[list[int]]:
    """Positions of every KV head of a layer."""
    held = [list(head) for head in layer.head_positions]
    return held * kv_heads if len(held) == 1 else held


@EVERY_STORE
@EVERY_ALLOCATION
@EVERY_POLICY
def test_each_combination_keeps_its_promises(
    policy: str, allocation: str, store: str, profiles: Path
) -> None:
    config = config_of(policy, allocation, store, profiles, protect=((30, 36), (50, 51)))
    if config is None:
        return
    result = compact_prompt_cache(model_of(), TOKENS, config=config)
    kept = [heads_of(layer) for layer in result.cache]
    for heads in kept:
        assert len(heads) == KV_HEADS
        for head in heads:
            assert head == sorted(set(head))
            assert head[-1] < LENGTH
            assert {*range(30, 36), 50} <= set(head)
    counts = np.array([[len(head) for head in heads] for heads in kept])
    assert counts.sum() == 24 * KV_HEADS * LAYERS
    by_head = ALLOCATIONS[allocation].by_head
    if not by_head:
        assert (counts == counts[:, :1]).all()
    elif config.store != "union":
        assert max(len(set(row)) for row in counts.tolist()) <= config.max_groups
    kinds = {type(layer) for layer in result.cache}
    if store == "union":
        assert kinds == {HeadPartitionedKVCache}
    elif store == "ragged":
        assert kinds == {RaggedKVCache}
    elif not by_head:
        assert RaggedKVCache not in kinds
    rows = sum(len({p for head in heads for p in head}) * KV_HEADS for heads in kept)
    stored = rows if store == "union" else counts.sum()
    assert result.compact_cache_nbytes == stored * 16 * 2 * 4 == cache_nbytes(result.cache)
    again = compact_prompt_cache(model_of(), TOKENS, config=config, prefill_step_size=13)
    assert [heads_of(layer) for layer in again.cache] == kept


@EVERY_STORE
@EVERY_ALLOCATION
@EVERY_POLICY
def test_nothing_with_a_meaning_is_refused(
    policy: str, allocation: str, store: str, profiles: Path
) -> None:
    """Said here from the definitions, so that no test above passes by refusing."""
    unequal_in_equal = allocation in BY_HEAD and store in ("shared", "per-head")
    contest_of_one = allocation in ("adaptive", "global") and policy in ONE_SET
    refused = config_of(policy, allocation, store, profiles) is None
    assert refused == (unequal_in_equal or contest_of_one)


def logits_and_right_ones(config: Any) -> tuple[np.ndarray, np.ndarray]:
    """Decoding on, and the full cache under the equivalent mask, in float64."""
    model = model_of()
    result = compact_prompt_cache(model, TOKENS, config=config)
    mine = [logits_of(model, result.cache, NEXT[:1]), logits_of(model, result.cache, NEXT[1:])]
    length = LENGTH + len(NEXT)
    masks = [
        evicted_mask(length, [h[:-3] for h in heads_of(layer)], LENGTH) for layer in result.cache
    ]
    right = numpy_llama(model, [*TOKENS, *NEXT], np.stack(masks))[LENGTH:]
    return np.concatenate(mine), right


@EVERY_STORE
@EVERY_ALLOCATION
def test_each_allocation_and_store_is_the_masked_full_cache(
    allocation: str, store: str, profiles: Path
) -> None:
    configs = [config_of(name, allocation, store, profiles) for name in ("snapkv", "snapkv-d")]
    for config in filter(None, configs):
        mine, right = logits_and_right_ones(config)
        np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-4)


@EVERY_POLICY
@pytest.mark.parametrize("store", ["ragged", "union"])
def test_each_policy_is_the_masked_full_cache(policy: str, store: str, profiles: Path) -> None:
    allocation = "duo" if POLICIES[policy].scope == "model" else "adaptive"
    config = config_of(policy, allocation, store, profiles, alpha=None)
    assert config is not None
    mine, right = logits_and_right_ones(config)
    np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-4)


@settings(max_examples=60)
@given(data=st.data())
def test_any_choice_holds_or_is_refused(data: st.DataObject, profiles: Path) -> None:
    """Budgets, ends and protected ranges drawn at will: totals hold, and nothing breaks."""
    kv_heads, heads = data.draw(st.sampled_from([(2, 4), (1, 2), (3, 3)]))
    rows = data.draw(st.integers(1, LENGTH))
    start = data.draw(st.integers(0, LENGTH))
    protect = ((start, start + data.draw(st.integers(1, 20))),)
    config = config_of(
        data.draw(st.sampled_from(sorted(POLICIES))),
        data.draw(st.sampled_from(sorted(ALLOCATIONS))),
        data.draw(st.sampled_from(STORES)),
        profiles,
        kv_heads=kv_heads,
        budget=rows,
        sink_tokens=data.draw(st.integers(0, 8)),
        recent_tokens=data.draw(st.none() | st.integers(0, 30)),
        max_groups=data.draw(st.integers(1, 4)),
        protect=data.draw(st.sampled_from([(), protect])),
    )
    if config is None:
        return
    inside = sum(min(stop, LENGTH) - min(first, LENGTH) for first, stop in config.protect)
    model = model_of(kv_heads, heads)
    if inside > rows:
        with pytest.raises(KvkeepError, match=r"(cannot|does not) hold"):
            compact_prompt_cache(model, TOKENS, config=config)
        return
    result = compact_prompt_cache(model, TOKENS, config=config)
    total = rows * kv_heads * LAYERS
    if rows == LENGTH:
        assert not result.evicted
        return
    counts = [len(head) for layer in result.cache for head in heads_of(layer, kv_heads)]
    short = total - sum(counts)
    if config.max_groups > 1 or not ALLOCATIONS[config.allocation].by_head:
        assert short == 0
    else:  # one length for all heads of a layer is rounded down
        assert 0 <= short < kv_heads * LAYERS
    for layer in result.cache:
        for head in heads_of(layer, kv_heads):
            for first, stop in config.protect:
                assert {*range(first, min(stop, LENGTH))} <= {*head}
    assert np.isfinite(logits_of(model, result.cache, NEXT)).all()


@EVERY_ALLOCATION
@pytest.mark.parametrize("store", ["auto", "union"])
def test_byte_budgets_are_met_from_below(allocation: str, store: str, profiles: Path) -> None:
    row = 16 * 2 * 4 * KV_HEADS * LAYERS
    for spare in (0, 100, row - 1):
        config = config_of("snapkv", allocation, store, profiles, budget=f"{20 * row + spare}B")
        result = compact_prompt_cache(model_of(), TOKENS, config=config)
        stored = cache_nbytes(result.cache)
        assert stored <= 20 * row + spare
        if store == "auto":
            assert stored == 20 * row
        else:  # one row more for the heads is at most a few in the union
            assert stored > 20 * row * 0.6


@EVERY_ALLOCATION
@EVERY_STORE
def test_compacting_again_keeps_the_promises(allocation: str, store: str, profiles: Path) -> None:
    config = config_of("snapkv", allocation, store, profiles)
    if config is None:
        return
    first = compact_prompt_cache(model_of(), TOKENS, config=config).cache
    before = [[{*head} for head in heads_of(layer)] for layer in first]
    more = random_tokens(30, seed=1)
    result = prefill_and_compact(model_of(), more, first, replace(config, budget=20))
    counts = np.array([[len(head) for head in heads_of(layer)] for layer in result.cache])
    assert counts.sum() == 20 * KV_HEADS * LAYERS
    for layer, old in zip(result.cache, before, strict=True):
        for head, had in zip(heads_of(layer), old, strict=True):
            assert {*head} <= had | {*range(LENGTH, LENGTH + 30)}
    assert np.isfinite(logits_of(model_of(), result.cache, NEXT)).all()


@EVERY_ALLOCATION
@pytest.mark.parametrize("length", [1, 2, 5, 8, 9])
def test_short_prompts(allocation: str, length: int, profiles: Path) -> None:
    config = config_of("snapkv", allocation, "auto", profiles, budget=max(length // 2, 1))
    result = compact_prompt_cache(model_of(), TOKENS[:length], config=config)
    counts = sum(
        len(head)
        for layer in result.cache
        if hasattr(layer, "head_positions")
        for head in heads_of(layer)
    )
    assert counts in (0, max(length // 2, 1) * KV_HEADS * LAYERS)
    assert np.isfinite(logits_of(model_of(), result.cache, NEXT)).all()


@EVERY_ALLOCATION
@pytest.mark.parametrize("flat", ["q_proj", "k_proj"])
def test_flat_attention_and_equal_keys(allocation: str, flat: str, profiles: Path) -> None:
    """Every score ties: the same rows each time, and the totals hold."""
    model = tiny_llama(layers=LAYERS)
    for layer in model.layers:
        weights = getattr(layer.self_attn, flat)
        weights.weight = mx.zeros_like(weights.weight)
    config = config_of("snapkv", allocation, "auto", profiles)
    if allocation == "duo":  # bound to a model's weights
        profile = tiny_profile(model)
        profile.save(profiles / "flat.json")
        config = replace(config, head_profile=str(profiles / "flat.json"))
    kept = [
        [heads_of(layer) for layer in compact_prompt_cache(model, TOKENS, config=config).cache]
        for _ in range(2)
    ]
    assert kept[0] == kept[1]
    assert sum(len(head) for heads in kept[0] for head in heads) == 24 * KV_HEADS * LAYERS


def tiny_profile(model: Any) -> HeadProfile:
    scores = {layer: (0.5, 0.5) for layer in range(LAYERS)}
    return HeadProfile(model_identity(model), scores, sinks=2, recent=5, method="made up")


def test_a_profile_of_another_model_is_refused(profiles: Path) -> None:
    config = config_of("snapkv", "duo", "auto", profiles)
    other = tiny_llama(layers=LAYERS, seed=5)
    with pytest.raises(KvkeepError, match="of another model"):
        compact_prompt_cache(other, TOKENS, config=config)


@pytest.mark.parametrize("allocation", ["uniform", "adaptive", "global", "pyramid", "cake"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_keeps_the_same_rows_but_for_near_ties(
    allocation: str, dtype: mx.Dtype
) -> None:
    """The model's weights rounded alike, so that only the rows' precision differs."""
    half, full = tiny_llama(layers=LAYERS), tiny_llama(layers=LAYERS)
    half.set_dtype(dtype)
    full.load_weights([(k, v.astype(mx.float32)) for k, v in flat_weights(half)])
    config = EvictionConfig(policy="snapkv", allocation=allocation, budget=24, min_tokens=0)
    kept = [
        [heads_of(layer) for layer in compact_prompt_cache(model, TOKENS, config=config).cache]
        for model in (half, full)
    ]
    pairs = [
        (set(a), set(b))
        for mine, theirs in zip(*kept, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    different = sum(len(a ^ b) for a, b in pairs)
    # A pooled score moves by about the precision of its rows; few boundaries are that close.
    assert different <= (0.05 if dtype == mx.float16 else 0.15) * sum(len(a) for a, _ in pairs)


def flat_weights(model: Any) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    return tree_flatten(model.parameters())  # type: ignore[return-value]
