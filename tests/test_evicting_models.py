"""Evicting a cache list by hand: with its model, layers that must keep their rows do."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from kvkeep import (
    LayerSelection,
    Selection,
    evict_prompt_cache,
    evict_prompt_cache_by_head,
    evict_selection,
)
from kvkeep.attention import ModelFacts, facts_of
from kvkeep.caches import is_compact, is_exact
from kvkeep.errors import SelectionError, UnsupportedModelError
from zoo import model_of, tokens_of
from zoo_oracle import fed, leaves, masked_logits, prefilled

T, KEPT = 30, [0, 1, 4, 7, 8, 13, 20, 21, 26, 28, 29]
PROMPT, NEXT = tokens_of(T), tokens_of(5, 3)
#: Types with layers that count rows for positions, and their fixed leaves' number.
WITH_FIXED = ("afm7", "phi3small")


@cache
def _exact(kind: str) -> list[Any]:
    return prefilled(model_of(kind), PROMPT, T)


def exact(kind: str) -> list[Any]:
    return copy.deepcopy(_exact(kind))


def assert_masked(kind: str, done: list[Any]) -> None:
    kept = {
        i: LayerSelection(tuple(leaf.head_position_arrays()))
        for i, leaf in enumerate(leaves(done))
        if is_compact(leaf)
    }
    assert kept
    right = masked_logits(kind, model_of(kind), exact(kind), T, kept, NEXT, (1, 4))
    ours = fed(model_of(kind), done, NEXT, (1, 4))
    finite = np.isfinite(right)  # some models forbid tokens
    assert (np.isfinite(ours) == finite).all()
    largest = np.abs(right[finite]).max()
    np.testing.assert_allclose(ours[finite], right[finite], rtol=0, atol=2e-5 * largest)


@pytest.mark.parametrize("kind", [*WITH_FIXED, "baichuan_m1", "llama"])
def test_layers_that_must_keep_their_rows_do(kind: str) -> None:
    model, before = model_of(kind), exact(kind)
    done = evict_prompt_cache(before, KEPT, true_offset=T, model=model).cache
    stay = [leaf for leaf in leaves(done) if is_exact(leaf)]
    assert bool(stay) == (kind in WITH_FIXED)
    assert all(leaf.size() == T for leaf in stay)
    assert_masked(kind, done)


@pytest.mark.parametrize("kind", WITH_FIXED)
def test_a_selection_for_such_a_layer_is_refused(kind: str) -> None:
    model, before = model_of(kind), exact(kind)
    filled = [i for i, leaf in enumerate(leaves(before)) if is_exact(leaf)]
    kept = LayerSelection((np.array(KEPT),))
    with pytest.raises(SelectionError, match="must keep its rows"):
        evict_selection(before, Selection(T, dict.fromkeys(filled, kept)), model=model)


def test_a_model_that_cannot_do_without_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, known = model_of("afm7"), facts_of(model_of("afm7"))
    fixed = [replace(leaf, fixed="counts rows everywhere") for leaf in known.leaves]
    monkeypatch.setattr("kvkeep.evictable.facts_of", lambda _: ModelFacts(tuple(fixed)))
    with pytest.raises(UnsupportedModelError, match="'afm7' counts rows everywhere"):
        evict_prompt_cache(exact("afm7"), KEPT, true_offset=T, model=model)


@pytest.mark.parametrize("kind", ["baichuan_m1", "afm7"])
def test_heads_of_nested_layers_keep_rows_of_their_own(kind: str) -> None:
    model, before = model_of(kind), exact(kind)
    layer = next(leaf for leaf in leaves(before) if is_exact(leaf))
    heads = [KEPT[: len(KEPT) - head] for head in range(layer.keys.shape[1])]
    done = evict_prompt_cache_by_head(before, heads, true_offset=T, model=model)
    assert done.layer_union_tokens and set(done.layer_union_tokens.values()) == {len(KEPT)}
    assert_masked(kind, done.cache)
