"""One prefill, two answers: each is what its cache alone would have answered."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

import kvkeep
from kvkeep.caches import allocated_nbytes
from kvkeep.compaction import cache_nbytes
from kvkeep.comparing import Comparison, compare
from kvkeep.errors import CacheError, ConfigError, PromptError
from tiny_models import random_tokens, tiny_llama, tiny_tokenizer

CONFIG = kvkeep.EvictionConfig(policy="snapkv", budget=kvkeep.Budget(40), min_tokens=0)
PROMPT = random_tokens(200)


def alone(model: Any, config: Any, seed: int, **options: Any) -> tuple[str, list[int]]:
    """Text and tokens of one run of its own."""
    mx.random.seed(seed)
    text, tokens = "", []
    for response in kvkeep.stream_generate(
        model, tiny_tokenizer(), PROMPT, config=config, **options
    ):
        text += response.text
        tokens.append(response.token)
    return text, tokens


def both(comparison: Comparison) -> list[tuple[str, list[int]]]:
    return [(a.text, list(a.tokens)) for a in (comparison.exact, comparison.evicted)]


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_each_answer_is_that_of_a_run_of_its_own(temp: float) -> None:
    model = tiny_llama()
    sampler = make_sampler(temp)
    comparison = compare(
        model,
        tiny_tokenizer(),
        PROMPT,
        config=CONFIG,
        seed=5,
        max_tokens=16,
        sampler=sampler,
        prefill_step_size=64,
    )
    options: dict[str, Any] = {"max_tokens": 16, "sampler": sampler, "prefill_step_size": 64}
    exact, evicted = (alone(model, config, 5, **options) for config in (None, CONFIG))
    assert both(comparison) == [exact, evicted]
    assert exact != evicted  # the rows that went would have been read
    assert (comparison.exact.rows, comparison.evicted.rows) == (199, 40)
    assert comparison.prompt_tokens == 200
    assert comparison.kv.cache == []
    assert comparison.exact.finish_reason == "length"


def test_bytes_are_those_of_the_arrays() -> None:
    row = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head size, float32
    comparison = compare(tiny_llama(), tiny_tokenizer(), PROMPT, config=CONFIG, max_tokens=3)
    assert comparison.exact.live_nbytes == comparison.kv.exact_cache_nbytes == 199 * row
    assert comparison.evicted.live_nbytes == comparison.kv.compact_cache_nbytes == 40 * row
    assert comparison.exact.allocated_nbytes == 256 * row
    assert comparison.evicted.allocated_nbytes == (40 + 256) * row


def test_the_exact_side_continues_the_given_cache() -> None:
    model = tiny_llama()
    cache = make_prompt_cache(model)
    model(mx.array(PROMPT[:150])[None], cache=cache)
    comparison = compare(
        model, tiny_tokenizer(), PROMPT[150:], config=CONFIG, max_tokens=8, prompt_cache=cache
    )
    assert [layer.offset for layer in cache] == [208, 208]
    assert (comparison.exact.rows, comparison.evicted.rows) == (199, 40)
    assert both(comparison)[0] == alone(model, None, 0, max_tokens=8)


@pytest.mark.parametrize(
    ("sliding", "budget"), [((0,), 40), ((0,), 300), ((), 300)], ids=["mixed", "mixed-all", "all"]
)
def test_layers_that_both_sides_hold_are_stepped_apart(
    sliding: tuple[int, ...], budget: int
) -> None:
    model = tiny_llama(layers=3, sliding_layers=sliding)
    config = kvkeep.EvictionConfig(policy="snapkv", budget=kvkeep.Budget(budget), min_tokens=0)
    comparison = compare(model, tiny_tokenizer(), PROMPT, config=config, max_tokens=16)
    expected = [alone(model, c, 0, max_tokens=16) for c in (None, config)]
    assert both(comparison) == expected


def test_processors_see_the_whole_prompt_on_both_sides() -> None:
    model = tiny_llama()
    seen: list[list[int]] = []

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())  # type: ignore[arg-type]
        return logits

    compare(
        model,
        tiny_tokenizer(),
        PROMPT,
        config=CONFIG,
        max_tokens=1,
        logits_processors=[process],
    )
    assert [tokens for tokens in seen if len(tokens) == 200] == [PROMPT, PROMPT]


def test_quantised_rows_are_counted_as_they_are_stored() -> None:
    model = tiny_llama(head_dim=32)
    options: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    comparison = compare(model, tiny_tokenizer(), PROMPT, config=CONFIG, max_tokens=3, **options)
    for answer in (comparison.exact, comparison.evicted):
        assert answer.allocated_nbytes < 512 * 2 * 2 * 2 * 32 * 2


def test_one_token_has_no_speed() -> None:
    comparison = compare(tiny_llama(), tiny_tokenizer(), PROMPT, config=CONFIG, max_tokens=1)
    assert comparison.exact.decode_tps is None
    comparison = compare(tiny_llama(), tiny_tokenizer(), PROMPT, config=CONFIG, max_tokens=3)
    speed = comparison.evicted.decode_tps
    assert speed == pytest.approx(2 / comparison.evicted.decode_seconds)


def test_allocated_bytes_of_a_list() -> None:
    model = tiny_llama()
    assert allocated_nbytes(make_prompt_cache(model)) == 0
    cache = kvkeep.compact_prompt_cache(model, PROMPT, budget=40).cache
    assert allocated_nbytes(cache) == cache_nbytes(cache)  # exactly sized until it grows


@pytest.mark.parametrize("store", ["ragged", "union"])
def test_allocated_bytes_of_unequal_heads_count_the_room(store: str) -> None:
    model = tiny_llama()
    config = kvkeep.EvictionConfig(policy="snapkv", budget=40, store=store, min_tokens=0)
    cache = kvkeep.compact_prompt_cache(model, PROMPT, config=config).cache
    model(mx.array([[1]]), cache=cache)
    buffers = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache)
    assert allocated_nbytes(cache) == buffers > cache_nbytes(cache)
    batch = [layer.merge([layer, copy.deepcopy(layer)]) for layer in cache]
    assert allocated_nbytes(batch) == 2 * buffers


def test_what_cannot_be_compared_is_refused() -> None:
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    compact = kvkeep.compact_prompt_cache(model, PROMPT, budget=40).cache
    with pytest.raises(CacheError, match="no exact side"):
        compare(model, tokenizer, PROMPT, config=CONFIG, prompt_cache=compact)
    with pytest.raises(PromptError, match="at least 2 tokens"):
        compare(model, tokenizer, PROMPT[:1], config=CONFIG)
    with pytest.raises(ConfigError, match="max_kv_size and eviction exclude each other"):
        compare(model, tokenizer, PROMPT, config=CONFIG, max_kv_size=30)
    with pytest.raises(ConfigError, match="does not speculate"):
        compare(model, tokenizer, PROMPT, config=CONFIG, draft_model=model)
