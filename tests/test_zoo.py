"""Every model type: evicted exactly, or refused by name before anything is computed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache as remembered
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

import kvkeep
from kvkeep import (
    EvictionConfig,
    LayerSelection,
    Selection,
    SnapKVEvictionResult,
    compact_prompt_cache,
)
from kvkeep.attention import batch_fault, facts_of, observed_prefill
from kvkeep.caches import is_compact, is_exact, row_groups
from kvkeep.compaction import compact_prefilled
from kvkeep.errors import ConfigError, KvkeepError, UnsupportedModelError
from kvkeep.policies import POLICIES, window_mass
from kvkeep.views import layer_view
from zoo import ZOO, model_of, report_of, tokens_of
from zoo_oracle import attention_mass, fed, leaves, masked_logits, prefilled

T, KEEP, STEP = 44, 15, 18  # STEP does not divide T: the last chunk is another one
PROMPT, NEXT, STEPS = tokens_of(T), tokens_of(7, 9), (1, 4, 2)
TOLERANCE = 2e-5
SEES = {"queries", "attention", "replay"}

KINDS = sorted(ZOO)
#: Types whose hidden states depend on the chunks of the prefill, in mlx-lm itself: tokens see
#: later ones of their chunk, or one more than the window holds.
BY_CHUNK = {"phi3small", "plamo3"}
#: One of each way to differ from a plain llama.
PECULIAR = {
    *("afm7", "falcon_h1", "gemma2", "gemma3n", "gemma4", "gpt_oss", "iquestloopcoder", "llama4"),
    *("deepseek_v3", "deepseek_v32", "kimi_linear", "longcat_flash", "openelm", "phi"),
    *("phi3small", "plamo", "qwen3_next"),
}
EVERY = pytest.mark.parametrize("kind", KINDS)


def evicting(kind: str) -> Any:
    """The type's model, if anything of it can be evicted."""
    report = report_of(kind)
    if report.verdict == "refused":
        pytest.skip(f"refused: {report.reason}")
    return model_of(kind)


@remembered
def _stock(kind: str, step: int) -> list[Any]:
    return prefilled(model_of(kind), PROMPT, step)


def stock(kind: str, step: int = STEP) -> list[Any]:
    """mlx-lm's own cache of the prompt, to be used up."""
    return copy.deepcopy(_stock(kind, step))


@remembered
def whole_logits(kind: str, step: int = STEP) -> np.ndarray:
    """The stock model's, with every row."""
    return fed(model_of(kind), stock(kind, step), NEXT, STEPS)


def policy_for(kind: str) -> str:
    """What the server uses by default, else one that needs no queries."""
    return "span" if "span" in report_of(kind).policies else "keydiff"


def config_of(kind: str, store: str = "auto", **more: Any) -> EvictionConfig:
    settings = {"policy": policy_for(kind), "budget": KEEP, "min_tokens": 0, "store": store}
    return EvictionConfig.parse({**settings, **more})


@remembered
def _evicted(kind: str, config: EvictionConfig, length: int) -> SnapKVEvictionResult:
    model = model_of(kind)
    return compact_prompt_cache(model, PROMPT[:length], config=config, prefill_step_size=STEP)


def evicted(kind: str, config: EvictionConfig | None = None, length: int = T) -> list[Any]:
    """The compact cache of the prompt, or of its beginning, to be used up."""
    config = config_of(kind) if config is None else config
    return copy.deepcopy(_evicted(kind, config, length).cache)


def kept_of(cache: Sequence[Any]) -> dict[int, LayerSelection]:
    """Kept positions of the compact leaves that attention reads."""
    return {
        i: LayerSelection(tuple(leaf.head_position_arrays()))
        for i, leaf in enumerate(leaves(cache))
        if is_compact(leaf)
    }


def assert_close(ours: np.ndarray, right: np.ndarray, tolerance: float = TOLERANCE) -> None:
    finite = np.isfinite(right)  # some models forbid tokens
    assert (np.isfinite(ours) == finite).all()
    largest = np.abs(right[finite]).max()
    np.testing.assert_allclose(ours[finite], right[finite], rtol=0, atol=tolerance * largest)


def assert_equals_masked(kind: str, cache: list[Any], step: int = STEP) -> None:
    """A compact cache decodes as the stock model does over everything but hidden rows."""
    model, kept = model_of(kind), kept_of(cache)
    attended = {i: k for i, k in kept.items() if facts_of(model).of(i).chosen}
    ours = fed(model, cache, NEXT, STEPS)
    right = masked_logits(kind, model, stock(kind, step), T, attended, NEXT, STEPS)
    assert_close(ours, right)
    whole = whole_logits(kind, step)
    finite = np.isfinite(whole)
    moved = np.abs(ours[finite] - whole[finite]).max() / np.abs(whole[finite]).max()
    assert moved > 20 * TOLERANCE, "the eviction did not matter"


# -- verdicts -------------------------------------------------------------------------


