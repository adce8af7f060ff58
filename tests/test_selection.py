"""Chosen positions: the seeds' behaviours, and a slow reference for everything else."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import BudgetError, ConfigError, SelectionError
from kvkeep.selection import (
    random_indices,
    select_rows,
    sink_recent_indices,
    snapkv_keep_indices,
    topk_indices_per_head,
)


def slow_rows(
    scores: Sequence[float],
    keep: int,
    *,
    sinks: int = 0,
    recent: int = 0,
    protected: Sequence[tuple[int, int]] = (),
) -> list[int]:
    """The rule for one head, a position at a time."""
    positions = range(len(scores))
    chosen = {p for p in positions if any(start <= p < stop for start, stop in protected)}
    by_score = sorted(positions, key=lambda p: (scores[p], p), reverse=True)
    for wanted in (positions[:sinks], positions[::-1][:recent], by_score):
        for position in wanted:
            if len(chosen) < min(keep, len(scores)):
                chosen.add(position)
    return sorted(chosen)


# Few distinct values, so that most draws have ties at the threshold.
tied_scores = st.integers(-3, 3).map(float)
any_scores = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def selections(draw: st.DrawFn) -> tuple[np.ndarray, dict]:
    length = draw(st.integers(1, 90))
    value = draw(st.sampled_from([tied_scores, any_scores]))
    row = st.lists(value, min_size=length, max_size=length)
    scores = np.array(draw(st.lists(row, min_size=1, max_size=3)), dtype=np.float32)
    starts = draw(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20)), max_size=3))
    settings = {
        "keep": draw(st.integers(1, length + 5)),
        "sinks": draw(st.integers(0, 12)),
        "recent": draw(st.integers(0, 40)),
        "protected": tuple((start, start + size) for start, size in starts),
    }
    return scores, settings


class TestSelectRows:
    @given(selections())
    def test_equals_the_slow_rule_or_names_what_does_not_fit(self, drawn: tuple) -> None:
        scores, settings = drawn
        length = scores.shape[1]
        never_evicted = {
            p for start, stop in settings["protected"] for p in range(start, min(stop, length))
        }
        keep = settings["keep"]
        if len(never_evicted) > keep:
            with pytest.raises(BudgetError, match=rf"\b{keep} rows .*\b{len(never_evicted)} "):
                select_rows(scores, **settings)
            return
        before = scores.copy()
        rows = select_rows(scores, **settings)
        assert rows.dtype == np.int32
        assert rows.shape == (len(scores), min(keep, length))
        assert rows.tolist() == [slow_rows(row, **settings) for row in scores.tolist()]
        assert all(never_evicted <= set(row) for row in rows.tolist())
        assert np.array_equal(scores, before)

    @pytest.mark.parametrize("keep", [1, 7, 60, 300, 5_000, 39_999])
    @pytest.mark.parametrize("kind", ["random", "tied", "equal", "rising", "falling", "spikes"])
    def test_long_scores_take_the_group_shortcut_to_the_same_rows(
        self, kind: str, keep: int
    ) -> None:
        length = 40_000
        random = np.random.default_rng(keep)
        made = {
            "random": lambda: random.standard_normal((2, length)),
            "tied": lambda: random.integers(0, 5, (2, length)),
            "equal": lambda: np.zeros((2, length)),
            "rising": lambda: np.arange(2 * length).reshape(2, length),
            "falling": lambda: -np.arange(2 * length).reshape(2, length),
            # High values at the stride of the groups: one group holds all of them.
            "spikes": lambda: (np.arange(2 * length).reshape(2, length) % (4 * keep) == 3) * 9.0,
        }
        scores = np.asarray(made[kind](), dtype=np.float32)
        rows = select_rows(scores, keep, sinks=4, recent=32)
        expected = [slow_rows(row, keep, sinks=4, recent=32) for row in scores.tolist()]
        assert rows.tolist() == expected

    def test_heads_choose_each_for_themselves_and_a_vector_is_one_head(self) -> None:
        scores = np.array([[9, 0, 0, 1], [0, 5, 6, 0]], np.float32)
        assert select_rows(scores, 2).tolist() == [[0, 3], [1, 2]]
        assert select_rows(scores[0], 2).tolist() == [[0, 3]]

    def test_equal_scores_keep_the_latest(self) -> None:
        assert select_rows(np.zeros((2, 10)), 3).tolist() == [[7, 8, 9]] * 2
        assert select_rows(np.array([-0.0, 0.0, -0.0]), 2).tolist() == [[1, 2]]

    def test_recents_shrink_from_the_oldest_and_none_protects_nothing(self) -> None:
        scores = np.arange(10)[::-1]
        assert select_rows(scores, 3, sinks=2, recent=5).tolist() == [[0, 1, 9]]
        assert select_rows(scores, 3, sinks=0, recent=0).tolist() == [[0, 1, 2]]
        assert select_rows(scores, 1, sinks=4, recent=5).tolist() == [[0]]

    def test_sinks_and_recents_that_are_protected_count_once(self) -> None:
        scores = np.array([0, 0, 0, 0, 7, 0, 0, 0, 0, 0])
        rows = select_rows(scores, 5, sinks=2, recent=2, protected=[(0, 1), (8, 30)])
        assert rows.tolist() == [[0, 1, 4, 8, 9]]

    def test_a_protected_range_beyond_the_end_protects_nothing(self) -> None:
        assert select_rows(np.arange(4), 2, protected=[(4, 9)]).tolist() == [[2, 3]]

    def test_protected_beyond_the_budget_names_both_numbers(self) -> None:
        with pytest.raises(BudgetError, match=r"16 rows cannot hold the 40 protected"):
            select_rows(np.zeros(300), 16, protected=[(10, 30), (100, 120)])
        rows = select_rows(np.zeros(300), 40, protected=[(10, 30), (100, 120)], sinks=4, recent=8)
        assert rows.tolist() == [[*range(10, 30), *range(100, 120)]]

    @pytest.mark.parametrize("length", [0, 1, 2])
    @pytest.mark.parametrize("keep", [1, 2, 3])
    def test_tiny_lengths(self, length: int, keep: int) -> None:
        rows = select_rows(np.zeros((3, length)), keep, sinks=4, recent=4)
        expected = slow_rows([0.0] * length, keep, sinks=4, recent=4)
        assert rows.shape == (3, min(keep, length))
        assert rows.tolist() == [expected] * 3

    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
    def test_mlx_scores_of_each_float_type(self, dtype: mx.Dtype) -> None:
        scores = mx.random.normal((2, 500)).astype(dtype)
        exact = np.array(scores.astype(mx.float32)).tolist()
        assert select_rows(scores, 40).tolist() == [slow_rows(row, 40) for row in exact]

    @pytest.mark.parametrize(
        "dtype", ["float16", "float32", "float64", "int8", "uint16", "int64", "bool"]
    )
    def test_numpy_scores_of_each_type(self, dtype: str) -> None:
        scores = np.random.default_rng(1).integers(0, 100, (2, 500)).astype(dtype)
        assert select_rows(scores, 40).tolist() == [slow_rows(row, 40) for row in scores.tolist()]

    def test_integers_beyond_float64_are_compared_exactly(self) -> None:
        assert select_rows(np.array([2**53 + 1, 2**53], np.int64), 1).tolist() == [[0]]

    def test_float64_is_not_rounded_to_float32(self) -> None:
        assert select_rows([1.0 + 1e-12, 1.0], 1).tolist() == [[0]]

    @pytest.mark.parametrize(
        ("scores", "received"),
        [
            (np.zeros((1, 2, 3)), r"\(1, 2, 3\)"),
            (np.zeros((0, 3)), r"\(0, 3\)"),
            (3.0, r"\(\)"),
            ([[1, 2], [3]], "list"),
            ([1.0, "2"], "list"),
            ([1.0, None], "list"),
            (["1"], "dtype <U1"),
            ([1j], "complex"),
            ([10**30], "object"),
            ([1.0, 10**400], "list"),
        ],
    )
    def test_unreadable_scores_say_what_came(self, scores: object, received: str) -> None:
        with pytest.raises(SelectionError, match=rf"expected .*; got .*{received}"):
            select_rows(scores, 1)  # type: ignore[arg-type]

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_scores_that_are_not_finite_are_counted_and_located(self, bad: float) -> None:
        scores = np.zeros((3, 10), np.float32)
        scores[1, 7] = scores[2, 0] = bad
        with pytest.raises(SelectionError, match=r"2 of 30 .* position 7 of head 1"):
            select_rows(scores, 4)

    @pytest.mark.parametrize("keep", [0, -1, 2.0, True, None, "3"])
    def test_a_budget_that_is_no_count(self, keep: object) -> None:
        with pytest.raises(BudgetError, match="whole number >= 1"):
            select_rows(np.zeros(5), keep)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "setting",
        [{"sinks": -1}, {"recent": -1}, {"protected": [(3, 2)]}, {"protected": [(-1, 2)]}],
    )
    def test_settings_out_of_range(self, setting: dict) -> None:
        with pytest.raises(ConfigError):
            select_rows(np.zeros(5), 2, **setting)


class TestSnapKV:
    def test_sinks_and_the_last_row_survive_adversarial_scores(self) -> None:
        scores = [0.0] * 4 + [1e9] * 294 + [0.0] * 2
        kept = snapkv_keep_indices(300, 16, scores)
        assert len(kept) == 16
        assert {0, 1, 2, 3, 299} <= set(kept)
        assert kept == (0, 1, 2, 3, *range(288, 300))

    def test_without_the_guarantee_a_small_budget_drops_sinks(self) -> None:
        scores = [0.0] * 4 + [1e9] * 294 + [0.0] * 2
        kept = snapkv_keep_indices(300, 16, scores, guarantee_sinks=False)
        assert len(kept) == 16
        assert kept[:2] == (0, 1)
        assert 3 not in kept
        # budget // 8 sinks are enough for four from budget 32 on.
        wide = snapkv_keep_indices(300, 32, scores, guarantee_sinks=False)
        assert wide == snapkv_keep_indices(300, 32, scores)

    def test_recent_window_default_and_override(self) -> None:
        scores = [float(300 - p) for p in range(300)]
        assert snapkv_keep_indices(300, 64, scores)[-8:] == tuple(range(292, 300))
        assert snapkv_keep_indices(300, 64, scores)[:-8] == tuple(range(56))
        assert snapkv_keep_indices(300, 64, scores, recent_tokens=0) == tuple(range(64))
        recent = snapkv_keep_indices(300, 64, scores, recent_tokens=500)
        assert recent == (0, 1, 2, 3, *range(240, 300))

    @pytest.mark.parametrize(("length", "budget"), [(50, 999), (80, 16), (128, 16), (300, 300)])
    def test_short_prompts_are_kept_whole(self, length: int, budget: int) -> None:
        assert snapkv_keep_indices(length, budget, [0.0] * length) == tuple(range(length))

    def test_nothing_is_kept_of_nothing(self) -> None:
        assert snapkv_keep_indices(0, 1, []) == ()

    def test_one_row_past_min_tokens_is_evicted(self) -> None:
        assert len(snapkv_keep_indices(129, 16, [0.0] * 129)) == 16
        assert len(snapkv_keep_indices(129, 16, [0.0] * 129, min_tokens=129)) == 129

    @pytest.mark.parametrize(
        ("length", "budget", "scores"), [(300, 0, 300), (300, -5, 300), (300, 16, 299), (-1, 16, 0)]
    )
    def test_bad_arguments_are_value_errors(self, length: int, budget: int, scores: int) -> None:
        with pytest.raises(ValueError, match=r"expected .*; got") as caught:
            snapkv_keep_indices(length, budget, [0.0] * scores)
        assert isinstance(caught.value, BudgetError if budget < 1 else SelectionError)

    @pytest.mark.parametrize(
        "setting", [{"sink_tokens": -1}, {"recent_tokens": -1}, {"min_tokens": -1}]
    )
    def test_negative_settings(self, setting: dict) -> None:
        with pytest.raises(ConfigError, match=f"bad value for {next(iter(setting))}"):
            snapkv_keep_indices(300, 16, [0.0] * 300, **setting)

    def test_scores_per_head_are_refused(self) -> None:
        with pytest.raises(SelectionError, match=r"one dimension .* got shape \(2, 300\)"):
            snapkv_keep_indices(300, 16, np.zeros((2, 300)))

    @pytest.mark.parametrize("length", [300, 100])
    def test_not_finite_scores_are_counted_also_where_all_is_kept(self, length: int) -> None:
        scores = [0.0] * 300
        scores[20] = float("nan")
        scores[70] = float("inf")
        with pytest.raises(SelectionError, match=r"2 of \d+ NaN or infinite.* position 20\b"):
            snapkv_keep_indices(length, 16, scores)

    def test_scores_past_the_length_are_not_looked_at(self) -> None:
        scores = np.random.default_rng(0).random(300)
        longer = np.concatenate([scores, [np.nan, 1e9]])
        kept = snapkv_keep_indices(300, 32, scores)
        for same in (longer, longer.tolist(), tuple(longer.tolist()), mx.array(longer)):
            assert snapkv_keep_indices(300, 32, same) == kept

    def test_positions_are_plain_ints(self) -> None:
        kept = snapkv_keep_indices(np.int64(300), np.int32(16), np.zeros(300))  # type: ignore[arg-type]
        assert {type(position) for position in kept} == {int}

    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
    def test_mlx_scores(self, dtype: mx.Dtype) -> None:
        scores = mx.random.uniform(shape=(400,)).astype(dtype)
        as_list = scores.astype(mx.float32).tolist()
        assert snapkv_keep_indices(400, 48, scores) == snapkv_keep_indices(400, 48, as_list)  # type: ignore[arg-type]

    @given(
        scores=st.lists(tied_scores, min_size=1, max_size=120),
        budget=st.integers(1, 130),
        sink_tokens=st.integers(0, 10),
        recent_tokens=st.none() | st.integers(0, 130),
        min_tokens=st.integers(0, 20),
        guarantee_sinks=st.booleans(),
    )
    def test_equals_the_slow_rule(
        self,
        scores: list[float],
        budget: int,
        sink_tokens: int,
        recent_tokens: int | None,
        min_tokens: int,
        guarantee_sinks: bool,
    ) -> None:
        length, eighth = len(scores), max(1, budget // 8)
        sinks = sink_tokens if guarantee_sinks else min(sink_tokens, eighth)
        recent = eighth if recent_tokens is None else recent_tokens
        whole = length <= min_tokens
        expected = slow_rows(scores, length if whole else budget, sinks=sinks, recent=recent)
        kept = snapkv_keep_indices(
            length,
            budget,
            scores,
            sink_tokens=sink_tokens,
            recent_tokens=recent_tokens,
            min_tokens=min_tokens,
            guarantee_sinks=guarantee_sinks,
        )
        assert list(kept) == expected


class TestTopk:
    @given(selections(), st.lists(st.integers(0, 89), max_size=12))
    def test_equals_the_slow_rule(self, drawn: tuple, always: list[int]) -> None:
        scores, settings = drawn
        keep, length = settings["keep"], scores.shape[1]
        always = [position % length for position in always]
        if len(set(always)) > keep:
            with pytest.raises(BudgetError, match=rf"{keep} rows .* {len(set(always))} protected"):
                topk_indices_per_head(scores, keep, always)
            return
        rows = topk_indices_per_head(scores, keep, always)
        ranges = [(position, position + 1) for position in always]
        expected = [slow_rows(row, keep, protected=ranges) for row in scores.tolist()]
        assert rows.shape == (len(scores), min(keep, length))
        assert rows.tolist() == expected

    @pytest.mark.parametrize("always", [None, [], (), np.array([], np.int64)])
    def test_nothing_is_forced(self, always: Sequence[int] | None) -> None:
        assert topk_indices_per_head([[1, 3, 2, 3]], 2, always).tolist() == [[1, 3]]

    @pytest.mark.parametrize("always", [[3, 0, 3], (0, 3), np.array([3, 0]), mx.array([0, 3])])
    def test_forced_positions_in_any_form(self, always: Sequence[int]) -> None:
        assert topk_indices_per_head([[1, 9, 2, 0]], 3, always).tolist() == [[0, 1, 3]]

    def test_more_than_there_is_keeps_every_column(self) -> None:
        assert topk_indices_per_head(np.zeros((2, 3)), 9, [1]).tolist() == [[0, 1, 2]] * 2

    @pytest.mark.parametrize(
        ("always", "received"),
        [([4], "4"), ([-1], "-1"), ([0.5], "float64"), ([[0], [1]], "2 dim")],
    )
    def test_forced_positions_that_are_none(self, always: list, received: str) -> None:
        with pytest.raises(SelectionError, match=rf"expected .*; got {received}|of {received}"):
            topk_indices_per_head(np.zeros((1, 4)), 2, always)


class TestWithoutScores:
    @given(T=st.integers(0, 200), keep=st.integers(1, 220), sinks=st.integers(0, 30))
    def test_sink_recent(self, T: int, keep: int, sinks: int) -> None:
        expected = slow_rows([0.0] * T, keep, sinks=sinks, recent=T)
        assert sink_recent_indices(T, keep, sinks).tolist() == expected

    def test_sink_recent_keeps_four_sinks_unless_told(self) -> None:
        assert sink_recent_indices(100, 6).tolist() == [0, 1, 2, 3, 98, 99]

    @given(T=st.integers(0, 200), keep=st.integers(1, 220), seed=st.integers(0, 2**32))
    def test_random_is_at_the_same_budget_and_repeats(self, T: int, keep: int, seed: int) -> None:
        drawn = random_indices(T, keep, seed)
        assert len(drawn) == min(keep, T)
        assert drawn.tolist() == sorted(set(drawn.tolist()))
        assert all(0 <= position < T for position in drawn.tolist())
        assert drawn.tolist() == random_indices(T, keep, seed).tolist()

    def test_random_differs_by_seed_and_reaches_everywhere(self) -> None:
        draws = [random_indices(50, 10, seed).tolist() for seed in range(60)]
        assert len({tuple(draw) for draw in draws}) > 50
        assert {position for draw in draws for position in draw} == set(range(50))

    @pytest.mark.parametrize("keep", [0, -3])
    def test_no_budget(self, keep: int) -> None:
        with pytest.raises(BudgetError):
            sink_recent_indices(10, keep)
        with pytest.raises(BudgetError):
            random_indices(10, keep, 0)

    def test_bad_settings(self) -> None:
        with pytest.raises(SelectionError):
            sink_recent_indices(-1, 3)
        with pytest.raises(SelectionError):
            random_indices(-1, 3, 0)
        with pytest.raises(ConfigError):
            sink_recent_indices(10, 3, -1)
        with pytest.raises(ConfigError):
            random_indices(10, 3, -1)
