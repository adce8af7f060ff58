"""Speculative decoding over compact caches gives the greedy tokens of plain decoding."""

from __future__ import annotations

from typing import Any

import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvkeep
from kvkeep import (
    LayerSelection,
    PositionPreservingKVCache,
    PositionPreservingQuantizedKVCache,
    Selection,
)
from oracles import greedy, logits_of, prefilled
from tiny_models import nudged, random_tokens, tiny_llama, tiny_tokenizer

MODEL = tiny_llama(head_dim=32)
TOKENIZER = tiny_tokenizer()
PROMPT = random_tokens(80)
LENGTH = len(PROMPT) - 1
NEW_TOKENS = 40

DRAFTS = {
    "always right": MODEL,
    "often right": nudged(tiny_llama(head_dim=32), 0.05),
    "a stranger": tiny_llama(layers=1, heads=2, kv_heads=1, seed=9),
}


def evicted(kind: str) -> list[Any]:
    """The prompt's cache with 30 of 79 rows kept in each layer."""
    random = np.random.default_rng(0)

    def draw(rows: int) -> np.ndarray:
        return np.sort(random.choice(LENGTH, rows, replace=False))

    counts = {"shared": (30,), "ragged": (41, 19), "union": (25, 35)}.get(kind, (30, 30))
    layers = {i: LayerSelection(tuple(draw(rows) for rows in counts)) for i in range(2)}
    store = kind if kind in ("ragged", "union") else "auto"
    exact = prefilled(MODEL, PROMPT[:-1])
    cache = kvkeep.evict_selection(exact, Selection(LENGTH, layers), store).cache
    if kind == "unequal heads":
        for layer in cache:
            layer.trim(30)
        assert any(layer.owns_attention for layer in cache)
    if kind == "quantised":
        cache = [layer.to_quantized(group_size=32, bits=8) for layer in cache]
    return cache


KINDS = pytest.mark.parametrize(
    "kind", ["shared", "per-head", "ragged", "union", "unequal heads", "quantised"]
)


def speculated(
    cache: list[Any], draft: Any, count: int = NEW_TOKENS, **options: Any
) -> list[tuple[int, bool]]:
    """mlx-lm's own speculative loop: (token, whether the draft model made it)."""
    draft_cache = prefilled(draft, PROMPT[: cache[0].offset])
    responses = mlx_lm.stream_generate(
        MODEL,
        TOKENIZER,
        PROMPT[-1:],
        draft_model=draft,
        prompt_cache=cache + draft_cache,
        max_tokens=count,
        **options,
    )
    return [(r.token, r.from_draft) for r in responses]


@KINDS
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5])
def test_the_same_greedy_tokens(kind: str, draft: str, num_draft_tokens: int) -> None:
    cache = evicted(kind)
    made = speculated(cache, DRAFTS[draft], num_draft_tokens=num_draft_tokens)
    plain, _ = greedy(MODEL, evicted(kind), PROMPT[-1], NEW_TOKENS)
    assert [token for token, _ in made] == plain
    accepted = sum(from_draft for _, from_draft in made)
    assert (accepted < NEW_TOKENS / 2) if draft == "a stranger" else (accepted > 4)


def test_drafts_are_also_rejected() -> None:
    """Else no test above would roll anything back."""
    made = speculated(evicted("per-head"), DRAFTS["often right"], num_draft_tokens=5)
    accepted = sum(from_draft for _, from_draft in made)
    assert 0 < accepted < NEW_TOKENS * 5 / 6 - 2


@KINDS
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_cache_is_left_as_plain_decoding_leaves_it(kind: str, draft: str) -> None:
    cache, fresh = evicted(kind), evicted(kind)
    start, rows = cache[0].offset, [layer.size() for layer in cache]
    made = [token for token, _ in speculated(cache, DRAFTS[draft], num_draft_tokens=3)]
    fed = cache[0].offset - start
    for layer, before in zip(cache, rows, strict=True):
        assert (layer.offset, layer.size()) == (start + fed, before + fed)
        assert layer.head_positions[0][-fed:] == tuple(range(start, start + fed))
    assert_goes_on_like(cache, fresh, [PROMPT[-1], *made])


def assert_goes_on_like(cache: list[Any], fresh: list[Any], sequence: list[int]) -> None:
    """`cache` holds a beginning of `sequence` and nothing else; `fresh` none of it yet."""
    fed = cache[0].offset - fresh[0].offset
    assert 0 < fed <= len(sequence)
    after = sequence[fed:] or [5]
    expected = logits_of(MODEL, fresh, [*sequence[:fed], *after])[-1]
    np.testing.assert_allclose(logits_of(MODEL, cache, after)[-1], expected, atol=1e-4)


