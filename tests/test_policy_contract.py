"""What every registered policy promises, whatever it scores by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import (
    EvictionConfig,
    LayerSelection,
    LayerView,
    PositionPreservingKVCache,
    Selection,
    compact_prompt_cache,
    evict_selection,
    get_policy,
)
from kvkeep.compaction import prefill_and_compact
from kvkeep.errors import CacheError
from kvkeep.policies import POLICIES, policy_of
from kvkeep.policies.base import Need
from kvkeep.selection import select_rows
from kvkeep.spec import Drafted
from oracles import evicted_mask, greedy, logits_of, numpy_llama, prefilled, raw
from policy_views import rope_of, view_of
from tiny_models import random_tokens, tiny_llama

EVERY = pytest.mark.parametrize("name", POLICIES)
TOKENS, NEXT = random_tokens(90), [7, 11, 3]


def scored(policy: Any, view: LayerView) -> np.ndarray:
    """The policy's scores, which are finite float32 [H_kv, T] of their own."""
    scores = policy.score(view)
    assert isinstance(scores, mx.array)
    assert (scores.dtype, scores.shape) == (mx.float32, view.keys.shape[:2])
    array = np.asarray(scores)
    assert np.isfinite(array).all()
    return array


@EVERY
def test_it_declares_itself(name: str) -> None:
    policy = get_policy(name)
    assert (policy.name, type(policy)) == (name, POLICIES[name])
    assert policy.needs <= {*get_args(Need)}
    assert policy.scope in ("model", "head")
    assert isinstance(policy.query_aware, bool)
    assert policy.summary and policy.source
    assert "\n" not in policy.summary + policy.source
    assert type(policy).__doc__ and policy.score.__doc__
    assert (policy.observation_window > 0) == ("queries" in policy.needs)
    assert policy.query_aware <= ("queries" in policy.needs)
    assert hash(policy) == hash(get_policy(name))  # frozen: it cannot hold a request's state
    assert policy_of(EvictionConfig(policy=name)) == policy  # no default of a config is refused
    assert ("draft" in policy.needs) == (policy.draft_length > 0)
    for budget in (1, 8, 4096):
        assert policy.default_recent(budget) >= 0


@EVERY
@given(
    length=st.integers(1, 300), kv_heads=st.integers(1, 3), group=st.integers(1, 3),
    dim=st.integers(1, 9), seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=20)
def test_scores_are_finite_float32_and_deterministic(
    name: str, length: int, kv_heads: int, group: int, dim: int, seed: int
) -> None:
    policy = get_policy(name)
    view = view_of(policy, length, heads=group * kv_heads, kv_heads=kv_heads, dim=dim, seed=seed)
    arrays = [a for a in (view.keys, view.values, view.queries) if a is not None]
    before = [raw(array) for array in arrays]
    scores = scored(policy, view)
    np.testing.assert_array_equal(scored(get_policy(name), view), scores)
    assert [raw(array) for array in arrays] == before  # the view is left alone


@EVERY
def test_scores_hang_on_the_budget_only_where_it_says_so(name: str) -> None:
    """The others' scores of one budget may choose rows at another."""
    policy = get_policy(name)
    view = view_of(policy, 300)
    few, many = (scored(policy, replace(view, keep=keep)) for keep in (20, 280))
    assert np.array_equal(few, many) == (not policy.budget_aware)


