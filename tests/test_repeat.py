"""Reading a prompt again: what is fed, what is seen, and that the cache is as before."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from bare_models import attention_inputs, cache_bytes
from kvkeep import (
    Conversation,
    EvictionConfig,
    compact_prompt_cache,
    compare,
    generate,
    get_policy,
    stream_generate,
)
from kvkeep.attention import Observation, RepeatPrompt, facts_of, observed_prefill, repeated
from kvkeep.caches import row_groups
from kvkeep.compaction import prefill_and_compact
from kvkeep.errors import CacheError, ConfigError
from kvkeep.views import layer_view
from oracles import causal_weights, logits_of, prefilled
from tiny_models import random_tokens, tiny_llama, tiny_tokenizer

TOKENS = random_tokens(90)
PROMPT = RepeatPrompt((3, 1, 4), (1, 5))
CONFIG = EvictionConfig(policy="kvzip", budget=30, min_tokens=0)


def read_twice(
    model: Any, cache: list[Any], size: int = 40, step: int = 2048, layers: Any = (0, 1)
) -> Observation:
    policy = get_policy("kvzip", chunk_size=size)
    seen = observed_prefill(
        model, TOKENS, cache, list(layers), window=0, policy="kvzip", scorer=policy
    )
    return repeated(model, TOKENS, cache, list(layers), policy, seen, PROMPT, step)


def scored(cache: list[Any], seen: Observation, layer: int) -> np.ndarray:
    (group,) = row_groups(cache[layer])
    return np.asarray(get_policy("kvzip").score(layer_view(group, layer, seen, n_layers=2)))


@pytest.mark.parametrize("step", [1, 7, 64, 2048])
@pytest.mark.parametrize("size", [25, 40, 90, 2048])
def test_scores_are_the_definition(size: int, step: int) -> None:
    model = tiny_llama()
    cache = make_prompt_cache(model)
    seen = read_twice(model, cache, size, step)
    right = np.zeros((2, 2, 90))
    for start in range(0, 90, size):
        stop = min(start + size, 90)
        ids = [3, 1, 4] if start == 0 else [1, 5, *TOKENS[start - 8 : start]]
        ids += TOKENS[start:stop]
        for layer, (queries, keys) in enumerate(attention_inputs(model, TOKENS + ids)):
            sinks = min(4, start)
            chosen = [*range(sinks), *range(start, stop), *range(90, 90 + len(ids))]
            weights = causal_weights(queries[:, 90:], keys[:, chosen])[..., sinks:][
                ..., : stop - start
            ]
            right[layer, :, start:stop] = weights.reshape(2, -1, stop - start).max(axis=1)
    for layer in range(2):
        scores = scored(cache, seen, layer)
        np.testing.assert_allclose(scores[:, 4:], right[layer, :, 4:], rtol=5e-4, atol=1e-6)
        np.testing.assert_allclose(scores[:, :4], right[layer].max() + 1, rtol=1e-5)


@pytest.mark.parametrize("step", [7, 2048])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_the_cache_is_bit_equal_before_and_after(kind: str, step: int) -> None:
    sliding = [0] if kind == "sliding" else []
    model = tiny_llama(sliding_layers=sliding, sliding_window=16)
    cache, twin = make_prompt_cache(model), prefilled(model, TOKENS)
    objects = list(cache)
    read_twice(model, cache, 40, step, layers=[1] if sliding else [0, 1])
    assert all(a is b for a, b in zip(cache, objects, strict=True))
    assert [repr(layer) for layer in cache_bytes(cache)] == [repr(c) for c in cache_bytes(twin)]
    np.testing.assert_array_equal(logits_of(model, cache, [1, 2]), logits_of(model, twin, [1, 2]))
    assert not any("_kvkeep_observer" in vars(layer) for layer in cache)


def test_a_failing_model_leaves_the_cache_as_it_was() -> None:
    model, calls = tiny_llama(), []

    def failing(tokens: mx.array, cache: list[Any]) -> mx.array:
        calls.append(tokens.shape[1])
        out = model(tokens, cache=cache)
        if len(calls) == 3:
            raise RuntimeError("no memory")
        return out

    failing.layers = model.layers  # type: ignore[attr-defined]
    assert "no memory" in str(facts_of(failing).failure)  # it fails when it is looked at, too
    calls.clear()
    cache = make_prompt_cache(model)
    with pytest.raises(RuntimeError, match="no memory"):
        prefill_and_compact(failing, TOKENS, cache, CONFIG, step=60)
    assert calls == [60, 30, 60]
    assert [layer.offset for layer in cache] == [0, 0]


@pytest.mark.parametrize("held", ["exact", "compact"])
def test_a_cache_that_holds_something_is_refused(held: str) -> None:
    model = tiny_llama()
    cache = prefilled(model, TOKENS)
    if held == "compact":
        cache = compact_prompt_cache(model, TOKENS, config=CONFIG).cache
    before = [repr(layer) for layer in cache_bytes(cache)]
    with pytest.raises(CacheError, match=r"'kvzip' reads the whole prompt again.*position 90"):
        prefill_and_compact(model, random_tokens(60), cache, CONFIG)
    assert [repr(layer) for layer in cache_bytes(cache)] == before
    # What is kept whole needs no second reading.
    whole = EvictionConfig(policy="kvzip", budget=500)
    assert not prefill_and_compact(model, [1, 2], prefilled(model, TOKENS), whole).evicted


def test_instructions_change_the_scores_and_the_first_fits_all() -> None:
    assert RepeatPrompt().before(TOKENS, 40) == []
    assert RepeatPrompt((9,)).before(TOKENS, 40) == [9]
    assert PROMPT.before(TOKENS, 5) == [1, 5, *TOKENS[:5]]
    model, kept = tiny_llama(), []
    for prompt in (None, PROMPT):
        cache = make_prompt_cache(model)
        done = prefill_and_compact(model, TOKENS, cache, CONFIG, repeat_prompt=prompt)
        kept.append([layer.head_positions for layer in done.cache])
    assert kept[0] != kept[1]


def test_generation_passes_the_tokenizers_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, fed = tiny_llama(), tiny_tokenizer(), []
    config = EvictionConfig(policy="kvzip", budget=30, min_tokens=0, chunk_size=50)

    class Spy:
        layers = model.layers
        args = model.args
        make_cache = model.make_cache

        def __call__(self, tokens: mx.array, **rest: Any) -> mx.array:
            fed.append(np.asarray(tokens[0]).tolist())
            return model(tokens, **rest)

    spy = Spy()
    facts_of(spy)
    fed.clear()
    for response in stream_generate(spy, tokenizer, TOKENS, config=config, max_tokens=2):
        assert response.kv is not None and response.kv.evicted
    first = tokenizer.encode("\n\nRepeat the previous context exactly.")
    later = tokenizer.encode("\n\nRepeat the part of the previous context exactly, starting with ")
    assert fed[0] == TOKENS[:-1]
    assert fed[1] == [*first, *TOKENS[:50]]
    assert fed[2] == [*later, *TOKENS[42:50], *TOKENS[50:89]]
    assert fed[3] == TOKENS[-1:]
    assert len(generate(model, tokenizer, TOKENS, config=config, max_tokens=3)) == 3


def test_a_comparison_passes_them_too_and_its_exact_side_is_exact() -> None:
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    both = compare(model, tokenizer, TOKENS, config=CONFIG, max_tokens=5)
    assert both.exact.text == generate(model, tokenizer, TOKENS, config=None, max_tokens=5)
    assert both.evicted.text == generate(model, tokenizer, TOKENS, config=CONFIG, max_tokens=5)


def test_a_conversation_refuses_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(type(tokenizer), "has_chat_template", True, raising=False)
    with pytest.raises(ConfigError, match="'kvzip' serves one turn only"):
        Conversation(tiny_llama(), tokenizer, config=CONFIG)
