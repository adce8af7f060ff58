"""Budgets, configs, ranges and selections: read the same way everywhere, refused with reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep import Budget, EvictionConfig, LayerSelection, Selection
from kvkeep.errors import BudgetError, ConfigError, KvkeepError, SelectionError
from kvkeep.spec import POOLINGS, STORES, checked_positions, parse_ranges


@pytest.mark.parametrize(
    ("value", "amount", "unit"),
    [
        (1, 1, "rows"),
        (2048, 2048, "rows"),
        ("2048", 2048, "rows"),
        (" 2048 ", 2048, "rows"),
        (np.int64(7), 7, "rows"),
        (0.25, 0.25, "share"),
        (1.0, 1.0, "share"),
        (np.float32(0.5), 0.5, "share"),
        ("0.25", 0.25, "share"),
        ("25%", 0.25, "share"),
        ("12.5 %", 0.125, "share"),
        ("100%", 1.0, "share"),
        ("512MB", 512 * 10**6, "bytes"),
        ("512 mb", 512 * 10**6, "bytes"),
        ("1.5GB", 1_500_000_000, "bytes"),
        ("2KiB", 2048, "bytes"),
        ("1MiB", 2**20, "bytes"),
        ("1GiB", 2**30, "bytes"),
        ("3KB", 3000, "bytes"),
        ("64B", 64, "bytes"),
    ],
)
def test_budgets_are_read(value: Any, amount: float, unit: str) -> None:
    budget = Budget.parse(value)
    assert (budget.amount, budget.unit) == (amount, unit)
    assert Budget.parse(budget) is budget


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, "0", "-5", "0%", "101%", "0.0", "1.5", 0.0, -0.1, 1.01, "0B", "0.2B"),
        *(float("nan"), float("inf"), float("-inf"), "nan", "inf"),
        *("", " ", "many", "12 rows", "5TB", "25%%", "1e3", "1,000", "0x10", "%", "MB"),
        *(True, False, None, [512], (1,), {"rows": 5}, b"512", 3 + 0j, mx.array(5)),
        *(10**400, "9" * 5000, "9" * 400 + "MB", 2.0**70, "9" * 18 + "GB"),
    ],
)
def test_bad_budgets_are_refused(value: Any) -> None:
    with pytest.raises(BudgetError, match="expected"):
        Budget.parse(value)


@pytest.mark.parametrize(
    ("amount", "unit"), [(5, "row"), (5.5, "rows"), (0.5, "bytes"), (2, "share"), (0, "rows")]
)
def test_bad_amounts_are_refused(amount: float, unit: Any) -> None:
    with pytest.raises(BudgetError):
        Budget(amount, unit)


@pytest.mark.parametrize(
    ("value", "length", "rows"),
    [
        (64, 300, 64),
        (300, 300, 300),
        (5000, 300, 300),
        ("25%", 300, 75),
        ("0.29", 100, 29),  # 0.29 * 100 is 28.999999999999996
        ("57%", 100, 57),  # likewise
        ("10%", 3, 1),
        ("0.1%", 300, 1),
        ("99.9%", 300, 299),
        ("100%", 300, 300),
    ],
)
def test_rows_of_a_budget(value: Any, length: int, rows: int) -> None:
    assert Budget.parse(value).rows(length) == rows


@given(st.integers(1, 100), st.integers(1, 5000))
def test_a_whole_percentage_never_loses_a_row_to_rounding(percent: int, length: int) -> None:
    assert Budget.parse(f"{percent}%").rows(length) == max(1, percent * length // 100)


def test_byte_budgets_are_met_from_below() -> None:
    budget = Budget(1000, "bytes")
    assert budget.rows(300, bytes_per_row=64) == 15
    assert budget.rows(300, bytes_per_row=64, fixed_bytes=104) == 14
    assert budget.rows(300, bytes_per_row=64, fixed_bytes=105) == 13
    assert budget.rows(300, bytes_per_row=1) == 300
    with pytest.raises(BudgetError, match=r"at least 1001 bytes.*got 1000 bytes"):
        budget.rows(300, bytes_per_row=64, fixed_bytes=937)


@pytest.mark.parametrize(
    ("value", "text"), [(64, "64"), ("25%", "25%"), (0.125, "12.5%"), ("2KB", "2000B")]
)
def test_a_budget_prints_as_it_parses(value: Any, text: str) -> None:
    assert str(Budget.parse(value)) == text
    assert Budget.parse(text) == Budget.parse(value)


def test_a_config_is_frozen_and_comparable() -> None:
    config = EvictionConfig(budget=64, protect=[[5, 9], [0, 2]])  # type: ignore[arg-type]
    assert config.budget == Budget(64)
    assert config.protect == ((0, 2), (5, 9))
    assert config == EvictionConfig.parse({"budget": "64", "protect": "5:9,0:2"})
    assert len({config, dataclasses.replace(config)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.window = 3  # type: ignore[misc]


def test_keywords_flags_and_requests_give_the_same_config() -> None:
    keywords = EvictionConfig(
        policy="snapkv",
        budget=Budget(0.25, "share"),
        store="per-head",
        window=16,
        pool_kernel=7,
        pooling="max",
        sink_tokens=2,
        recent_tokens=0,
        min_tokens=0,
        guarantee_sinks=False,
        protect=((0, 512), (900, 910)),
        seed=3,
        score_chunk_size=4,
    )
    settings = {
        "policy": "snapkv",
        "budget": "25%",
        "store": "per-head",
        "window": 16,
        "pool-kernel": 7,
        "pooling": "max",
        "sink-tokens": 2,
        "recent-tokens": 0,
        "min-tokens": 0,
        "guarantee-sinks": False,
        "protect": "0:512,900:910",
        "seed": 3,
        "score-chunk-size": 4,
    }
    assert EvictionConfig.parse(settings) == keywords
    request = {name.replace("-", "_"): value for name, value in settings.items()}
    assert EvictionConfig.parse({**request, "protect": [[900, 910], [0, 512]]}) == keywords


def test_none_leaves_a_setting_as_it_was() -> None:
    base = EvictionConfig(policy="snapkv", budget=Budget(99), window=5)
    assert EvictionConfig.parse({"window": None, "budget": None}, base) == base
    assert EvictionConfig.parse({"window": 6}, base) == dataclasses.replace(base, window=6)
    assert EvictionConfig.parse({}) == EvictionConfig()


def test_an_unknown_setting_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'windows'.*expected one of .*window"):
        EvictionConfig.parse({"windows": 5})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("window", bad) for bad in (0, -1, 2.0, "8", True)),
        *(("pool_kernel", bad) for bad in (0, 4, -3, 5.0, True)),
        *(("pooling", bad) for bad in ("mean", "", 3)),
        *(("store", bad) for bad in ("raged", "", None, 1)),
        *(("policy", bad) for bad in (None, 1)),
        *(("allocation", bad) for bad in (None, 1)),
        *(("sink_tokens", bad) for bad in (-1, None, 1.5, True)),
        *(("recent_tokens", bad) for bad in (-1, 1.5, "3")),
        *(("min_tokens", bad) for bad in (-1, None, 1.5)),
        *(("seed", bad) for bad in (-1, 1.5)),
        *(("score_chunk_size", bad) for bad in (0, -8, 2.5)),
        *(("guarantee_sinks", bad) for bad in (0, 1, "yes")),
        *(("budget", bad) for bad in (0, "none", None, -5)),
        *(("protect", bad) for bad in ("5", "9:5", "5:5", "-1:3", [[3]], [[0, 1, 2]], 7)),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*; expected .*; got "):
        EvictionConfig(**{name: value})


def test_every_store_and_pooling_is_accepted() -> None:
    for store in STORES:
        assert EvictionConfig(store=store).store == store
    for pooling in POOLINGS:
        assert EvictionConfig(pooling=pooling).pooling == pooling


@pytest.mark.parametrize(
    ("value", "ranges"),
    [
        ((), ()),
        ("", ()),
        ("0:512", ((0, 512),)),
        (" 900:910 , 0:512 ,", ((0, 512), (900, 910))),
        ([(5, 9), (0, 6)], ((0, 6), (5, 9))),  # they may overlap
        ([[np.int64(1), 2]], ((1, 2),)),
        (["0:4", "7:9"], ((0, 4), (7, 9))),  # a flag given twice
    ],
)
def test_ranges_are_read(value: Any, ranges: tuple[tuple[int, int], ...]) -> None:
    assert parse_ranges(value) == ranges


@pytest.mark.parametrize(
    "value",
    [
        *(None, 5, {0: 5}, "5", ":", "5:", ":5", "a:b", "1:2:3", "3:3", "4:2", "-1:3"),
        *([(1.9, 3.2)], ["05"], [5], [(0,)], [(-1, 3)], [(3, 3)], [("0", "5")], [None], b"05"),
    ],
)
def test_bad_ranges_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"start:stop"):
        parse_ranges(value)


def test_positions_are_checked_and_become_int32() -> None:
    for given_positions in ([0, 40, 99], np.array([0, 40, 99]), mx.array([0, 40, 99]), (0, 40, 99)):
        positions = checked_positions(given_positions)
        assert positions.dtype == np.int32
        assert positions.tolist() == [0, 40, 99]
    assert checked_positions([]).tolist() == []


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([3, 1], "3 followed by 1 at index 0"),
        ([0, 2, 2], "2 followed by 2 at index 1"),
        ([-1, 4], "got -1"),
        ([0.0, 1.0], "float64"),
        ([[0, 1]], "2 dimensions"),
        ([True, False], "bool"),
    ],
)
def test_bad_positions_are_refused(positions: Any, message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        checked_positions(positions)
    with pytest.raises(SelectionError, match=message):
        LayerSelection((positions,))


def test_a_selection_of_one_layer() -> None:
    shared = LayerSelection((np.array([0, 3]),))
    assert shared.shared
    assert shared.of_head(5).tolist() == [0, 3]
    assert (shared.counts, shared.equal_counts) == ((2,), True)
    ragged = LayerSelection((np.array([0, 3]), np.array([1])))
    assert not ragged.shared
    assert ragged.of_head(1).tolist() == [1]
    assert (ragged.counts, ragged.equal_counts) == ((2, 1), False)
    with pytest.raises(SelectionError, match="without heads"):
        LayerSelection(())


def test_a_selection_stays_inside_its_source() -> None:
    inside = LayerSelection((np.array([0, 9]),))
    assert Selection(10, {0: inside}).layers[0] is inside
    with pytest.raises(SelectionError, match=r"layer 3; expected positions below 9; got 9"):
        Selection(9, {3: inside})


def test_an_error_says_what_was_expected_what_came_and_what_to_do() -> None:
    error = KvkeepError("bad thing.", expected="a good one", received=[1], remedy="Try again.")
    assert str(error) == "bad thing; expected a good one; got [1]. Try again."
    assert (error.problem, error.expected, error.received) == ("bad thing.", "a good one", [1])
    assert str(KvkeepError("bad thing")) == "bad thing."
