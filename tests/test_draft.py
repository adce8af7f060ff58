"""Drafting an answer over the prompt's cache: what is seen, and that nothing stays of it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kvkeep import EvictionConfig, compact_prompt_cache, generate
from kvkeep.attention import DraftStart, Observation, drafted, facts_of, observed_prefill
from kvkeep.caches import leaves_of, row_groups
from kvkeep.compaction import compact_prefilled, prefill_and_compact
from kvkeep.errors import CacheError, ConfigError, UnsupportedModelError
from kvkeep.evaluation import evicted, read
from kvkeep.policies import get_policy
from kvkeep.views import layer_view
from oracles import greedy, prefilled
from policy_views import view_of
from tiny_models import random_tokens, tiny_llama, tiny_tokenizer
from zoo import model_of

TOKENS, K = random_tokens(90, seed=3), 6
POLICY = get_policy("lookahead", draft_tokens=K)
CONFIG = EvictionConfig(
    policy="lookahead", budget=20, min_tokens=0, draft_tokens=K, recent_tokens=4
)


def seen_of(model: Any, cache: list[Any], start: DraftStart, tokens: Any = TOKENS) -> Observation:
    layers = list(range(len(leaves_of(cache))))
    plain = [i for i in layers if facts_of(model).of(i).chosen]
    seen = observed_prefill(
        model, tokens, cache, plain, window=8, policy="lookahead", scorer=POLICY
    )
    return drafted(model, tokens, cache, plain, POLICY, seen, start)


def answer_of(model: Any, token: int, count: int) -> list[int]:
    """`token` and what a stock cache goes on with, `count` in all."""
    return [token, *greedy(model, prefilled(model, TOKENS), token, count)[0]][:count]


@pytest.mark.parametrize("token", [7, None])
def test_a_draft_is_what_the_model_would_say(token: int | None) -> None:
    """Its queries and keys are those of a prompt that has the answer in it."""
    model = tiny_llama()
    cache = make_prompt_cache(model)
    seen = seen_of(model, cache, DraftStart(token))
    first = token
    if first is None:
        logits = model(mx.array([TOKENS]), cache=make_prompt_cache(model))
        first = int(np.asarray(mx.argmax(logits[0, -1])))
    whole = [*TOKENS, *answer_of(model, first, K)]
    right = make_prompt_cache(model)
    other = observed_prefill(model, whole, right, [0, 1], window=K, policy="lookahead")
    for layer in (0, 1):
        (group,) = row_groups(right[layer])
        draft = seen.drafts[layer].of(group)
        queries = other.observers[layer].queries
        assert queries is not None
        np.testing.assert_allclose(draft.queries, queries[0], rtol=0, atol=3e-5)
        np.testing.assert_allclose(draft.keys, group.keys[:, -K:], rtol=0, atol=3e-5)


@pytest.mark.parametrize("token", [7, None])
def test_nothing_stays_of_it(token: int | None) -> None:
    model = tiny_llama()
    cache, plain = make_prompt_cache(model), prefilled(model, TOKENS)
    seen_of(model, cache, DraftStart(token))
    for layer, right in zip(cache, plain, strict=True):
        assert layer.offset == 90
        for ours, theirs in zip(layer.keys_and_values(), right.keys_and_values(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert greedy(model, cache, 5, 9)[0] == greedy(model, plain, 5, 9)[0]


def test_a_draft_ends_where_the_answer_does() -> None:
    model = tiny_llama()
    said = answer_of(model, 7, K)
    ends = next(i for i in range(2, K) if said[i] not in said[:i])
    cache = make_prompt_cache(model)
    seen = seen_of(model, cache, DraftStart(7, frozenset({said[ends]})))
    assert seen.drafts[0].queries.shape[2] == ends
    stopped = seen_of(model, make_prompt_cache(model), DraftStart(7, frozenset({7})))
    assert stopped.drafts[0].queries.shape[2] == K  # the prompt's own last token ends nothing


@pytest.mark.parametrize("kind", ["falcon_h1", "gemma3_text", "deepseek_v3", "gemma3n", "gpt_oss"])
def test_models_of_other_kinds(kind: str) -> None:
    """Windows and states are put back; latent rows and shared ones are seen as such."""
    model = model_of(kind)
    cache, plain = make_prompt_cache(model), prefilled(model, TOKENS)
    seen = seen_of(model, cache, DraftStart(7))
    assert seen.drafts
    for index in seen.drafts:
        for group in row_groups(leaves_of(cache)[index]):
            view = layer_view(group, index, seen, n_layers=len(seen.drafts))
            assert view.draft is not None and view.queries is not None
            assert view.draft.keys.shape == (len(view.keys), K, view.keys.shape[2])
            assert view.draft.queries.shape == (len(view.queries), K, view.keys.shape[2])
            assert np.isfinite(np.asarray(POLICY.score(view))).all()
    assert greedy(model, cache, 5, 9)[0] == greedy(model, plain, 5, 9)[0]


def test_where_it_cannot_step_back_it_says_so() -> None:
    """States cannot be trimmed: the next token must be known."""
    model = model_of("falcon_h1")
    cache = make_prompt_cache(model)
    with pytest.raises(CacheError, match=r"cannot draft .* Say which token follows"):
        compact_prompt_cache(model, TOKENS, config=CONFIG)
    done = prefill_and_compact(model, TOKENS, cache, CONFIG, draft_start=DraftStart(7))
    assert done.evicted and done.retained_tokens == 20


def test_a_model_whose_queries_are_not_seen_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'lookahead' cannot see its queries"):
        compact_prompt_cache(model_of("gemma2"), TOKENS, config=CONFIG)


def test_what_fails_leaves_the_cache_as_it_was() -> None:
    model = tiny_llama()
    cache = prefilled(model, TOKENS)

    class Failing:
        armed = False

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            if self.armed and tokens.shape[1] == 1:
                raise RuntimeError("no memory")
            return model(tokens, cache=cache)

    before = [np.array(layer.keys_and_values()[0]) for layer in cache]
    failing = Failing()
    assert facts_of(failing).failure is None  # looked at once, before
    failing.armed = True
    with pytest.raises(RuntimeError, match="no memory"):
        prefill_and_compact(failing, [1, 2, 3], cache, CONFIG, draft_start=DraftStart(7))
    for layer, rows in zip(cache, before, strict=True):
        assert layer.offset == 90
        np.testing.assert_array_equal(layer.keys_and_values()[0], rows)


@pytest.mark.parametrize(("chunk", "length"), [(1, 70), (3, 300), (8, 300), (100, 12)])
@pytest.mark.parametrize("sinks", [False, True])
def test_it_scores_as_span_does_with_the_draft_in_its_window(
    chunk: int, length: int, sinks: bool
) -> None:
    view = view_of(POLICY, length)
    view = replace(
        view,
        score_chunk_size=chunk,
        sinks=mx.array([0.5, -1.0, 2.0, 0.0]) if sinks else None,
    )
    draft = view.draft
    assert draft is not None and view.queries is not None
    joined = replace(
        view,
        keys=mx.concatenate([view.keys, draft.keys], axis=1),
        queries=mx.concatenate([view.queries, draft.queries], axis=1),
        draft=None,
    )
    right = np.asarray(get_policy("span").score(joined))[:, :length]
    np.testing.assert_allclose(POLICY.score(view), right, rtol=1e-4, atol=1e-9)


def test_a_draft_moves_what_is_kept_to_what_is_asked_later() -> None:
    """A row that only the answer looks at: span's window does not, lookahead's draft does."""
    span, ahead = get_policy("span", pool_kernel=1), get_policy("lookahead", pool_kernel=1)
    view = view_of(ahead, 300)
    assert view.draft is not None and view.queries is not None
    target = view.keys[:, 40:41] * 0 + 6.0
    keys = mx.concatenate([view.keys[:, :40], target, view.keys[:, 41:]], axis=1)
    asked = type(view.draft)(mx.full(view.draft.queries.shape, 3.0), view.draft.keys)
    view = replace(view, keys=keys, draft=asked, queries=-mx.abs(view.queries))
    for head in range(2):
        ours, theirs = (np.asarray(policy.score(view))[head] for policy in (ahead, span))
        assert ours.argmax() == 40
        assert (theirs > theirs[40]).sum() > 200


def test_a_view_without_a_draft_is_refused() -> None:
    view = view_of(get_policy("span"), 100)
    with pytest.raises(ConfigError, match="no draft"):
        POLICY.score(view)


def test_every_way_to_a_compact_cache_keeps_the_same_rows() -> None:
    """Generation, batch and evaluation draft from the prompt's last token alike."""
    model, tokens = tiny_llama(), TOKENS[:-1]
    start = DraftStart(TOKENS[-1])
    alone = prefill_and_compact(
        model, tokens, make_prompt_cache(model), CONFIG, draft_start=start
    ).cache
    batch = compact_prefilled(
        model, tokens, prefilled(model, tokens), CONFIG, draft_start=start
    ).cache
    asked = evicted(read(model, tokens, [CONFIG], draft=start), CONFIG).cache
    kept = [[list(head) for head in layer.head_positions] for layer in alone]
    for cache in (batch, asked):
        assert [[list(head) for head in layer.head_positions] for layer in cache] == kept
    other = compact_prefilled(
        model, tokens, prefilled(model, tokens), CONFIG, draft_start=DraftStart(5)
    ).cache
    assert [[list(head) for head in layer.head_positions] for layer in other] != kept


