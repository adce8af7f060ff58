"""Evicting nothing is the identity: a keep-all compact cache decodes bit-equal to stock mlx-lm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import batch_generate

import kvkeep
from kvkeep import LayerSelection, PositionPreservingKVCache, Selection
from oracles import greedy, prefilled
from tiny_models import random_tokens, tiny_llama, tiny_tokenizer

STEPS = (1, 7, 64, 2048)
NEW_TOKENS = 64
MODEL = tiny_llama()
PROMPT = random_tokens(150)
KV_HEADS = 2


def keep_all(cache: list[Any], heads: int) -> list[Any]:
    """Every layer stored as a compact cache that keeps all rows."""
    length = cache[0].offset
    rows = LayerSelection((np.arange(length),) * heads)
    selection = Selection(length, dict.fromkeys(range(len(cache)), rows))
    return kvkeep.evict_selection(cache, selection).cache


def empty_compact(model: Any) -> list[Any]:
    return [PositionPreservingKVCache() for _ in model.layers]


def assert_same_bits(ours: tuple[Any, np.ndarray], stock: tuple[Any, np.ndarray]) -> None:
    assert ours[0] == stock[0]
    np.testing.assert_array_equal(ours[1], stock[1])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("heads", [1, KV_HEADS], ids=["shared", "per-head"])
def test_keep_all_decodes_bit_equal(step: int, heads: int) -> None:
    stock = prefilled(MODEL, PROMPT[:-1], step)
    compact = keep_all(stock, heads)
    assert all(type(layer) is PositionPreservingKVCache for layer in compact)
    assert all(len(layer.head_positions) == heads for layer in compact)
    ours = greedy(MODEL, compact, PROMPT[-1], NEW_TOKENS)
    assert_same_bits(ours, greedy(MODEL, stock, PROMPT[-1], NEW_TOKENS))
    assert len(set(ours[0])) > 3, "the model repeats itself: equal tokens would say little"


@pytest.mark.parametrize("step", STEPS)
def test_prefill_into_empty_compact_caches_is_bit_equal(step: int) -> None:
    """Also where the rows were appended by the compact cache itself, chunk by chunk."""
    stock = prefilled(MODEL, PROMPT[:-1], step)
    compact = prefilled(MODEL, PROMPT[:-1], step, empty_compact)
    for ours, theirs in zip(compact, stock, strict=True):
        assert ours.offset == theirs.offset == ours.size() == len(PROMPT) - 1
        for mine, other in zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True):
            assert mx.array_equal(mine, other)
    ours = greedy(MODEL, compact, PROMPT[-1], NEW_TOKENS)
    assert_same_bits(ours, greedy(MODEL, stock, PROMPT[-1], NEW_TOKENS))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 2)])
def test_identity_for_other_head_groups(heads: int, kv_heads: int) -> None:
    model = tiny_llama(heads=heads, kv_heads=kv_heads, seed=heads + kv_heads)
    stock = prefilled(model, PROMPT[:-1], 64)
    ours = greedy(model, keep_all(stock, kv_heads), PROMPT[-1], NEW_TOKENS)
    assert_same_bits(ours, greedy(model, stock, PROMPT[-1], NEW_TOKENS))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_identity_in_half_precision(dtype: mx.Dtype) -> None:
    model = tiny_llama(seed=3)
    model.set_dtype(dtype)
    stock = prefilled(model, PROMPT[:-1], 64)
    compact = keep_all(stock, KV_HEADS)
    assert compact[0].keys.dtype == dtype

    def decoded(cache: list[Any]) -> list[int]:
        token, tokens = PROMPT[-1], []
        for _ in range(NEW_TOKENS):
            token = np.asarray(model(mx.array([[token]]), cache=cache)[0, -1].argmax()).item()
            tokens.append(token)
        return tokens

    assert decoded(compact) == decoded(stock)


@pytest.mark.parametrize("step", [7, 2048])
def test_mlx_lm_stream_generate_over_a_keep_all_cache(step: int) -> None:
    """mlx-lm's own loop, which evaluates `state` and pipelines two steps."""
    tokenizer = tiny_tokenizer()

    def run(cache: list[Any]) -> tuple[list[int], np.ndarray]:
        made = list(
            mlx_lm.stream_generate(
                MODEL,
                tokenizer,
                PROMPT[100:],
                max_tokens=NEW_TOKENS,
                prompt_cache=cache,
                prefill_step_size=step,
            )
        )
        return [r.token for r in made], np.stack([np.asarray(r.logprobs) for r in made])

    stock = prefilled(MODEL, PROMPT[:100], step)
    compact = keep_all(stock, KV_HEADS)
    assert_same_bits(run(compact), run(stock))
    assert compact[0].offset == stock[0].offset


