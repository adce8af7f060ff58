"""Allocations: exact totals within bounds, the peers' numbers, few lengths for ragged layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from golden import DIM, KV_HEADS, LAYERS, RATIOS, golden, golden_view, scores_of
from kvkeep.allocation import (
    ALLOCATIONS,
    Demand,
    Scored,
    apportion,
    competing_counts,
    get_allocation,
    grouped_counts,
    pyramid_kvpress_budgets,
    scaled,
)
from kvkeep.allocation.cake import CakeLayers
from kvkeep.errors import BudgetError, ConfigError
from kvkeep.policies import SnapKV
from kvkeep.selection import select_unequal_rows
from kvkeep.spec import Budget, HeadProfile, LayerView


def scored(random: np.random.Generator, heads: int, rows: int, forced: int) -> Scored:
    """Scores that tie often, the last `forced` rows forced."""
    mask = np.arange(rows) >= rows - forced
    scores = random.integers(0, 6, (heads, rows)).astype(np.float32)
    return Scored(tuple(scores), (mask,) * heads)


def demand_of(seed: int, keep: int, layers: int, heads: int, rows: int, forced: int) -> Demand:
    random = np.random.default_rng(seed)
    return Demand(
        keep=keep,
        heads=(heads,) * layers,
        held=(np.full(heads, rows),) * layers,
        protected=min(forced, keep),
        recent=forced,
        layers=tuple(range(1, layers + 1)),
        scored=[scored(random, heads, rows, min(forced, keep)) for _ in range(layers)],
        preferences=tuple(random.random(layers) ** 3),
    )


def made(name: str, demand: Demand) -> Any:
    if name != "duo":
        return get_allocation(name)
    random = np.random.default_rng(7)
    scores = {i: tuple(random.random(h)) for i, h in zip(demand.layers, demand.heads, strict=True)}
    return get_allocation(name, profile=HeadProfile("any", scores, 4, 8, "made up"))


@pytest.mark.parametrize("name", sorted(ALLOCATIONS))
@given(st.data())
def test_every_allocation_spends_its_total_within_the_bounds(
    name: str, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(1, 40))
    keep = data.draw(st.integers(1, rows))
    demand = demand_of(
        seed=data.draw(st.integers(0, 99)),
        keep=keep,
        layers=data.draw(st.integers(1, 5)),
        heads=data.draw(st.integers(1, 4)),
        rows=rows,
        forced=data.draw(st.integers(0, 6)),
    )
    allocation = made(name, demand)
    counts = allocation.counts(demand)
    assert [len(layer) for layer in counts] == list(demand.heads)
    assert sum(int(layer.sum()) for layer in counts) == demand.total
    for layer in counts:
        assert layer.dtype == np.int64
        assert layer.min() >= demand.least
        assert layer.max() <= rows
        if not allocation.by_head:
            assert len(set(layer.tolist())) == 1
    again = allocation.counts(demand)
    assert all(np.array_equal(a, b) for a, b in zip(counts, again, strict=True))


@pytest.mark.parametrize("name", sorted(ALLOCATIONS))
def test_keeping_every_row_is_keeping_every_row(name: str) -> None:
    demand = demand_of(3, keep=25, layers=4, heads=3, rows=25, forced=5)
    for layer in made(name, demand).counts(demand):
        assert layer.tolist() == [25, 25, 25]


@pytest.mark.parametrize("name", sorted({*ALLOCATIONS} - {"adaptive", "global"}))
def test_what_is_protected_has_room_in_every_layer(name: str) -> None:
    demand = replace(demand_of(5, keep=9, layers=4, heads=2, rows=60, forced=1), protected=9)
    assert all(layer.min() >= 9 for layer in made(name, demand).counts(demand))
    with pytest.raises(BudgetError, match="protected"):
        made(name, demand).counts(replace(demand, protected=10))


@pytest.mark.parametrize("name", ["uniform", "pyramid", "cake"])
def test_layers_with_different_numbers_of_heads_stay_within_the_total(name: str) -> None:
    """As openelm's: an exact total may not exist, and is then missed from below."""
    demand = Demand(
        keep=11,
        heads=(3, 5, 8),
        held=tuple(np.full(h, 70) for h in (3, 5, 8)),
        layers=(0, 1, 2),
        preferences=(0.2, 0.5, 0.4),
    )
    counts = get_allocation(name).counts(demand)
    spent = sum(int(layer.sum()) for layer in counts)
    assert demand.total - 8 < spent <= demand.total