@pytest.mark.parametrize("taken", [1, 2, 4, 7])
def test_a_run_that_is_broken_off_leaves_a_usable_cache(taken: int) -> None:
    """The client went away in the middle of an accepted draft."""
    cache, fresh = evicted("per-head"), evicted("per-head")
    draft = DRAFTS["always right"]
    run = mlx_lm.stream_generate(
        MODEL,
        TOKENIZER,
        PROMPT[-1:],
        draft_model=draft,
        prompt_cache=cache + prefilled(draft, PROMPT[:-1]),
        max_tokens=NEW_TOKENS,
        num_draft_tokens=5,
    )
    made = [next(run).token for _ in range(taken)]
    run.close()
    assert {layer.offset for layer in cache} == {cache[0].offset}
    assert_goes_on_like(cache, fresh, [PROMPT[-1], *made])


def config(store: str = "per-head") -> kvkeep.EvictionConfig:
    return kvkeep.EvictionConfig(
        policy="snapkv" if store == "per-head" else "snapkv-d",
        budget=kvkeep.Budget.parse(30),
        window=8,
        min_tokens=0,
        store=store,
    )


@pytest.mark.parametrize("store", ["per-head", "shared"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_kvkeep_stream_generate_with_a_draft_model(store: str, draft: str) -> None:
    def run(**options: Any) -> list[int]:
        return [
            response.token
            for response in kvkeep.stream_generate(
                MODEL, TOKENIZER, PROMPT, config=config(store), max_tokens=NEW_TOKENS, **options
            )
        ]

    plain = run()
    assert run(draft_model=DRAFTS[draft], num_draft_tokens=3) == plain
    exact = [
        r.token for r in mlx_lm.stream_generate(MODEL, TOKENIZER, PROMPT, max_tokens=NEW_TOKENS)
    ]
    assert plain != exact, "the eviction did not matter"


def test_the_callers_cache_is_compact_afterwards() -> None:
    cache = make_prompt_cache(MODEL)
    made = [
        response.token
        for response in kvkeep.stream_generate(
            MODEL,
            TOKENIZER,
            PROMPT,
            config=config(),
            max_tokens=6,
            draft_model=DRAFTS["often right"],
            prompt_cache=cache,
        )
    ]
    assert all(type(layer) is PositionPreservingKVCache for layer in cache)
    assert LENGTH < cache[0].offset <= LENGTH + len(made)
    assert cache[0].size() == 30 + cache[0].offset - LENGTH


def test_quantised_while_speculating() -> None:
    """`kv_bits` replaces the caches in the middle of a run."""
    cache = evicted("per-head")
    made = speculated(
        cache, DRAFTS["often right"], 12, kv_bits=8, kv_group_size=32, quantized_kv_start=85
    )
    assert len(made) == 12
    plain, _ = greedy(MODEL, evicted("per-head"), PROMPT[-1], 3)
    assert [token for token, _ in made[:3]] == plain


def test_a_draft_cache_that_was_quantised_too() -> None:
    cache, draft = evicted("quantised"), DRAFTS["often right"]
    assert all(type(layer) is PositionPreservingQuantizedKVCache for layer in cache)
    draft_cache = [c.to_quantized(group_size=32, bits=8) for c in prefilled(draft, PROMPT[:-1])]
    responses = mlx_lm.stream_generate(
        MODEL,
        TOKENIZER,
        PROMPT[-1:],
        draft_model=draft,
        prompt_cache=cache + draft_cache,
        max_tokens=NEW_TOKENS,
        num_draft_tokens=3,
    )
    made = [r.token for r in responses]
    assert made == greedy(MODEL, evicted("quantised"), PROMPT[-1], NEW_TOKENS)[0]


def test_start_speculation_brackets_a_verification() -> None:
    """What a caller of his own loop does: draft, verify, roll back, accept."""
    cache, fresh = evicted("per-head"), evicted("per-head")
    for layer in cache:
        layer.start_speculation()
    logits_of(MODEL, cache, [PROMPT[-1], 3, 4, 5])
    for layer in cache:
        layer.trim(3)
        layer.stop_speculation()
    ours = logits_of(MODEL, cache, [9])[-1]
    np.testing.assert_allclose(ours, logits_of(MODEL, fresh, [PROMPT[-1], 9])[-1], atol=1e-4)