def test_kvkeep_stream_generate_with_a_budget_of_the_whole_prompt() -> None:
    tokenizer = tiny_tokenizer()
    config = kvkeep.EvictionConfig(
        policy="snapkv", budget=kvkeep.Budget.parse(1.0), window=8, min_tokens=0
    )
    ours = [
        r.token
        for r in kvkeep.stream_generate(
            MODEL, tokenizer, PROMPT, config=config, max_tokens=NEW_TOKENS
        )
    ]
    stock = [
        r.token for r in mlx_lm.stream_generate(MODEL, tokenizer, PROMPT, max_tokens=NEW_TOKENS)
    ]
    assert ours == stock


LENGTHS = [(150, 150, 150), (40, 150, 7)]


def batched(
    caches: Sequence[list[Any]], prompts: Sequence[list[int]]
) -> tuple[list[list[int]], np.ndarray]:
    """`mlx_lm.batch_generate` over prefilled caches: token ids and their log-probabilities."""
    response = batch_generate(
        MODEL,
        tiny_tokenizer(),
        [list(p) for p in prompts],
        prompt_caches=[list(c) for c in caches],
        max_tokens=NEW_TOKENS,
        return_token_ids=True,
        return_logprobs=True,
    )
    assert response.token_ids is not None
    return response.token_ids, np.asarray(response.logprobs)


@pytest.mark.parametrize("lengths", LENGTHS, ids=["equal", "unequal"])
@pytest.mark.parametrize("tail", [1, 12], ids=["one-token", "suffix"])
@pytest.mark.parametrize("heads", [1, KV_HEADS], ids=["shared", "per-head"])
def test_batch_generate_is_bit_equal_to_the_stock_batch(
    lengths: tuple[int, ...], tail: int, heads: int
) -> None:
    """Against mlx-lm's own batch: it masks and pads, so its sums may differ from a lone request's
    in the last bits, but ours lay rows out alike and must not differ from it at all. Only a GPU
    may tell them apart: without dead rows we pass no mask, which picks another kernel there."""
    prompts = [random_tokens(n + tail, seed=i) for i, n in enumerate(lengths)]
    stock = [prefilled(MODEL, p[:-tail], 64) for p in prompts]
    compact = [keep_all(cache, heads) for cache in stock]
    tails = [p[-tail:] for p in prompts]
    ours, theirs = batched(compact, tails), batched(stock, tails)
    if mx.default_device() == mx.Device(mx.cpu):
        assert_same_bits(ours, theirs)
    assert ours[0] == theirs[0]
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS, ids=["equal", "unequal"])
def test_batched_keep_all_gives_what_each_request_gives_alone(lengths: tuple[int, ...]) -> None:
    """To float tolerance: a batch multiplies other shapes than a lone request does."""
    prompts = [random_tokens(n, seed=i) for i, n in enumerate(lengths)]
    stock = [prefilled(MODEL, p[:-1], 64) for p in prompts]
    compact = [keep_all(cache, KV_HEADS) for cache in stock]
    tokens, chosen = batched(compact, [p[-1:] for p in prompts])
    for i, prompt in enumerate(prompts):
        alone, logits = greedy(MODEL, stock[i], prompt[-1], NEW_TOKENS)
        logprobs = np.asarray(mx.array(logits) - mx.logsumexp(mx.array(logits), -1, keepdims=True))
        assert tokens[i] == alone
        np.testing.assert_allclose(chosen[i], logprobs.max(-1), atol=1e-5)


def test_identity_does_not_rest_on_an_unused_cache() -> None:
    """The comparison bites: one row fewer changes the logits."""
    stock = prefilled(MODEL, PROMPT[:-1], 64)
    length = stock[0].offset
    rows = np.delete(np.arange(length), 100)
    evicted = kvkeep.evict_prompt_cache(stock, rows, true_offset=length).cache
    ours = greedy(MODEL, evicted, PROMPT[-1], 1)
    exact = greedy(MODEL, stock, PROMPT[-1], 1)
    assert not np.array_equal(ours[1], exact[1])