@EVERY
@pytest.mark.parametrize("seen", ["all", "some", "one"])
def test_prompts_no_longer_than_the_window(name: str, seen: str) -> None:
    policy = get_policy(name)
    window = max(policy.observation_window, 1)
    length = {"all": window, "some": max(window - 1, 1), "one": 1}[seen]
    scores = scored(policy, view_of(policy, length))
    kept = select_rows(scores, max(length // 2, 1), recent=policy.default_recent(length))
    assert kept.shape == (2, max(length // 2, 1))


@EVERY
def test_it_reads_nothing_but_what_it_needs(name: str) -> None:
    """The rest of the view is missing, or poison where it cannot be."""
    policy = get_policy(name)
    view = view_of(policy, 300)
    right = scored(policy, view)
    poisoned = replace(
        view,
        keys=view.keys if "keys" in policy.needs else view.keys * np.nan,
        values=view.values if "values" in policy.needs else view.values * np.nan,
        rope=view.rope if "rope" in policy.needs else rope_of(2),
        output_weights=view.output_weights or (lambda head: mx.array(np.nan)),
        seen=view.seen or {name: mx.array(np.nan) for name in ("attention", "mass", "mean")},
        draft=view.draft or Drafted(mx.full((4, 3, 8), np.nan), mx.full((2, 3, 8), np.nan)),
    )
    np.testing.assert_array_equal(scored(policy, poisoned), right)
    if "queries" not in policy.needs:
        queries = mx.full((4, 8, 8), np.nan)
        np.testing.assert_array_equal(scored(policy, replace(view, queries=queries)), right)
    changed = {
        "keys": replace(view, keys=view.keys[:, ::-1] * 1.5),
        "values": replace(view, values=view.values[:, ::-1] * 1.5),
        "queries": replace(view, queries=None if view.queries is None else -view.queries),
        "attention": replace(view, seen={k: v[:, ::-1] * 1.5 for k, v in view.seen.items()}),
        "replay": replace(view, seen={k: v[:, ::-1] for k, v in view.seen.items()}),
        "rope": replace(view, rope=rope_of(4)),
        "output_weights": replace(view, output_weights=lambda head: mx.ones((10, 3)) * head),
        "draft": replace(view, draft=other_draft(view)),
    }
    for need in policy.needs:  # and what it says it needs does matter
        assert (scored(policy, changed[need]) != right).any(), need


def other_draft(view: LayerView) -> Drafted | None:
    """The same rows, asked for by the opposite queries."""
    return None if view.draft is None else replace(view.draft, queries=-view.draft.queries)


@EVERY
def test_it_says_whether_its_scores_depend_on_the_budget(name: str) -> None:
    policy = get_policy(name)
    view = view_of(policy, 300)
    few, many = (scored(policy, replace(view, keep=keep)) for keep in (30, 150))
    assert policy.budget_aware == (few != many).any()


@EVERY
@pytest.mark.parametrize("kind", ["equal keys", "uniform attention", "zeros"])
@pytest.mark.parametrize("length", [1, 2, 40, 300])
def test_uniform_attention_and_equal_keys(name: str, kind: str, length: int) -> None:
    policy = get_policy(name)
    view = view_of(policy, length)
    if kind == "zeros":
        view = replace(view, keys=mx.zeros_like(view.keys), values=mx.zeros_like(view.values))
    elif kind == "equal keys":
        flat = (mx.broadcast_to(a[:, :1], a.shape) for a in (view.keys, view.values))
        view = replace(view, **dict(zip(("keys", "values"), flat, strict=True)))
    elif view.queries is not None:
        view = replace(view, queries=mx.zeros_like(view.queries))
    scores = scored(policy, view)
    keep = max(length // 4, 1)
    for rows in select_rows(scores, keep):
        assert len({*rows.tolist()}) == keep
        if name in ("snapkv", "cake", "rkv", "tova"):  # the window outranks what ties
            recent = min(policy.observation_window, keep)
            assert {*range(length - recent, length)} <= {*rows.tolist()}


@pytest.mark.parametrize(
    ("name", "first"),
    [("tova", 0), ("keydiff", 0), ("knorm", 0), ("sink_recent", 0), ("lagkv", 4)],
)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_of_equal_rows_the_last_ones_stay(name: str, first: int, value: float) -> None:
    """Where place means nothing to the score; LagKV's own sinks stand above."""
    policy = get_policy(name)
    view = view_of(policy, 200)
    rows = {part: mx.full(getattr(view, part).shape, value) for part in ("keys", "values")}
    for row in select_rows(scored(policy, replace(view, **rows)), 30):
        assert row.tolist() == [*range(first), *range(170 + first, 200)]


@EVERY
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 1), (1, 1), (8, 2)])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_keeps_the_rows_of_float32(
    name: str, dtype: mx.Dtype, heads: int, kv_heads: int
) -> None:
    """The same rounded rows, scored from either dtype: differences are near ties only."""
    policy = get_policy(name)
    half = view_of(policy, 300, heads=heads, kv_heads=kv_heads, dtype=dtype)
    whole = replace(
        half,
        keys=half.keys.astype(mx.float32),
        values=half.values.astype(mx.float32),
        queries=None if half.queries is None else half.queries.astype(mx.float32),
        draft=None
        if half.draft is None
        else Drafted(half.draft.queries.astype(mx.float32), half.draft.keys.astype(mx.float32)),
    )
    ours, right = scored(policy, half), scored(policy, whole)
    for keep in (30, 75, 150):
        kept, theirs = select_rows(ours, keep), select_rows(right, keep)
        for head in range(kv_heads):
            cut = right[head, theirs[head]].min()
            for position in np.setxor1d(kept[head], theirs[head]):
                assert right[head, position] == pytest.approx(cut, rel=1e-4, abs=1e-7)


@EVERY
@pytest.mark.parametrize("store", ["shared", "per-head"])
@pytest.mark.parametrize("step", [13, 2048])
def test_end_to_end_equals_the_masked_full_cache(name: str, store: str, step: int) -> None:
    model = tiny_llama()
    config = EvictionConfig(policy=name, budget=24, min_tokens=0, store=store)
    result = compact_prompt_cache(model, TOKENS, config=config, prefill_step_size=step)
    assert (result.evicted, result.retained_tokens, result.true_offset) == (True, 24, 90)
    kept = [[list(head) for head in layer.head_positions] for layer in result.cache]
    for heads in kept:
        assert len(heads) == (1 if store == "shared" or POLICIES[name].scope == "model" else 2)
        for head in heads:
            assert head == sorted({*head})
            assert len(head) == 24
            assert head[:4] == [0, 1, 2, 3]
            recent = min(get_policy(name).default_recent(24), 20)
            assert {*range(90 - recent, 90)} <= {*head}
    again = compact_prompt_cache(model, TOKENS, config=config, prefill_step_size=step).cache
    assert [[list(h) for h in layer.head_positions] for layer in again] == kept
    masks = [evicted_mask(93, heads, 90) for heads in kept]
    masks = [np.broadcast_to(mask, (2, *mask.shape[1:])) for mask in masks]
    right = numpy_llama(model, [*TOKENS, *NEXT], np.stack(masks))[90:]
    logits = [logits_of(model, result.cache, NEXT[:1]), logits_of(model, result.cache, NEXT[1:])]
    np.testing.assert_allclose(np.concatenate(logits), right, rtol=1e-4, atol=1e-4)


@EVERY
def test_protected_ranges_stay(name: str) -> None:
    config = EvictionConfig(policy=name, budget=24, min_tokens=0, protect=((40, 52), (60, 61)))
    for layer in compact_prompt_cache(tiny_llama(), TOKENS, config=config).cache:
        for head in layer.head_positions:
            assert {*range(40, 52), 60} <= {*head}
            assert len(head) == 24


@EVERY
@pytest.mark.parametrize("store", ["shared", "per-head"])
def test_keeping_every_row_is_the_identity(name: str, store: str) -> None:
    model = tiny_llama()
    tokens, logits = greedy(model, prefilled(model, TOKENS), 5, 12)
    whole = EvictionConfig(policy=name, budget=90, min_tokens=0, store=store)
    result = compact_prompt_cache(model, TOKENS, config=whole)
    assert not result.evicted
    # The rule asked for every row gives every row, and a compact cache of them is stock.
    exact, policy = prefilled(model, TOKENS), get_policy(name)
    chosen = {}
    for index in range(2):
        scores = scored(policy, view_of(policy, 90, seed=index))
        heads = select_rows(scores, 90, sinks=4, recent=policy.default_recent(90))
        chosen[index] = LayerSelection(tuple(heads[:1] if store == "shared" else heads))
    compact = evict_selection(exact, Selection(90, chosen)).cache
    assert all(type(layer) is PositionPreservingKVCache for layer in compact)
    for cache in (result.cache, compact):
        ours = greedy(model, cache, 5, 12)
        assert ours[0] == tokens
        np.testing.assert_array_equal(ours[1], logits)


@EVERY
def test_a_compact_cache_can_be_compacted_again(name: str) -> None:
    """As a conversation does: rows are not positions any more."""
    model = tiny_llama()
    config = EvictionConfig(policy=name, budget=40, min_tokens=0)
    cache = compact_prompt_cache(model, TOKENS, config=config).cache
    before = [[{*head} for head in layer.head_positions] for layer in cache]
    more = random_tokens(30, seed=1)
    if "replay" in POLICIES[name].needs:
        with pytest.raises(CacheError, match="reads the whole prompt again"):
            prefill_and_compact(model, more, cache, replace(config, budget=30))
        assert [layer.offset for layer in cache] == [90, 90]
        return
    result = prefill_and_compact(model, more, cache, replace(config, budget=30))
    assert (result.retained_tokens, result.true_offset) == (30, 120)
    for layer, old in zip(result.cache, before, strict=True):
        for head, had in zip(layer.head_positions, old, strict=True):
            assert {*head} <= had | {*range(90, 120)}
            assert [*head][:4] == [0, 1, 2, 3]
    assert np.isfinite(greedy(model, result.cache, 5, 3)[1]).all()
