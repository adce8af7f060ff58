"""Counts per layer and head: exact totals, and the third seed's schedule under them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.allocation import pyramid_budgets
from kvkeep.errors import BudgetError, ConfigError


def seed_schedule(keep: int, n_layers: int, window: int, beta: int) -> list[int]:
    """The seed's counts before they are scaled."""
    base = max(keep - window, 1)
    low = max(base // beta, 1)
    high = 2 * base - low
    counts = []
    for layer in range(n_layers):
        fall = layer * ((high - low) // max(n_layers - 1, 1))
        counts.append(max(high - fall, low) + window)
    return counts


schedules = {
    "keep": st.integers(1, 3000),
    "n_layers": st.integers(1, 100),
    "window": st.integers(0, 200),
    "beta": st.integers(1, 40),
}


class TestPyramid:
    @given(**schedules)
    def test_total_is_exact_and_counts_fall(
        self, keep: int, n_layers: int, window: int, beta: int
    ) -> None:
        counts = pyramid_budgets(keep, n_layers, window, beta)
        assert len(counts) == n_layers
        assert sum(counts) == keep * n_layers
        assert min(counts) >= 1
        assert counts == sorted(counts, reverse=True)

    @given(**schedules)
    def test_each_count_is_within_a_row_of_the_scaled_seed(
        self, keep: int, n_layers: int, window: int, beta: int
    ) -> None:
        seed = seed_schedule(keep, n_layers, window, beta)
        scale = Fraction(keep * n_layers, sum(seed))
        counts = pyramid_budgets(keep, n_layers, window, beta)
        assert all(abs(count - raw * scale) < 1 for count, raw in zip(counts, seed, strict=True))

    @given(**schedules)
    def test_a_schedule_with_the_right_total_is_left_alone(
        self, keep: int, n_layers: int, window: int, beta: int
    ) -> None:
        seed = seed_schedule(keep, n_layers, window, beta)
        if sum(seed) % n_layers == 0 and sum(seed) // n_layers == keep:
            assert pyramid_budgets(keep, n_layers, window, beta) == seed

    def test_the_floors_of_the_schedule_overshoot_and_the_scaling_takes_it_back(self) -> None:
        # 32 layers, window 32: the unscaled counts hold 142.5 rows on average instead of 128.
        seed = seed_schedule(128, 32, 32, 20)
        assert sum(seed) / 32 == 142.5
        assert (seed[0], seed[-1]) == (220, 65)
        counts = pyramid_budgets(128, 32, 32)
        assert sum(counts) == 128 * 32
        assert (counts[0], counts[-1]) == (round(220 * 128 / 142.5), round(65 * 128 / 142.5))

    def test_an_exact_schedule_by_hand(self) -> None:
        # base 20, least 1, most 39, step 19 over three layers: 39, 20, 1.
        assert pyramid_budgets(20, 3, 0) == [39, 20, 1]
        assert pyramid_budgets(24, 3, 4) == [43, 24, 5]

    def test_equal_remainders_go_to_the_earlier_layers(self) -> None:
        # base 2, least 1, most 3, step 2 // 3 = 0: four layers of 3 share a total of 8.
        assert pyramid_budgets(2, 4, 0) == [2, 2, 2, 2]
        # 9, 7, 5, 3 scaled by 20/24 are 7.5, 5.83, 4.17, 2.5: of the two halves the first goes up.
        assert seed_schedule(5, 4, 0, 20) == [9, 7, 5, 3]
        assert pyramid_budgets(5, 4, 0) == [8, 6, 4, 2]

    @pytest.mark.parametrize(("keep", "window"), [(8, 8), (8, 64), (1, 0), (1, 32)])
    def test_no_room_beside_the_window_is_uniform(self, keep: int, window: int) -> None:
        assert pyramid_budgets(keep, 7, window) == [keep] * 7

    def test_one_layer_gets_the_mean(self) -> None:
        assert pyramid_budgets(100, 1, 16) == [100]

    def test_beta_one_is_flat(self) -> None:
        assert pyramid_budgets(100, 6, 16, beta=1) == [100] * 6

    @pytest.mark.parametrize("keep", [0, -1, 1.5, True])
    def test_bad_budget(self, keep: object) -> None:
        with pytest.raises(BudgetError, match=r"total_keep; expected a whole number >= 1; got"):
            pyramid_budgets(keep, 4, 8)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("setting", "name"),
        [((0, 8, 20), "n_layers"), ((4, -1, 20), "window"), ((4, 8, 0), "beta")],
    )
    def test_bad_settings(self, setting: tuple[int, int, int], name: str) -> None:
        with pytest.raises(ConfigError, match=f"bad value for {name}"):
            pyramid_budgets(64, *setting)