# -- apportioning ----------------------------------------------------------------------


@given(st.data())
def test_apportioned_counts_sum_to_the_total_within_bounds(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 8))
    low = np.array(data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)))
    high = low + data.draw(st.lists(st.integers(0, 30), min_size=size, max_size=size))
    floats = st.floats(0, 1e6, allow_subnormal=False)
    weights = data.draw(st.lists(floats, min_size=size, max_size=size))
    total = data.draw(st.integers(int(low.sum()), int(high.sum()) + 5))
    counts = apportion(weights, total, low, high)
    assert counts.sum() == min(total, high.sum())
    assert (counts >= low).all() and (counts <= high).all()


def test_apportioning_is_proportional_and_hands_the_surplus_on() -> None:
    assert apportion([1, 2, 3], 12).tolist() == [2, 4, 6]
    assert apportion([1, 1, 1], 4).tolist() == [2, 1, 1]
    assert apportion([1, 2, 3], 12, most=5).tolist() == [2, 5, 5]
    assert apportion([1, 2, 9], 12, most=5).tolist() == [2, 5, 5]
    assert apportion([0, 0], 7).tolist() == [4, 3]
    assert apportion([0.0, 5.0], 6, least=2).tolist() == [2, 4]
    with pytest.raises(BudgetError, match="expected at least 6 rows"):
        apportion([1, 1], 5, least=3)


# -- adaptive --------------------------------------------------------------------------


@given(st.data())
def test_competing_heads_keep_the_best_of_all(data: st.DataObject) -> None:
    """Against a plain sort of everything."""
    heads, rows = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 20))
    forced = data.draw(st.integers(0, rows))
    total = data.draw(st.integers(heads * forced, heads * rows))
    guaranteed = data.draw(st.integers(0, rows))
    layer = scored(np.random.default_rng(data.draw(st.integers(0, 99))), heads, rows, forced)
    counts = competing_counts(layer, total, guaranteed)
    assert counts.sum() == total
    floor = min(max(forced, guaranteed, 1), rows)
    if floor * heads > total:
        floor = forced
    assert counts.min() >= floor
    taken, left = [], []
    for scores, mask, count in zip(layer.scores, layer.forced, counts, strict=True):
        free = sorted(scores[~mask].tolist(), reverse=True)
        own = int(count) - forced
        taken += free[floor - forced : own]  # those that had to win
        left += free[own:]
    if taken and left:
        assert min(taken) >= max(left)


@pytest.mark.parametrize("window", [16, 64])
def test_adaptive_heads_keep_what_kvpress_keeps(window: int) -> None:
    """kvpress 0.5.5 adakv_press.py over its snapkv scores (window sentinels inside)."""
    press, compared = golden(f"adakv_snapkv_w{window}_T200"), 0
    scores = scores_of(SnapKV(window=window, pool_kernel=5))
    none = np.zeros(200, np.bool_)
    for ratio in RATIOS:
        theirs, keep = press[f"kept_{ratio}"], max(1, int(200 * (1 - int(ratio[1:]) / 100)))
        for layer in range(LAYERS):
            heads = Scored(tuple(scores[layer]), (none,) * KV_HEADS)
            counts = competing_counts(heads, KV_HEADS * keep, 0.2 * keep)
            mine = select_unequal_rows(scores[layer], counts)
            for head in range(KV_HEADS):
                if press[f"exact_{ratio}"][layer, head]:
                    kept = theirs[layer, head]
                    np.testing.assert_array_equal(mine[head], kept[kept >= 0])
                    compared += 1
    assert compared >= (12 if window == 64 else 20)


