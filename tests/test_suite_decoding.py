"""Decoding over selected rows equals the masked full cache, whatever mask the model hands out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask

import kvkeep
from kvkeep import (
    select_cache,
    select_positions,
)
from kvkeep.errors import (
    UnsupportedModelError,
)
from kvkeep.policies import POLICIES
from oracles import evicted_mask, greedy, greedy_batch, logits_of, numpy_llama, prefilled
from tiny_models import random_tokens, tiny_llama

T = 90
PROMPT, WINDOW = random_tokens(T), random_tokens(6, seed=5)
TOLERANCE = 1e-4
FED = {name for name, policy in POLICIES.items() if policy.needs & {"attention", "replay", "draft"}}
NAMES = sorted({"sink_recent", "random", "attention", "pyramid", *POLICIES} - FED)


def positions(cache: list[Any]) -> list[list[list[int]]]:
    """Kept positions by layer and head (one entry where the heads share them)."""
    return [[list(head) for head in layer.head_positions] for layer in cache]


def expected_logits(model: Any, tokens: Sequence[int], kept: Any, length: int) -> np.ndarray:
    heads = model.args.num_key_value_heads
    masks = [evicted_mask(len(tokens), layer, length) for layer in kept]
    whole = [np.broadcast_to(m, (heads, *m.shape[1:])) for m in masks]
    return numpy_llama(model, tokens, np.stack(whole))


def force_mask_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let llama ask for its mask as an array, sized by its first layer, as 11 models do."""
    monkeypatch.setattr(
        llama,
        "create_attention_mask",
        lambda h, cache=None, window_size=None: create_attention_mask(
            h, cache, window_size=window_size, return_array=True
        ),
    )


ARRAYS = pytest.mark.parametrize("arrays", [False, True], ids=["causal", "mask arrays"])


@ARRAYS
@pytest.mark.parametrize("policy", NAMES)
def test_decoding_equals_the_masked_full_cache(
    policy: str, arrays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(layers=3)
    cache = prefilled(model, PROMPT)
    new, info = select_cache(model, cache, policy, 0.3, WINDOW, window_keep=8)
    assert policy != "pyramid" or len(set(info["layer_budgets"])) == 3
    kept = positions(new)
    if arrays:
        force_mask_arrays(monkeypatch)
    asked = logits_of(model, new, WINDOW)
    tokens, logits = greedy(model, new, int(asked[-1].argmax()), 5)
    whole = [*PROMPT, *WINDOW, int(asked[-1].argmax()), *tokens[:-1]]
    expected = expected_logits(model, whole, kept, T)[T:]
    np.testing.assert_allclose(np.concatenate([asked, logits]), expected, atol=TOLERANCE)
    stock = expected_logits(model, whole, [[list(range(T))]] * 3, T)[T:]
    assert np.abs(stock - expected).max() > 100 * TOLERANCE, "the eviction did not matter"


UNEQUAL = [
    [list(range(0, 60, 2)), list(range(1, 60, 2))],
    [[0, 5, 40, 59], [3, 6, 7, 58]],
    [list(range(60))] * 2,
]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_mask_arrays_over_layers_of_unequal_rows(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask is sized by layer 0, be it the longest, the shortest or a whole one."""
    from kvkeep.attention import install, remove

    model = tiny_llama(layers=3)
    kept = [*UNEQUAL[first:], *UNEQUAL[:first]]
    remove()  # the caches themselves have to ask for the seam
    try:
        cache = select_positions(prefilled(model, PROMPT[:60]), kept)
        remove()
        force_mask_arrays(monkeypatch)
        ours = [logits_of(model, cache, PROMPT[60:69]), logits_of(model, cache, PROMPT[69:70])]
        for layer in cache:
            layer.trim(10 + 15)  # heads of unequal rows beside heads of equal ones
        left = [[[p for p in head if p < 45] for head in layer] for layer in kept]
        after = [logits_of(model, cache, PROMPT[45:50]), logits_of(model, cache, PROMPT[50:51])]
    finally:
        install()
    expected = expected_logits(model, PROMPT[:70], kept, 60)[60:]
    np.testing.assert_allclose(np.concatenate(ours), expected, atol=TOLERANCE)
    masks = [evicted_mask(51, layer, 60, 45) for layer in left]
    expected = numpy_llama(model, PROMPT[:51], np.stack(masks))[45:]
    np.testing.assert_allclose(np.concatenate(after), expected, atol=TOLERANCE)


def test_an_exact_first_layer_before_compact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvkeep.attention import install, remove

    model = tiny_llama(layers=2)
    remove()
    try:
        kept = kvkeep.LayerSelection((np.array([0, 7, 30]),))
        selection = kvkeep.Selection(60, {1: kept})
        cache = kvkeep.evict_selection(prefilled(model, PROMPT[:60]), selection).cache
        force_mask_arrays(monkeypatch)
        ours = logits_of(model, cache, PROMPT[60:70])
    finally:
        install()
    whole = [[list(range(60))], [[0, 7, 30]]]
    expected = expected_logits(model, PROMPT[:70], whole, 60)[60:]
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE)


def test_quantised_layers_of_unequal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(layers=3, head_dim=32)
    cache = select_positions(prefilled(model, PROMPT[:60]), UNEQUAL)
    causal = [layer.to_quantized(group_size=32, bits=8) for layer in cache]
    arrays = [layer.to_quantized(group_size=32, bits=8) for layer in cache]
    right = [logits_of(model, causal, PROMPT[60:66]), logits_of(model, causal, PROMPT[66:67])]
    force_mask_arrays(monkeypatch)
    ours = [logits_of(model, arrays, PROMPT[60:66]), logits_of(model, arrays, PROMPT[66:67])]
    np.testing.assert_allclose(np.concatenate(ours), np.concatenate(right), atol=1e-5)


@pytest.mark.parametrize("kind", ["float", "window"])
def test_a_mask_that_says_more_than_causal_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(layers=3)
    shared = [[0, 1, 2, 50], [0, 59], [0, 1, 58, 59]]
    cache = select_positions(prefilled(model, PROMPT[:60]), shared)

    def mask(h: mx.array, cache: Any = None, window_size: int | None = None) -> Any:
        if kind == "window":
            return cache.make_mask(h.shape[1], window_size=8)
        return cache.make_mask(h.shape[1], return_array=True).astype(mx.float32)

    monkeypatch.setattr(llama, "create_attention_mask", mask)
    with pytest.raises(UnsupportedModelError, match="no plain causal one; expected a mask for"):
        logits_of(model, cache, WINDOW)


@ARRAYS
def test_a_batch_of_pyramids(arrays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(layers=3)
    lengths, caches = (60, 85), []
    for length in lengths:
        new, info = select_cache(
            model, prefilled(model, PROMPT[:length]), "pyramid", 0.3, WINDOW, window_keep=4
        )
        assert len(set(info["layer_budgets"])) > 1
        caches.append(new)
    kept = [positions(cache) for cache in caches]
    batch = [layers[0].merge(layers) for layers in zip(*caches, strict=True)]
    if arrays:
        force_mask_arrays(monkeypatch)
    tokens, logits = greedy_batch(model, batch, [7, 9], 5)
    for i, (length, first) in enumerate(zip(lengths, (7, 9), strict=True)):
        whole = [*PROMPT[:length], first, *tokens[i][:-1]]
        expected = expected_logits(model, whole, kept[i], length)[length:]
        np.testing.assert_allclose(logits[i], expected, atol=TOLERANCE)
