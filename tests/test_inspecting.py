"""What an inspection says is what the library does."""

from __future__ import annotations

import base64
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx_lm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from inspections import made_up
from kvkeep import EvictionConfig, stream_generate
from kvkeep.allocation import ALLOCATIONS
from kvkeep.compaction import prefill_and_compact
from kvkeep.errors import BudgetError, ConfigError, PromptError
from kvkeep.generation import draft_start, repeat_prompt
from kvkeep.heads import model_identity
from kvkeep.inspecting import (
    Inspection,
    inspect_prompt,
    parse_layers,
    render_html,
    save_png,
    text_units,
)
from kvkeep.inspecting import page as page_module
from kvkeep.inspecting.layers import thinned
from kvkeep.inspecting.levels import NEVER, first_rungs, packed, quantised
from kvkeep.inspecting.page import config_words, rows_words
from kvkeep.inspecting.picture import kept_image
from kvkeep.policies import POLICIES
from kvkeep.spec import Budget, HeadProfile, LayerSelection, Selection
from tiny_folder import write_tiny_folder
from tiny_models import random_tokens, tiny_llama, tiny_tokenizer

LAYERS, KV_HEADS, LENGTH = 3, 2, 120
TOKENS = random_tokens(LENGTH + 1)
LADDER = ("10%", "20%", "45%", "70%", 24, "20kB")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(layers=LAYERS, kv_heads=KV_HEADS)