@pytest.mark.parametrize("layerwise", [False, True])
def test_heads_compete_over_the_model_as_in_kvzip(layerwise: bool) -> None:
    press, compared = golden("kvzip_chunk64_T200"), 0
    scores, none = press["scores"], np.zeros(200, np.bool_)
    form = "_layerwise" if layerwise else ""
    everything = [scores[i] for i in range(LAYERS)] if layerwise else [scores.reshape(-1, 200)]
    for ratio in RATIOS:
        share, chosen = int(ratio[1:]) / 100, []
        for heads in everything:
            total = heads.size - int(share * heads.size)
            counts = competing_counts(Scored(tuple(heads), (none,) * len(heads)), total, 0)
            # kvpress guarantees a head nothing; where it empties one, sets cannot agree.
            chosen += select_unequal_rows(heads, counts)
        exact = press[f"exact{form}_{ratio}"].reshape(-1)
        for head, theirs in enumerate(
            press[f"kept{form}_{ratio}"].reshape(-1, press[f"kept{form}_{ratio}"].shape[-1])
        ):
            if exact[head]:
                np.testing.assert_array_equal(chosen[head], theirs[theirs >= 0])
                compared += 1
    assert compared >= 18


@given(st.integers(0, 99), st.floats(0.01, 100), st.floats(-5, 5))
def test_scaled_heads_compete_by_their_shares(seed: int, factor: float, shift: float) -> None:
    """A head's scale and level do not count, so signed scores compete as well."""
    layer = scored(np.random.default_rng(seed), 3, 30, 4)
    moved = Scored((layer.scores[0] * factor + shift, *layer.scores[1:]), layer.forced)
    plain, other = scaled(layer, "sum"), scaled(moved, "sum")
    for mine, theirs, mask in zip(plain.scores, other.scores, layer.forced, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
        assert mine[~mask].min() == 0
        np.testing.assert_allclose(mine[~mask].sum(), 1)
    assert scaled(layer, "none") is layer
    flat = Scored((np.full(5, 3.0),), (np.zeros(5, np.bool_),))
    assert scaled(flat, "sum").scores[0].tolist() == [0.0] * 5
    ends = Scored((np.ones(3),), (np.ones(3, np.bool_),))
    assert scaled(ends, "sum").scores[0].tolist() == [1.0] * 3


def test_too_little_for_what_is_forced_is_refused() -> None:
    layer = scored(np.random.default_rng(0), 3, 20, 5)
    with pytest.raises(BudgetError, match="expected at least 15 rows over 3 heads; got 14"):
        competing_counts(layer, 14, 1)


# -- pyramid ---------------------------------------------------------------------------


def test_kvpress_pyramids_are_kvpress() -> None:
    press, compared = golden("pyramid_budgets"), 0
    axes = [press[name].tolist() for name in ("num_layers", "window", "seq_len", "ratio")]
    for a, layers in enumerate(axes[0]):
        for b, window in enumerate(axes[1]):
            for c, length in enumerate(axes[2]):
                for d, ratio in enumerate(axes[3]):
                    theirs = press["kvpress"][a, b, c, d, :layers].tolist()
                    mean = length * (1 - ratio)
                    mine = pyramid_kvpress_budgets(length, mean, layers, window)
                    assert mine == theirs
                    compared += 1
    assert compared == 225


@pytest.mark.parametrize("length", [600, 601, 835, 1000, 1001])
def test_half_a_row_does_not_tip_a_kvpress_pyramid(length: int) -> None:
    """At 50 % its last layer gets the window exactly, which rounding down would miss."""
    budget = Budget(0.5, "share")
    demand = Demand(
        keep=budget.rows(length),
        heads=(2,) * 6,
        held=(np.full(2, length),) * 6,
        recent=64,
        part=budget.part_of_row(length),
    )
    mine = [int(layer[0]) for layer in get_allocation("pyramid-kvpress").counts(demand)]
    theirs = pyramid_kvpress_budgets(length, 0.5 * length, 6, 64)
    assert theirs[-1] == 64 and theirs[0] == length - 64
    assert sum(mine) == 6 * (length // 2)  # theirs may sum to half a row per layer more
    assert np.abs(np.subtract(mine, theirs)).max() <= 1


def test_a_kvpress_pyramid_keeps_what_kvpress_keeps() -> None:
    press = golden("pyramidkv_w16_T200")
    scores = scores_of(SnapKV(window=16, pool_kernel=5))
    for ratio in RATIOS:
        counts = pyramid_kvpress_budgets(200, 200 * (1 - int(ratio[1:]) / 100), LAYERS, 16)
        for layer, count in enumerate(counts):
            mine = select_unequal_rows(scores[layer], [count] * KV_HEADS)
            for head in range(KV_HEADS):
                theirs = press[f"kept_{ratio}"][layer, head]
                assert count == np.count_nonzero(theirs >= 0)
                if press[f"exact_{ratio}"][layer, head]:
                    np.testing.assert_array_equal(mine[head], theirs[theirs >= 0])


def test_a_layer_that_is_full_hands_its_surplus_on() -> None:
    demand = Demand(keep=30, heads=(2,) * 4, held=(np.full(2, 40),) * 4, layers=(0, 1, 2, 3))
    counts = [int(layer[0]) for layer in get_allocation("pyramid").counts(demand)]
    assert counts[0] == 40 and sum(counts) == 120
    assert counts == sorted(counts, reverse=True)


# -- cake ------------------------------------------------------------------------------


def test_cake_preference_is_entropy_times_variance() -> None:
    view = golden_view(1, 32)
    q, k = np.asarray(view.queries, np.float64), np.asarray(view.keys, np.float64)
    logits = q.reshape(2, 3, 32, DIM) @ k[:, None].swapaxes(-1, -2) * view.scale
    index = np.arange(200)
    logits[..., index[None] > np.arange(168, 200)[:, None]] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[..., :168]
    entropy, variance = -(weights * np.log(weights)).sum(), weights.var(axis=-2, ddof=1).sum()
    mine = CakeLayers().preference(view)
    np.testing.assert_allclose(mine, entropy * variance, rtol=1e-4)
    tuned = CakeLayers(tau1=1.6, tau2=0.4).preference(view)
    np.testing.assert_allclose(tuned, entropy ** (1 / 1.6) * variance ** (1 / 0.4), rtol=1e-4)


def test_cake_takes_flat_attention_and_windows_as_long_as_the_prompt() -> None:
    flat = LayerView(mx.zeros((2, 40, 4)), mx.zeros((2, 40, 4)), mx.zeros((4, 8, 4)), 0.5, 0, 1)
    assert 0 <= CakeLayers().preference(flat) < 0.1
    whole = LayerView(mx.zeros((2, 8, 4)), mx.zeros((2, 8, 4)), mx.zeros((4, 8, 4)), 0.5, 0, 1)
    assert CakeLayers().preference(whole) == 1.0
    demand = demand_of(0, keep=9, layers=3, heads=2, rows=20, forced=2)
    even = CakeLayers().counts(replace(demand, preferences=(0.0, 0.0, 0.0)))
    assert [layer.tolist() for layer in even] == [[9, 9]] * 3


# -- duo -------------------------------------------------------------------------------

PROFILE = HeadProfile("any", {0: (0.1, 0.9), 2: (0.8, 0.2)}, sinks=4, recent=6, method="made up")
DUO = Demand(keep=30, heads=(2, 2), held=(np.full(2, 50),) * 2, layers=(0, 2))


def test_duo_serves_heads_in_the_order_of_their_scores() -> None:
    counts = get_allocation("duo", profile=PROFILE).counts(DUO)
    assert [layer.tolist() for layer in counts] == [[10, 50], [50, 10]]
    counts = get_allocation("duo", profile=PROFILE).counts(replace(DUO, keep=25))
    assert [layer.tolist() for layer in counts] == [[10, 50], [30, 10]]
    small = get_allocation("duo", profile=PROFILE).counts(replace(DUO, keep=7))
    assert [layer.tolist() for layer in small] == [[7, 7], [7, 7]]


def test_duo_by_share_divides_the_rest_evenly() -> None:
    duo = get_allocation("duo", profile=PROFILE, retrieval_share=0.25)
    assert [c.tolist() for c in duo.counts(replace(DUO, keep=20))] == [[10, 50], [10, 10]]
    assert [c.tolist() for c in duo.counts(DUO)] == [[24, 50], [23, 23]]
    half = get_allocation("duo", profile=PROFILE, retrieval_share=0.5)
    assert [c.tolist() for c in half.counts(replace(DUO, keep=20))] == [[10, 30], [30, 10]]
    for share in (0.0, 1.0):
        every = get_allocation("duo", profile=PROFILE, retrieval_share=share)
        assert [c.tolist() for c in every.counts(DUO)] == [[30, 30], [30, 30]]


def test_duo_without_a_fitting_profile_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a head profile"):
        get_allocation("duo")
    duo = get_allocation("duo", profile=PROFILE)
    with pytest.raises(ConfigError, match="scores of 2 KV heads for layer 1"):
        duo.counts(replace(DUO, layers=(0, 1)))
    with pytest.raises(ConfigError, match="scores of 3 KV heads for layer 0"):
        duo.counts(replace(DUO, heads=(3, 2), held=(np.full(3, 50), np.full(2, 50))))


# -- few lengths -----------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=24),
    st.integers(1, 6),
)
def test_few_lengths_keep_the_sum(counts: list[int], groups: int) -> None:
    level = grouped_counts(counts, groups)
    assert len(np.unique(level)) <= groups
    if groups > 1 or len(set(counts)) == 1:
        assert level.sum() == sum(counts)
    else:
        assert 0 <= sum(counts) - level.sum() < len(counts)
    # Heads keep their order, and none leaves the range.
    order = np.argsort(counts, kind="stable")
    assert (np.diff(level[order]) >= 0).all()
    assert level.min() >= min(counts) and level.max() <= max(counts) + 1


def test_few_lengths_follow_the_counts() -> None:
    assert grouped_counts([10, 90, 12, 92, 11, 91], 2).tolist() == [11, 91, 11, 91, 11, 91]
    assert grouped_counts([10, 90, 12, 92], 4).tolist() == [10, 90, 12, 92]
    assert grouped_counts([1, 2, 90], 2).tolist() == [1, 1, 91]
    assert grouped_counts([10, 11, 90, 95], 3).tolist() == [10, 10, 90, 96]
    # The highest holds no more than 90.
    assert grouped_counts([10, 11, 90], 2, np.full(3, 90)).tolist() == [11, 11, 89]
    assert grouped_counts([5, 6], 1).tolist() == [5, 5]


# -- names and options -----------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ALLOCATIONS))
def test_each_allocation_says_what_it_is(name: str) -> None:
    rule = ALLOCATIONS[name]
    assert rule.name == name
    assert rule.summary and rule.source and (rule.__doc__ or "").count("Source:") == 1


def test_a_misspelt_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"got 'unifrom'\. Did you mean 'uniform'\?"):
        get_allocation("unifrom")


@pytest.mark.parametrize("name", ["xyz", "", None, 3])
def test_an_unknown_name_is_told_what_there_is(name: object) -> None:
    with pytest.raises(ConfigError, match="expected one of adaptive"):
        get_allocation(name)  # type: ignore[arg-type]


def test_options_of_others_and_bad_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="allocation 'uniform' has no option 'alpha'"):
        get_allocation("uniform", alpha=0.5)
    for name, option in (
        ("adaptive", {"alpha": 1.5}),
        ("pyramid", {"beta": 0}),
        ("cake", {"tau1": 0}),
    ):
        with pytest.raises(ConfigError, match=next(iter(option))):
            get_allocation(name, **option)
