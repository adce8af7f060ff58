"""Evicting equals full attention under the equivalent mask, computed in float64 NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import kvkeep
from kvkeep import LayerSelection, PositionPreservingKVCache, Selection
from oracles import (
    attend,
    evicted_mask,
    greedy,
    greedy_batch,
    logits_of,
    masked_attention,
    numpy_llama,
    prefilled,
)
from tiny_models import random_tokens, tiny_llama

TOLERANCE = 1e-4
HEADS, DIM = 2, 32
UNEQUAL_AT_60 = ((0, 5, 17, 61, 80), (3, 62, 70, 77, 90))

Kept = list[list[list[int]]]  # [layer][head or one][position]


def random_kept(length: int, keep: int, layers: int, heads: int, seed: int = 0) -> Kept:
    """Random positions, other ones for each layer and head."""
    random = np.random.default_rng(seed)

    def draw() -> list[int]:
        return sorted(random.choice(length, keep, replace=False).tolist())

    return [[draw() for _ in range(heads)] for _ in range(layers)]


def evicted(cache: list[Any], kept: Kept) -> list[Any]:
    layers = {
        i: LayerSelection(tuple(np.array(head) for head in heads)) for i, heads in enumerate(kept)
    }
    return kvkeep.evict_selection(cache, Selection(cache[0].offset, layers)).cache


def expected_logits(
    model: Any, tokens: Sequence[int], kept: Kept, evicted_at: int, until: int | None = None
) -> np.ndarray:
    heads = model.args.num_key_value_heads
    masks = [evicted_mask(len(tokens), layer, evicted_at, until) for layer in kept]
    whole = [np.broadcast_to(m, (heads, *m.shape[1:])) for m in masks]
    return numpy_llama(model, tokens, np.stack(whole))


GROUPS = pytest.mark.parametrize(
    ("heads", "kv_heads"), [(4, 2), (4, 4), (4, 1)], ids=["G2", "G1", "G4"]
)
STORES = pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per-head"])


# -- whole models ---------------------------------------------------------------------


def test_the_oracle_agrees_with_stock_mlx_lm() -> None:
    """Else the comparisons below would compare two mistakes."""
    model, prompt = tiny_llama(layers=3), random_tokens(90)
    ours = logits_of(model, prefilled(model, prompt[:50]), prompt[50:])
    full = [[list(range(len(prompt)))]] * 3
    np.testing.assert_allclose(ours, expected_logits(model, prompt, full, 90)[50:], atol=TOLERANCE)


@GROUPS
@STORES
def test_decoding_after_eviction(heads: int, kv_heads: int, per_head: bool) -> None:
    model, prompt = tiny_llama(heads=heads, kv_heads=kv_heads), random_tokens(80)
    exact = prefilled(model, prompt[:-1], 32)
    kept = random_kept(79, 20, layers=2, heads=kv_heads if per_head else 1)
    tokens, logits = greedy(model, evicted(exact, kept), prompt[-1], 12)
    whole = [*prompt, *tokens[:-1]]
    np.testing.assert_allclose(logits, expected_logits(model, whole, kept, 79)[79:], atol=TOLERANCE)
    full = [[list(range(79))]] * 2
    stock = expected_logits(model, whole, full, 79)[79:]
    assert np.abs(logits - stock).max() > 100 * TOLERANCE, "the eviction did not matter"


@STORES
@pytest.mark.parametrize("chunks", [(9,), (1, 5, 3), (4, 1, 4)])
def test_multi_token_appends_after_eviction(per_head: bool, chunks: tuple[int, ...]) -> None:
    """A next turn: several tokens per forward over sparse rows, layers with unequal counts."""
    model, prompt = tiny_llama(), random_tokens(80)
    exact = prefilled(model, prompt[:70])
    heads = 2 if per_head else 1
    kept = [
        *random_kept(70, 12, layers=1, heads=heads, seed=1),
        *random_kept(70, 31, layers=1, heads=heads, seed=2),
    ]
    cache, done, logits = evicted(exact, kept), 70, []
    for count in chunks:
        logits.append(logits_of(model, cache, prompt[done : done + count]))
        done += count
    ours = np.concatenate(logits)
    expected = expected_logits(model, prompt[:done], kept, 70)[70:]
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE)


@GROUPS
def test_after_a_logical_trim_that_leaves_unequal_heads(heads: int, kv_heads: int) -> None:
    """Layers and heads then hold other numbers of rows: each call needs its own mask."""
    model, prompt = tiny_llama(heads=heads, kv_heads=kv_heads), random_tokens(80)
    exact = prefilled(model, prompt[:70])
    kept = random_kept(70, 16, layers=2, heads=kv_heads, seed=5)
    cache = evicted(exact, kept)
    logits_of(model, cache, prompt[70:75])
    for layer in cache:
        layer.trim(5 + 25)
    rows = [layer.live_head_rows for layer in cache]
    assert kv_heads == 1 or any(len(set(counts)) > 1 for counts in rows), rows
    other = random_tokens(12, seed=8)
    ours = [logits_of(model, cache, other[:5]), *(logits_of(model, cache, [t]) for t in other[5:])]
    left = [[[p for p in head if p < 45] for head in layer] for layer in kept]
    expected = expected_logits(model, [*prompt[:45], *other], left, 70, until=45)[45:]
    np.testing.assert_allclose(np.concatenate(ours), expected, atol=TOLERANCE)
    assert [layer.offset for layer in cache] == [57, 57]


def test_a_rejected_draft_leaves_no_trace() -> None:
    model, prompt = tiny_llama(), random_tokens(80)
    exact = prefilled(model, prompt[:70])
    kept = random_kept(70, 20, layers=2, heads=2)
    cache = evicted(exact, kept)
    logits_of(model, cache, random_tokens(6, seed=3))
    for layer in cache:
        layer.trim(6)
    ours = logits_of(model, cache, prompt[70:])
    expected = expected_logits(model, prompt, kept, 70)[70:]
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE)


@STORES
def test_a_batch_of_unequal_lengths(per_head: bool) -> None:
    model, lengths, rows = tiny_llama(), (30, 90, 55), (10, 40, 25)
    caches, kept, prompts = [], [], []
    for i, (length, keep) in enumerate(zip(lengths, rows, strict=True)):
        prompts.append(random_tokens(length, seed=i))
        exact = prefilled(model, prompts[i][:-1])
        kept.append(random_kept(length - 1, keep, 2, 2 if per_head else 1, seed=i))
        caches.append(evicted(exact, kept[i]))
    batch = [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]
    tokens, logits = greedy_batch(model, batch, [p[-1] for p in prompts], 10)
    for i, prompt in enumerate(prompts):
        whole = [*prompt, *tokens[i][:-1]]
        expected = expected_logits(model, whole, kept[i], len(prompt) - 1)
        np.testing.assert_allclose(logits[i], expected[len(prompt) - 1 :], atol=TOLERANCE)


def test_a_batch_with_unequal_heads() -> None:
    model, caches, left, prompts = tiny_llama(), [], [], []
    for i, length in enumerate((50, 70)):
        prompts.append(random_tokens(length, seed=i))
        kept = random_kept(length, 14, layers=2, heads=2, seed=i)
        caches.append(evicted(prefilled(model, prompts[i]), kept))
        for layer in caches[i]:
            layer.trim(20)
        left.append([[[p for p in head if p < length - 20] for head in ly] for ly in kept])
    batch = [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]
    tokens, logits = greedy_batch(model, batch, [7, 9], 6)
    for i, (length, first) in enumerate(((30, 7), (50, 9))):
        whole = [*prompts[i][:length], first, *tokens[i][:-1]]
        expected = expected_logits(model, whole, left[i], length + 20, until=length)
        np.testing.assert_allclose(logits[i], expected[length:], atol=TOLERANCE)


# -- one attention call ---------------------------------------------------------------


def random_rows(heads: int, count: int, seed: int) -> mx.array:
    random = np.random.default_rng(seed)
    return mx.array(random.standard_normal((1, heads, count, DIM)).astype(np.float32))


def filled(kept: Sequence[Sequence[int]], offset: int) -> PositionPreservingKVCache:
    count = len(kept[0])
    return PositionPreservingKVCache(
        random_rows(HEADS, count, 1), random_rows(HEADS, count, 2), offset=offset, positions=kept
    )


def live_mask(cache: Any, n: int) -> np.ndarray:
    """Which physical rows the last `n` tokens may read: bool [H_kv, n, rows]."""
    counts = cache.live_head_rows
    index = np.arange(cache.size())
    causal = index[None] <= np.arange(cache.size() - n, cache.size())[:, None]
    per_head = counts if len(counts) == HEADS else counts * HEADS
    return np.stack([causal & (index >= cache.size() - count) for count in per_head])


def dequantised(packed: Any, cache: Any) -> mx.array:
    if isinstance(packed, mx.array):
        return packed
    return mx.dequantize(*packed, group_size=cache.group_size, bits=cache.bits)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("trimmed", [0, 40], ids=["even", "unequal"])
@pytest.mark.parametrize("kind", ["plain", "sinks", "quantised"])
def test_one_attention_call(group: int, n: int, trimmed: int, kind: str) -> None:
    cache: Any = filled(UNEQUAL_AT_60, 100)
    if kind == "quantised":  # mlx-lm's quantised attention takes no sinks
        cache = cache.to_quantized(group_size=32, bits=8)
    cache.trim(trimmed)
    assert cache.owns_attention == bool(trimmed)
    queries = random_rows(HEADS * group, n, 3)
    asked = np.array(queries[0])  # mlx-lm's quantised attention scales its argument in place
    sinks = random_rows(1, HEADS * group, 4)[0, 0, :, 0] if kind == "sinks" else None
    new = random_rows(HEADS, n, 5), random_rows(HEADS, n, 6)
    out = attend(cache, queries, *new, scale=DIM**-0.5, sinks=sinks)
    keys, values = (dequantised(part, cache)[0] for part in cache.keys_and_values())
    expected = masked_attention(asked, keys, values, live_mask(cache, n), DIM**-0.5, sinks)
    np.testing.assert_allclose(out[0], expected, atol=TOLERANCE)


def test_dead_rows_would_be_noticed() -> None:
    """The mask above matters: reading the dead rows gives another result."""
    cache, scale = filled(UNEQUAL_AT_60, 100), DIM**-0.5
    cache.trim(40)
    queries = random_rows(HEADS, 1, 3)
    out = attend(cache, queries, random_rows(HEADS, 1, 5), random_rows(HEADS, 1, 6), scale=scale)
    keys, values = (part[0] for part in cache.keys_and_values())
    everything = np.ones((1, cache.size()), bool)
    unmasked = masked_attention(queries[0], keys, values, everything, scale)
    assert np.abs(out[0] - unmasked).max() > 100 * TOLERANCE