@EVERY
def test_a_type_is_evicted_or_refused_with_a_reason(kind: str) -> None:
    report = report_of(kind)
    assert (report.verdict == "refused") == bool(report.reason)
    evicted = [layer.evicted for layer in report.layers]
    if report.verdict == "exact":
        assert evicted and all(evicted)
    elif report.verdict == "partly":
        assert any(evicted) and not all(evicted)
        assert all(layer.note for layer in report.layers if not layer.evicted)
    else:
        assert not any(evicted) and "\n" not in report.reason


@EVERY
def test_the_verdict_is_what_happens(kind: str) -> None:
    """Layers that are said to be evicted lose rows, the others none; a refusal is raised."""
    report, model = report_of(kind), model_of(kind)
    if report.verdict == "refused":
        if facts_of(model).failure is None:
            with pytest.raises(UnsupportedModelError, match=report.reason.partition(":")[0]):
                compact_prompt_cache(model, PROMPT, config=config_of(kind))
        return
    found = leaves(evicted(kind))
    assert [is_compact(leaf) for leaf in found] == [layer.evicted for layer in report.layers]
    for leaf, other in zip(found, leaves(stock(kind)), strict=True):
        assert getattr(leaf, "offset", None) == getattr(other, "offset", None)
        if is_compact(leaf):
            assert leaf.size() == KEEP
            assert_rows_of(leaf, other)


def assert_rows_of(leaf: Any, whole: Any) -> None:
    """A compact cache's rows are the stock cache's, bit by bit."""
    for group in row_groups(leaf):
        for side, exact in ((group.keys, whole.keys), (group.values, whole.values)):
            for row, head in enumerate(group.heads.tolist()):
                positions = group.positions[row % len(group.positions)]
                np.testing.assert_array_equal(
                    np.asarray(side[row]), np.asarray(exact[0, head])[positions]
                )


# -- the oracles ----------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("store", ["auto", "shared"])
def test_evicting_nothing_is_the_identity(kind: str, store: str) -> None:
    model, cache = evicting(kind), stock(kind)
    chosen = [i for i in range(len(leaves(cache))) if facts_of(model).of(i).chosen]
    every = LayerSelection((np.arange(T),))
    whole = kvkeep.evict_selection(cache, Selection(T, dict.fromkeys(chosen, every)), store).cache
    np.testing.assert_array_equal(fed(model, whole, NEXT, STEPS), whole_logits(kind))


def store_cases() -> list[Any]:
    """Every store of the types that are peculiar; of the others "auto" and one more in turn.

    The rest is left to the slow tests.
    """
    stores, cases = ("shared", "ragged", "union"), []
    for at, kind in enumerate(KINDS):
        for place, store in enumerate(("auto", *stores)):
            core = kind in PECULIAR or place in (0, 1 + at % len(stores))
            marks = () if core else pytest.mark.slow
            cases.append(pytest.param(kind, store, marks=marks, id=f"{kind}-{store}"))
    return cases


@pytest.mark.parametrize(("kind", "store"), store_cases())
def test_evicting_equals_the_masked_full_cache(kind: str, store: str) -> None:
    model, report = evicting(kind), report_of(kind)
    if store not in ("auto", *report.stores):
        with pytest.raises(ConfigError, match="reads a layer's rows as one array"):
            compact_prompt_cache(model, PROMPT, config=config_of(kind, store))
        return
    cache = evicted(kind, config_of(kind, store))
    result = _evicted(kind, config_of(kind, store), T)
    assert (result.evicted, result.true_offset) == (True, T)
    assert_equals_masked(kind, cache)


@EVERY
def test_scores_are_of_the_models_own_attention(kind: str) -> None:
    """Window queries, their scale, sinks, sharers, absorbed and reordered heads."""
    model = evicting(kind)
    if "snapkv" not in report_of(kind).policies:
        pytest.skip("its queries cannot be seen")
    facts, window, cache = facts_of(model), 6, make_prompt_cache(model)
    step = 2048 if kind in BY_CHUNK else 40
    layers = [i for i, leaf in enumerate(facts.leaves) if leaf.chosen]
    seen = observed_prefill(model, PROMPT, cache, layers, window=window, policy="snapkv", step=step)
    right = attention_mass(model, PROMPT, layers, window)
    found = leaves(cache)
    for index in layers:
        (group,) = row_groups(found[index])
        view = layer_view(group, index, seen, n_layers=len(layers))
        mass = np.asarray(window_mass(view))
        mass = mass.reshape(len(group.heads), -1, T).sum(axis=1)
        np.testing.assert_allclose(mass, right[index], atol=2e-5 * right[index].max(), rtol=1e-3)


@EVERY
def test_appending_trimming_saving(kind: str, tmp_path: Path) -> None:
    model = evicting(kind)
    cache = evicted(kind)
    if can_trim_prompt_cache(cache):
        fed(model, cache, tokens_of(6, 3), (1, 5))
        trim_prompt_cache(cache, 6)
    path = tmp_path / "cache.safetensors"
    kvkeep.save_prompt_cache(path, cache)
    loaded = kvkeep.load_prompt_cache(path)
    assert [type(leaf) for leaf in leaves(loaded)] == [type(leaf) for leaf in leaves(cache)]
    assert_equals_masked(kind, loaded)