def test_generation_drafts_from_the_last_token_and_stops_at_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[DraftStart] = []

    def noting(*args: Any) -> Observation:
        given.append(args[-1])
        return drafted(*args)

    monkeypatch.setattr("kvkeep.attention.reading.drafted", noting)
    tokenizer = tiny_tokenizer()
    text = generate(tiny_llama(), tokenizer, TOKENS, config=CONFIG, max_tokens=3)
    assert isinstance(text, str)
    assert given == [DraftStart(TOKENS[-1], frozenset(tokenizer.eos_token_ids))]


def test_a_compact_cache_drafts_too() -> None:
    """As in a conversation: heads hold different rows, in groups."""
    model = tiny_llama()
    uneven = EvictionConfig(policy="snapkv", allocation="adaptive", budget=30, min_tokens=0)
    cache = compact_prompt_cache(model, TOKENS, config=uneven).cache
    before = copy.deepcopy(cache)
    more = random_tokens(25, seed=5)
    done = prefill_and_compact(model, more, cache, CONFIG, draft_start=DraftStart(7))
    assert done.retained_tokens == 20 and done.true_offset == 115
    seen = drafted(
        model,
        TOKENS,
        before,
        [0, 1],
        POLICY,
        Observation({}, facts=facts_of(model)),
        DraftStart(7),
    )
    for index, layer in enumerate(before):
        assert layer.offset == 90
        for group in row_groups(layer):
            assert seen.drafts[index].of(group).keys.shape[:2] == (len(group.heads), K)
