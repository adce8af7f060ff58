"""Observed prefill: bit-equal to mlx-lm's own, refused early, scored by what can be seen."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from bare_models import PartlySeenModel, cache_bytes, tiny_model
from kvkeep.attention import observed_prefill, seam
from kvkeep.errors import UnsupportedModelError
from oracles import logits_of
from tiny_models import random_tokens, tiny_bare_model, tiny_llama

TOKENS = random_tokens(100)


def stock_prefill(model: Any, step: int) -> tuple[list[Any], list[tuple[int, int]]]:
    """What `generate_step` leaves after the prompt, and what it reports on the way."""
    cache, reports = make_prompt_cache(model), []
    steps = generate_step(
        mx.array([*TOKENS, 1]),
        model,
        prompt_cache=cache,
        prefill_step_size=step,
        max_tokens=1,
        prompt_progress_callback=lambda *report: reports.append(report),
    )
    next(steps)
    steps.close()
    for layer in cache:
        layer.trim(layer.offset - len(TOKENS))
    return cache, reports


@pytest.mark.parametrize("step", [1, 7, 24, 99, 100, 2048])
@pytest.mark.parametrize("window", [0, 8, 24])
def test_it_is_bit_equal_to_a_stock_prefill(window: int, step: int) -> None:
    model = tiny_llama()
    expected, stock_reports = stock_prefill(model, step)
    cache, reports = make_prompt_cache(model), []
    observed_prefill(
        model,
        TOKENS,
        cache,
        [0, 1],
        window=window,
        policy="snapkv",
        step=step,
        progress=lambda *report: reports.append(report),
    )
    assert cache_bytes(cache) == cache_bytes(expected)
    np.testing.assert_array_equal(
        logits_of(model, cache, [5, 6]), logits_of(model, expected, [5, 6])
    )
    # mlx-lm counts the last token, which it steps from, in its total.
    ours = [(done, total) for done, total in reports if done]
    assert ours == [(done, 100) for done, _ in stock_reports if 0 < done <= 100]
    assert reports[0] == (0, 100)


@pytest.mark.parametrize("policy", ["snapkv", "snapkv-d"])
@pytest.mark.parametrize("step", [1, 10, 2048])
@pytest.mark.parametrize("model_type", ["gemma2", "kimi_linear"])
def test_a_model_that_cannot_be_seen_is_refused_before_anything_is_computed(
    model_type: str, step: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, evaluations, reports = tiny_model(model_type), [], []
    cache = make_prompt_cache(model)
    monkeypatch.setattr(mx, "eval", lambda *arrays: evaluations.append(arrays))
    with pytest.raises(UnsupportedModelError, match=f"model '{model_type}'"):
        observed_prefill(
            model,
            TOKENS,
            cache,
            [0, 1],
            window=8,
            policy=policy,
            allow_capture=policy == "snapkv-d",
            step=step,
            progress=lambda *report: reports.append(report),
        )
    assert evaluations == []
    assert reports == [(0, 100)]


def test_the_reason_fits_the_policy() -> None:
    model = tiny_model("gemma2")
    with pytest.raises(UnsupportedModelError, match="use policy 'snapkv-d'"):
        observed_prefill(model, TOKENS, make_prompt_cache(model), [0, 1], window=8, policy="snapkv")
    with pytest.raises(UnsupportedModelError) as caught:
        observed_prefill(
            model,
            TOKENS,
            make_prompt_cache(model),
            [0, 1],
            window=8,
            policy="snapkv-d",
            allow_capture=True,
        )
    assert "use policy" not in str(caught.value)


@pytest.mark.parametrize("step", [7, 2048])
def test_a_model_that_calls_mx_fast_itself_is_captured_where_that_is_allowed(step: int) -> None:
    model = tiny_bare_model()
    with pytest.raises(UnsupportedModelError, match=r"'bare' computes attention on its own"):
        observed_prefill(
            model, TOKENS, make_prompt_cache(model), [0, 1], window=8, policy="snapkv", step=step
        )
    attention = mx.fast.scaled_dot_product_attention
    seen = observed_prefill(
        model,
        TOKENS,
        make_prompt_cache(model),
        [0, 1],
        window=8,
        policy="snapkv-d",
        allow_capture=True,
        step=step,
    )
    assert mx.fast.scaled_dot_product_attention is attention
    assert not seen.observers
    assert seen.capture is not None
    scores = seen.capture.snap_scores(100)
    assert sum(scores) == pytest.approx(2 * 4 * 8, rel=1e-5)  # layers, heads, queries


def test_layers_that_are_all_seen_are_scored_by_their_queries() -> None:
    """A sliding layer that calls `mx.fast` itself must not push the others' scores aside."""
    model = PartlySeenModel(seen=[False, True, True], sliding=[True, False, False])
    seam.install()
    seen = observed_prefill(
        model,
        TOKENS,
        make_prompt_cache(model),
        [1, 2],
        window=8,
        policy="snapkv-d",
        allow_capture=True,
    )
    assert seen.capture is None
    assert sorted(seen.observers) == [1, 2]
    assert all(o.queries is not None for o in seen.observers.values())


def test_a_partly_seen_model_is_seen_both_ways_or_refused_with_the_layers() -> None:
    model = PartlySeenModel(seen=[True, False, True], sliding=[False] * 3)
    seam.install()
    with pytest.raises(UnsupportedModelError, match=r"in 1 of 3 layers.*none in layers 1"):
        observed_prefill(
            model, TOKENS, make_prompt_cache(model), [0, 1, 2], window=8, policy="snapkv"
        )
    seen = observed_prefill(
        model,
        TOKENS,
        make_prompt_cache(model),
        [0, 1, 2],
        window=8,
        policy="snapkv-d",
        allow_capture=True,
    )
    assert sorted(seen.observers) == [0, 2]
    assert seen.capture is not None
    assert sum(seen.capture.snap_scores(100)) == pytest.approx(4 * 8, rel=1e-5)


def test_a_gemma2_needs_no_refusal_where_nothing_is_observed() -> None:
    model = tiny_model("gemma2")
    cache = make_prompt_cache(model)
    seen = observed_prefill(model, TOKENS, cache, [0, 1], window=0, policy="snapkv")
    assert all(o.queries is None for o in seen.observers.values())
    assert [layer.offset for layer in cache] == [100, 100]