@EVERY
def test_trimming_into_the_prompt(kind: str) -> None:
    """Below the compaction point rows go by position, and offsets stay true."""
    model = evicting(kind)
    exact = stock(kind)
    if can_trim_prompt_cache(exact):
        trim_prompt_cache(exact, 9)
    if any(getattr(leaf, "offset", 0) != T - 9 for leaf in leaves(exact)):
        pytest.skip("its other layers cannot be trimmed that far")
    cache = evicted(kind)
    trim_prompt_cache(cache, 9)
    left = kept_of(cache)
    attended = {i: k for i, k in left.items() if facts_of(model).of(i).chosen}
    assert all((head < T - 9).all() for kept in left.values() for head in kept.heads)
    ours = fed(model, cache, NEXT, STEPS)
    assert_close(ours, masked_logits(kind, model, exact, T - 9, attended, NEXT, STEPS))


@EVERY
def test_a_batch_of_unequal_lengths(kind: str) -> None:
    """Two evicted requests of other lengths decode in a batch as each does alone."""
    model = evicting(kind)
    if batch_fault(model) is not None:
        pytest.skip("refused in a batch (see the test of unobserved prefills)")
    lengths, configs = (T, 29), (config_of(kind), config_of(kind, budget=KEEP + 4))

    def both() -> list[list[Any]]:
        return [evicted(kind, c, n) for c, n in zip(configs, lengths, strict=True)]

    tokens, single = [[5, 9, 11], [8, 3, 2]], both()
    alone = [fed(model, c, t, (1, 1, 1)) for c, t in zip(single, tokens, strict=True)]
    try:
        batch = merged(both())
        assert_steps_close(model, batch, tokens, alone)
    except Exception:
        exact = [stock(kind), prefilled(model, PROMPT[:29], STEP)]
        if (fault := stock_batch_fault(model, exact, tokens)) is None:
            raise
        pytest.skip(f"mlx-lm's own batch of this type is at fault: {fault}")
    for row, cache in enumerate(single):
        mine = [layer.extract(row) for layer in batch]
        for leaf, other in zip(leaves(mine), leaves(cache), strict=True):
            if is_compact(other):
                assert leaf.head_positions == other.head_positions
        assert_close(fed(model, mine, [4], (1,)), fed(model, cache, [4], (1,)), 1e-4)


def assert_steps_close(
    model: Any, batch: list[Any], tokens: list[list[int]], alone: list[np.ndarray]
) -> None:
    for step in range(len(tokens[0])):
        out = model(mx.array([[t[step]] for t in tokens]), cache=batch)
        for row, right in zip(np.asarray(out[:, -1]), alone, strict=True):
            assert_close(row, right[step], 1e-4)


def merged(caches: list[list[Any]]) -> list[Any]:
    return [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]


def stock_batch_fault(model: Any, exact: list[list[Any]], tokens: list[list[int]]) -> str | None:
    """Whether the stock model decodes these requests in a batch as alone."""
    try:
        batch = merged(exact)
        outs = [
            np.asarray(model(mx.array([[t[i]] for t in tokens]), cache=batch)[:, -1])
            for i in range(2)
        ]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for row, cache in enumerate(exact):
        right = fed(model, cache, tokens[row][:2], (1, 1))
        finite = np.isfinite(right[1])
        if np.abs(outs[1][row][finite] - right[1][finite]).max() > 1e-3:
            return "other logits"
    return None


@EVERY
def test_a_prefill_that_nobody_observed(kind: str) -> None:
    """As the server does it: filled by mlx-lm, the window replayed."""
    model = evicting(kind)
    for policy in (policy_for(kind), "keydiff"):
        cache = stock(kind)
        config = config_of(kind, policy=policy)
        if batch_fault(model) is not None:
            with pytest.raises(UnsupportedModelError, match="in a batch"):
                compact_prefilled(model, PROMPT, cache, config)
            continue
        if POLICIES[policy].needs & SEES and not can_trim_prompt_cache(cache):
            with pytest.raises(KvkeepError, match=r"trimmed.*needs no queries"):
                compact_prefilled(model, PROMPT, cache, config)
            continue
        result = compact_prefilled(model, PROMPT, cache, config)
        assert result.evicted
        for mine, other in zip(leaves(result.cache), leaves(evicted(kind, config)), strict=True):
            assert type(mine) is type(other)
            if is_compact(mine):
                assert mine.head_positions == other.head_positions
            assert not is_exact(mine) or mine.offset == T


# -- every combination ----------------------------------------------------------------


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_policy_and_store(kind: str, policy: str) -> None:
    model, report = evicting(kind), report_of(kind)
    for store in ("auto", "shared", "per-head", "ragged", "union"):
        config = config_of(kind, store, policy=policy)
        if policy not in report.policies or store not in ("auto", "per-head", *report.stores):
            with pytest.raises(KvkeepError):
                compact_prompt_cache(model, PROMPT, config=config)
            continue
        result = compact_prompt_cache(model, PROMPT, config=config, prefill_step_size=STEP)
        assert_equals_masked(kind, result.cache)
