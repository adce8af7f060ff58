"""ChunkKV: kvpress's whole chunks, and our exact budgets, from the same scores."""

from __future__ import annotations

import numpy as np
import pytest

from golden import LAYERS, RATIOS, golden, golden_view, scores_of
from kvkeep import EvictionConfig, compact_prompt_cache, get_policy
from kvkeep.policies import ChunkKV, policy_of
from kvkeep.selection import select_rows
from tiny_models import random_tokens, tiny_llama

PRESSES = pytest.mark.parametrize(("size", "window"), [(20, 64), (20, 16), (16, 16)])
SHARES = {"r25": 0.75, "r50": 0.5, "r75": 0.25, "r90": 1 - 0.9}


def chunks_of(length: int, size: int) -> list[np.ndarray]:
    return [np.arange(start, min(start + size, length)) for start in range(0, length, size)]


@PRESSES
def test_scores_are_means_of_the_snapkv_scores_of_kvpress(size: int, window: int) -> None:
    inner = golden(f"snapkv_w{window}_T200")["scores"].astype(np.float64).sum(axis=1)
    scores = scores_of(ChunkKV(size, window))
    for layer in range(LAYERS):
        for chunk in chunks_of(200, size):
            right = inner[layer, chunk].mean()
            np.testing.assert_allclose(scores[layer][:, chunk], right, rtol=1e-4)


@PRESSES
@pytest.mark.parametrize("ratio", RATIOS)
def test_both_readings_of_a_budget(size: int, window: int, ratio: str) -> None:
    press, scores = golden(f"chunkkv{size}_snapkv_w{window}_T200"), scores_of(ChunkKV(size, window))
    chunks = chunks_of(200, size)
    n_chunks = max(1, int(len(chunks) * SHARES[ratio]))
    rows = max(1, int(200 * SHARES[ratio]))
    for layer in range(LAYERS):
        exact = press[f"exact_{ratio}"][layer].all()
        # kvpress's reading: so many whole chunks, whatever rows that makes.
        best = sorted(chunks, key=lambda c: scores[layer, 0, c[0]])[-n_chunks:]
        whole = np.sort(np.concatenate(best))
        theirs = press[f"kept_{ratio}"][layer]
        theirs = [head[head >= 0] for head in theirs]
        if exact:
            np.testing.assert_array_equal(theirs, [whole] * 2)
            # A budget of just those rows is met by just those chunks.
            np.testing.assert_array_equal(select_rows(scores[layer], len(whole)), theirs)
        # Ours: exactly the rows asked for, all but one of the chunks that are touched whole.
        (kept, again) = select_rows(scores[layer], rows)
        np.testing.assert_array_equal(kept, again)
        assert len(kept) == rows >= len(whole) - size
        held = [np.isin(chunk, kept) for chunk in chunks]
        split = [mask for mask in held if mask.any() and not mask.all()]
        assert len(split) <= 1
        for mask in split:  # its last rows
            assert mask.tolist() == sorted(mask.tolist())
        lost = [scores[layer, 0, c[0]] for c, m in zip(chunks, held, strict=True) if not m.any()]
        assert scores[layer, 0, kept].min() >= max(lost, default=0)


def test_options_reach_it_and_the_budget_is_exact_end_to_end() -> None:
    config = EvictionConfig.parse(
        {"policy": "chunkkv", "chunk-size": 7, "window": 5, "budget": 31, "min_tokens": 0}
    )
    assert policy_of(config) == ChunkKV(chunk_size=7, window=5)
    cache = compact_prompt_cache(tiny_llama(), random_tokens(90), config=config).cache
    assert [layer.size() for layer in cache] == [31, 31]
    for layer in cache:
        first, second = (set(head) for head in layer.head_positions)
        assert first == second >= {0, 1, 2, 3, *range(85, 90)}


@pytest.mark.parametrize("size", [1, 3, 199, 200, 1000])
def test_chunks_of_any_size(size: int) -> None:
    scores = np.asarray(get_policy("chunkkv", chunk_size=size, window=16).score(golden_view(0, 16)))
    assert len(np.unique(scores[0][: 200 // size * size])) <= 200 // size
    inner = np.asarray(get_policy("snapkv", window=16, pool_kernel=5).score(golden_view(0, 16)))
    np.testing.assert_allclose(scores.sum() / 2, inner.sum(), rtol=1e-5)
