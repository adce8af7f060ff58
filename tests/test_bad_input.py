"""What bad input gets: a typed error that says what was expected and what came, or the
documented no-op; the caller's cache is unchanged either way."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    KVCache,
    make_prompt_cache,
)

from kvkeep import (
    Budget,
    EvictionConfig,
    LayerSelection,
    Selection,
    compact_prompt_cache,
    evict_prompt_cache,
    evict_selection,
    snapkv_keep_indices,
    stream_generate,
    topk_indices_per_head,
)
from kvkeep.compaction import prefill_and_compact
from kvkeep.errors import (
    BudgetError,
    CacheError,
    PromptError,
    SelectionError,
)
from oracles import greedy, prefilled
from refusals import TOKENS, exact_cache, expect_refused, snapshot
from tiny_models import tiny_llama, tiny_tokenizer


@pytest.mark.parametrize("budget", [0, -1, "0", "0%", 0.0, "-3", 1.5, "lots", None, True])
def test_a_budget_below_one_row_or_unreadable(budget: Any) -> None:
    expect_refused(
        make_prompt_cache(tiny_llama()),
        lambda _: compact_prompt_cache(tiny_llama(), TOKENS, budget=budget),
        BudgetError,
        "expected",
        "got",
    )


@pytest.mark.parametrize("budget", [0, -1, 1.5, "8", None, True])
def test_a_budget_of_the_index_functions(budget: Any) -> None:
    for call in (
        lambda: snapkv_keep_indices(300, budget, [0.0] * 300),
        lambda: topk_indices_per_head(np.zeros((2, 300)), budget),
    ):
        with pytest.raises(BudgetError, match=rf">= 1; got {budget!r}"):
            call()


@pytest.mark.parametrize("budget", [40, 41, 10**9, "100%", "1GB"])
@pytest.mark.parametrize("policy", ["snapkv", "snapkv-d"])
def test_a_budget_above_the_prompt_is_a_no_op(policy: str, budget: Any) -> None:
    config = EvictionConfig(policy=policy, budget=Budget.parse(budget), min_tokens=0)
    result = compact_prompt_cache(tiny_llama(), TOKENS, config=config)
    assert (result.evicted, result.retained_tokens) == (False, 40)
    assert [type(layer) for layer in result.cache] == [KVCache, KVCache]
    assert snapshot(result.cache) == snapshot(exact_cache())


@pytest.mark.parametrize("policy", ["snapkv", "snapkv-d"])
@pytest.mark.parametrize("budget", [9, "24%"])
def test_a_budget_below_what_is_protected(policy: str, budget: Any) -> None:
    config = EvictionConfig.parse(
        {"policy": policy, "budget": budget, "min_tokens": 0, "protect": "5:13,30:32"}
    )
    expect_refused(
        make_prompt_cache(tiny_llama()),
        lambda cache: prefill_and_compact(tiny_llama(), TOKENS, cache, config),
        BudgetError,
        "9 rows cannot hold 10 protected positions",
        "at least 10 rows",
        "Raise the budget or protect fewer",
    )


# -- indices ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("indices", "parts"),
    [
        ([3, 1, 2], ("sorted and unique", "got 3 followed by 1 at index 0")),
        ([0, 5, 5], ("sorted and unique", "got 5 followed by 5 at index 1")),
        ([-1, 4], ("negative position", "positions >= 0", "got -1")),
        ([0, 40], ("out of range", "positions below 40", "got 40")),
        ([0, 10**6], ("out of range", "positions below 40", "got 1000000")),
        ([0.0, 1.0], ("unreadable positions", "whole numbers", "float64")),
        ([[0, 1], [2, 3]], ("unreadable positions", "one-dimensional", "2 dimensions")),
        (["0"], ("unreadable positions", "whole numbers")),
    ],
)
@pytest.mark.parametrize("by_layer", [False, True])
def test_bad_indices(indices: Any, parts: tuple[str, ...], by_layer: bool) -> None:
    def evict(cache: list[Any]) -> Any:
        if by_layer:
            kept = LayerSelection((np.array([0, 1]), indices))
            return evict_selection(cache, Selection(40, {1: kept}))
        return evict_prompt_cache(cache, indices, true_offset=40)

    expect_refused(exact_cache(), evict, SelectionError, *parts, ".")


@pytest.mark.parametrize("layer", [-1, 2, 7])
def test_a_selection_of_a_layer_that_is_not_there(layer: int) -> None:
    chosen = Selection(40, {layer: LayerSelection((np.array([0]),))})
    expect_refused(
        exact_cache(),
        lambda cache: evict_selection(cache, chosen),
        SelectionError,
        f"layer {layer} cannot be evicted",
        "filled KVCache layers",
        f"got {layer}",
    )


@pytest.mark.parametrize("heads", [3, 4])
def test_a_selection_that_does_not_fit_the_heads(heads: int) -> None:
    chosen = Selection(40, {0: LayerSelection((np.arange(5),) * heads)})
    expect_refused(
        exact_cache(),
        lambda cache: evict_selection(cache, chosen),
        CacheError,
        "does not fit the layer",
    )


@pytest.mark.parametrize("store", ["shared", "per-head"])
def test_unequal_heads_in_a_store_of_equal_ones(store: str) -> None:
    chosen = Selection(40, {0: LayerSelection((np.arange(5), np.arange(6)))})
    expect_refused(
        exact_cache(),
        lambda cache: evict_selection(cache, chosen, store),
        CacheError,
        "unequal numbers of rows",
        "ragged",
    )


@pytest.mark.parametrize("offset", [39, 41, 0])
def test_a_wrong_offset(offset: int) -> None:
    expect_refused(
        exact_cache(),
        lambda cache: evict_prompt_cache(cache, [], true_offset=offset),
        CacheError,
        "layer 0",
        f"expected offset {offset}",
        "got offset 40",
    )


# -- scores ----------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("scores", "parts"),
    [
        ([0.5] * 299, ("fewer scores than positions", "at least 300 scores", "got 299")),
        ([], ("fewer scores", "at least 300", "got 0")),
        ([[0.5] * 300], ("wrong shape", "one dimension", "shape (1, 300)")),
        ([0.5] * 299 + [NAN], ("not finite", "1 of 300", "nan", "position 299")),
        ([INF] + [0.5] * 299, ("not finite", "1 of 300", "inf", "position 0")),
        ([-INF] * 300, ("not finite", "300 of 300", "-inf", "position 0")),
        (["a"] * 300, ("unreadable scores", "real numbers")),
    ],
)
def test_bad_scores(scores: Any, parts: tuple[str, ...]) -> None:
    expect_refused([], lambda _: snapkv_keep_indices(300, 16, scores), SelectionError, *parts)


@pytest.mark.parametrize("policy", ["snapkv", "snapkv-d"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_model_whose_scores_are_not_finite(policy: str, bad: float) -> None:
    model = tiny_llama()
    model.layers[1].self_attn.q_proj.weight = model.layers[1].self_attn.q_proj.weight * bad
    config = EvictionConfig(policy=policy, budget=Budget(16), min_tokens=0)
    expect_refused(
        prefilled(tiny_llama(), TOKENS),
        lambda cache: prefill_and_compact(model, TOKENS, cache, config),
        SelectionError,
        "scores are not finite",
        "finite numbers only",
        "got",
    )


# -- prompts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ([], ("empty prompt", "at least one token id", "no tokens")),
        (mx.array([], mx.int32), ("empty prompt", "no tokens")),
        ([[1, 2], [3, 4]], ("unreadable prompt", "flat sequence", "2 dimensions")),
        ([[1, 2], [3]], ("unreadable prompt", "nested")),
        ([1.5, 2.0], ("unreadable prompt", "float64")),
        ([1, -2], ("unreadable prompt", "at least one token id")),
        ("text", ("unreadable prompt", "0 dimensions")),
        (5, ("unreadable prompt", "0 dimensions")),
        (None, ("unreadable prompt", "0 dimensions")),
    ],
)
def test_bad_prompts(prompt: Any, parts: tuple[str, ...]) -> None:
    expect_refused(
        [],
        lambda _: compact_prompt_cache(tiny_llama(), prompt, budget=16),
        PromptError,
        *parts,
    )


@pytest.mark.parametrize("prompt", [[], "", mx.array([], mx.int32)])
def test_an_empty_prompt_to_generate_from(prompt: Any) -> None:
    expect_refused(
        exact_cache(),
        lambda cache: next(
            stream_generate(tiny_llama(), tiny_tokenizer(), prompt, prompt_cache=cache)
        ),
        PromptError,
        "empty prompt",
    )


@pytest.mark.parametrize("policy", ["snapkv", "snapkv-d"])
@pytest.mark.parametrize("min_tokens", [0, 128])
@pytest.mark.parametrize(("length", "budget"), [(1, 1), (2, 1), (2, 2), (5, 3), (8, 4), (9, 1)])
def test_prompts_of_a_few_tokens_shorter_than_the_window(
    length: int, budget: int, min_tokens: int, policy: str
) -> None:
    config = EvictionConfig(policy=policy, budget=Budget(budget), min_tokens=min_tokens, window=12)
    model = tiny_llama()
    result = compact_prompt_cache(model, TOKENS[:length], config=config)
    evicts = budget < length and not min_tokens
    assert (result.evicted, result.true_offset) == (evicts, length)
    assert result.retained_tokens == (budget if evicts else length)
    assert np.isfinite(greedy(model, result.cache, 5, 3)[1]).all()
    assert [layer.offset for layer in result.cache] == [length + 3] * 2