@pytest.fixture(scope="module")
def profile(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profile") / "heads.json"
    scores = {0: (0.1, 0.9), 1: (0.4, 0.2), 2: (0.8, 0.3)}
    HeadProfile(model_identity(model), scores, sinks=2, recent=5, method="made up").save(path)
    return str(path)


def inspected(model: Any, config: EvictionConfig, tokens: Any = TOKENS) -> Inspection:
    return inspect_prompt(model, tiny_tokenizer(), tokens, config, budgets=LADDER)


def config_of(policy: str, allocation: str, profile: str, **more: Any) -> EvictionConfig:
    heads = profile if allocation == "duo" else None
    given_ = {"budget": "25%", "min_tokens": 0, "head_profile": heads, **more}
    return EvictionConfig(policy=policy, allocation=allocation, **given_)


def combinations() -> list[tuple[str, str, str]]:
    """Every policy, every allocation and every store at least once."""
    plain = [(policy, "uniform", "auto") for policy in POLICIES]
    dealt = [("snapkv", allocation, "auto") for allocation in ALLOCATIONS]
    stored = [("span", "uniform", "shared"), ("span", "adaptive", "union")]
    return [*plain, *dealt, *stored, ("knorm", "global", "ragged"), ("compactor", "cake", "auto")]


@pytest.mark.parametrize(("policy", "allocation", "store"), combinations())
def test_each_rung_is_what_the_library_keeps_at_that_budget(
    policy: str, allocation: str, store: str, model: Any, profile: str
) -> None:
    config = config_of(policy, allocation, profile, store=store)
    found = inspected(model, config)
    assert found.positions == LENGTH and [layer.index for layer in found.layers] == [0, 1, 2]
    assert found.rungs[found.asked].budget == config.limit
    assert [rung.rows for rung in found.rungs] == sorted(rung.rows for rung in found.rungs)
    assert len(found.rungs) == len(LADDER) + 1
    for at, rung in enumerate(found.rungs):
        real = prefill_and_compact(
            model,
            TOKENS[:-1],
            make_prompt_cache(model),
            replace(config, budget=rung.budget),
            repeat_prompt=repeat_prompt(tiny_tokenizer(), config),
            draft_start=draft_start(tiny_tokenizer(), config, TOKENS[-1]),
        )
        for index, layer in enumerate(real.cache):
            kept = [np.flatnonzero(row).tolist() for row in found.kept(index, at)]
            held = [list(head) for head in layer.head_positions]
            heads = max(len(kept), len(held))  # one entry where all heads are alike
            assert kept * (heads // len(kept)) == held * (heads // len(held))
        assert rung.nbytes == real.compact_cache_nbytes
        assert round(rung.rows) == real.retained_tokens
        assert found.exact_nbytes == real.exact_cache_nbytes


def test_the_asked_rung_is_what_generate_keeps(model: Any) -> None:
    config = EvictionConfig(policy="span", budget="30%", min_tokens=0)
    found = inspected(model, config)
    (response,) = stream_generate(model, tiny_tokenizer(), TOKENS, config=config, max_tokens=1)
    rung = found.rungs[found.asked]
    assert response.kv is not None
    assert (response.kv.retained_tokens, response.kv.original_tokens) == (rung.rows, LENGTH)
    assert response.kv.compact_cache_nbytes == rung.nbytes


def test_the_scores_are_those_that_chose(model: Any) -> None:
    """No evicted position scored higher than a kept one that nothing forces."""
    config = EvictionConfig(policy="snapkv", budget=40, min_tokens=0, recent_tokens=0)
    found = inspected(model, EvictionConfig.parse({"sink_tokens": 0}, config))
    for at, layer in enumerate(found.layers):
        assert layer.scores.shape == (KV_HEADS, LENGTH) and layer.scores.dtype == np.float32
        for scores, kept in zip(layer.scores, found.kept(at), strict=True):
            assert scores[kept].min() >= scores[~kept].max()


@pytest.mark.parametrize("policy", ["span", "kvzip", "snapkv-d", "lookahead"])
def test_a_prompt_that_is_kept_whole_is_scored_all_the_same(policy: str, model: Any) -> None:
    found = inspected(model, EvictionConfig(policy=policy, budget="25%"))  # min_tokens 128
    assert found.kept_whole and all(found.kept(at).all() for at in range(LAYERS))
    assert {rung.rows for rung in found.rungs} == {LENGTH}
    assert all(np.ptp(layer.scores) > 0 for layer in found.layers)
    assert rows_words(found, found.rungs[0]) == "all 120"
    assert "kept whole" in render_html(found)
    long = inspected(model, EvictionConfig(policy=policy, budget="25%"), random_tokens(200))
    assert not long.kept_whole and "kept whole" not in render_html(long)


def test_budgets_below_what_is_protected_are_left_out(model: Any) -> None:
    config = EvictionConfig(policy="span", budget="60%", min_tokens=0, protect=((0, 60),))
    found = inspected(model, config)
    assert [str(rung.budget) for rung in found.rungs] == ["60%", "70%"]
    with pytest.raises(BudgetError, match="cannot hold 60 protected"):
        inspected(model, EvictionConfig.parse({"budget": "40%"}, config))


def test_bad_input_is_refused(model: Any) -> None:
    with pytest.raises(PromptError, match="at least 2 tokens"):
        inspected(model, EvictionConfig(budget="25%"), [3])
    with pytest.raises(ConfigError, match="compares heads"):
        inspected(model, EvictionConfig(policy="snapkv-d", allocation="adaptive", budget="25%"))
    with pytest.raises(BudgetError):
        inspect_prompt(model, tiny_tokenizer(), TOKENS, budgets=["much"])


# -- tokens as text ------------------------------------------------------------------------


@pytest.fixture(scope="session")
def every_byte(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer that makes a token of each byte."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("bytes") / "model", every_byte=True)
    return mlx_lm.load(str(folder))[1]


def units_of(tokenizer: Any, text: str) -> list[str]:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    units = text_units(tokenizer, tokens)
    assert "".join(unit.text for unit in units) == text
    assert sum(unit.tokens for unit in units) == len(tokens)
    assert all(unit.tokens == len(unit.text.encode()) for unit in units)
    return [unit.text for unit in units]


@given(text=st.text(min_size=1, max_size=40))
@settings(max_examples=300)
def test_units_are_the_prompt(text: str, every_byte: Any) -> None:
    units_of(every_byte, text)


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("ab", ["a", "b"]),
        ("漢字", ["漢", "字"]),
        ("e\u0301x", ["e\u0301", "x"]),
        ("👩\u200d💻!", ["👩\u200d💻", "!"]),
        ("👍🏽", ["👍🏽"]),
        ("❤\ufe0f", ["❤\ufe0f"]),
        ("🇩🇪🇫🇷", ["🇩🇪", "🇫🇷"]),
        ("שָׁ", ["שָׁ"]),
        ("\n\u0301", ["\n", "\u0301"]),
        ("a\u2028b\0", ["a", "\u2028", "b", "\0"]),
    ],
)
def test_what_is_drawn_as_one_is_one_unit(text: str, units: list[str], every_byte: Any) -> None:
    assert units_of(every_byte, text) == units


def test_special_tokens_are_shown(every_byte: Any) -> None:
    tokens = every_byte.encode("<|user|>hi<|end|>", add_special_tokens=False)
    assert [unit.text for unit in text_units(every_byte, tokens)] == [
        "<|user|>",
        "h",
        "i",
        "<|end|>",
    ]


def test_broken_text_is_drawn_as_it_comes(every_byte: Any) -> None:
    half = every_byte.encode("漢", add_special_tokens=False)[:1]
    units = text_units(every_byte, half * 40 + every_byte.encode("a", add_special_tokens=False))
    assert sum(unit.tokens for unit in units) == 41
    assert units[-1].text.endswith("a") and set(units[0].text) == {"\ufffd"}


# -- levels and budgets in bytes -------------------------------------------------------------

SCORES = st.lists(
    st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([0.0, 1.0, 1e-30]),
    min_size=1,
    max_size=80,
)


@given(SCORES)
def test_levels_keep_the_order_and_their_values_are_near(scores: list[float]) -> None:
    array = np.array(scores, np.float32)
    levels, values = quantised(array)
    order = np.argsort(array, kind="stable")
    assert (np.diff(levels[order].astype(int)) >= 0).all()
    width = float(array.max()) - float(array.min())
    for level in np.unique(levels):
        own = array[levels == level].astype(np.float64)
        assert (
            own.min() - 1e-6 * abs(own.min()) <= values[level] <= own.max() + 1e-6 * abs(own.max())
        )
        assert np.ptp(own) <= width * 2 / 255 * 1.01
        below = np.searchsorted(np.sort(array), [own.min(), own.max()])
        assert np.ptp(below) <= len(array) * 2 / 255 + np.count_nonzero(array == own.max())


@given(
    kept=st.integers(1, 5).flatmap(
        lambda rungs: st.lists(
            st.lists(st.booleans(), min_size=11, max_size=11), min_size=rungs, max_size=rungs
        )
    )
)
def test_kept_positions_come_back(kept: list[list[bool]]) -> None:
    rungs = [np.array([row, row[::-1]]) for row in kept]
    first = first_rungs(rungs)
    nested = all((a <= b).all() for a, b in itertools.pairwise(rungs))
    assert (first is not None) == nested
    if first is not None:
        for at, rung in enumerate(rungs):
            np.testing.assert_array_equal(first <= at, rung)
        assert (first[~rungs[-1]] == NEVER).all()
    bits = packed(rungs)
    assert bits.shape == (len(rungs), 2, 2)
    for at, rung in enumerate(rungs):
        for own in range(2):
            back = [bits[at, own, t >> 3] >> (t & 7) & 1 for t in range(11)]
            assert back == rung[own].tolist()


def test_budgets_that_give_rows_up_again_are_stored_as_bits(model: Any) -> None:
    found = made_up(list("abcdefghijk"), layers=2)
    one, other = (
        replace(
            found.rungs[0],
            selection=Selection(10, {0: LayerSelection((np.array(kept),) * 2)}),
        )
        for kept in ([1, 2], [2, 3, 4])
    )
    data = page_module.page_data(replace(found, rungs=(one, other), asked=0), [0, 1])["layers"]
    assert (data[0]["first"], data[1]["bits"]) == (None, None)
    bits = np.frombuffer(base64.b64decode(data[0]["bits"]), np.uint8).reshape(2, 2, 2)
    assert bits[:, 0].tolist() == [[0b110, 0], [0b11100, 0]]


# -- which layers --------------------------------------------------------------------------


def test_layers_are_read_and_checked() -> None:
    assert parse_layers("0-3,7,5") == (0, 1, 2, 3, 5, 7)
    for text in ("", "a", "3-1", "-1", "1,,2", "1-2-3"):
        with pytest.raises(ConfigError, match="unreadable layers"):
            parse_layers(text)
    found = made_up(list("abcdef"), layers=4)
    assert found.shown([3, 1]) == [1, 3]
    with pytest.raises(ConfigError, match=r"layer 9 .* 4 from 0 to 3"):
        found.shown([0, 9])


def test_pages_that_would_be_too_large_show_every_nth_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert thinned([5, 6, 7, 8, 9], [10] * 5, 30) == [5, 7, 9]
    assert thinned([5, 6], [10, 10], 1) == [5]
    monkeypatch.setattr(page_module, "MAX_SCORES", 25)
    found = made_up(list("abcdef"), layers=4)
    assert page_module.shown_layers(found, None) == [0, 2]
    assert page_module.shown_layers(found, [0, 1, 2]) == [0, 1, 2]
    assert "2 of the 4 layers are shown" in render_html(found)


# -- words and picture ---------------------------------------------------------------------


def test_words_say_what_was_asked() -> None:
    config = EvictionConfig(policy="cake", allocation="cake", budget=9, gamma=3, sink_tokens=0)
    assert config_words(config) == [
        ("Policy", "cake"),
        ("Allocation, store", "cake, auto"),
        ("Options", "gamma=3, sink_tokens=0"),
    ]
    words = [page_module.budget_words(Budget.parse(b)) for b in ("12.5%", 2048, "512MB")]
    assert words == ["12.5%", "2,048 rows", "512.00 MB"]


def test_the_image_is_blue_where_rows_stay_and_grey_where_not() -> None:
    found = made_up([str(i) for i in range(301)], layers=3, heads=1)
    image = kept_image(found, [0, 2])
    assert image.shape == (2, 300, 3) and image.min() >= 0 and image.max() <= 1
    for row, at in zip(image, (0, 2), strict=True):
        blue = row[:, 2] - row[:, 0]
        kept = found.kept(at)[0]
        assert blue[kept].min() > blue[~kept].max()
        scores = found.layers[at].scores[0]
        for same in (kept, ~kept):  # a higher score is darker
            order = np.argsort(scores[same])
            assert (np.diff(row[same].sum(axis=-1)[order]) <= 1e-9).all()


def test_a_picture_of_a_long_prompt_has_columns_of_several_positions(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'eval' is not installed")
    found = made_up([""] * 5001, layers=2, heads=2)
    image = kept_image(found, [0, 1])
    assert image.shape == (2, 1600, 3)
    save_png(found, tmp_path / "new" / "map.png", layers=[1])
    assert (tmp_path / "new" / "map.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["map.png"]
