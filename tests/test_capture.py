"""`SnapKVAttentionCapture`: scores of models that call `mx.fast` attention themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from bare_models import attention_inputs, window_weights
from kvkeep import SnapKVAttentionCapture
from kvkeep.attention import install, installed, observed_prefill, remove
from kvkeep.caches import row_groups
from kvkeep.errors import ConfigError, SelectionError
from kvkeep.policies import SnapKVD
from kvkeep.views import layer_view
from oracles import prefilled
from tiny_models import random_tokens, tiny_bare_model, tiny_llama

TOKENS = random_tokens(80)
STOCK = mx.fast.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _leaves_mx_fast_as_it_was() -> Iterator[None]:
    assert mx.fast.scaled_dot_product_attention is STOCK
    yield
    assert mx.fast.scaled_dot_product_attention is STOCK


def right_scores(model: Any, tokens: list[int], window: int) -> np.ndarray:
    layers = attention_inputs(model, tokens)
    return sum(window_weights(q, k, window).sum(axis=(0, 1)) for q, k in layers)  # type: ignore[return-value]


def captured(model: Any, tokens: list[int], step: int = 2048, **options: int) -> np.ndarray:
    with SnapKVAttentionCapture(**options) as capture:
        prefilled(model, tokens, step)
    return np.array(capture.snap_scores(len(tokens)))


def attend(
    length: int = 12, count: int = 12, mask: Any = "causal", batch: int = 1, **options: Any
) -> tuple[mx.array, mx.array]:
    """One attention call of `count` queries over `length` keys: (queries, keys)."""
    queries = mx.random.normal((batch, 4, count, 8))
    keys = mx.random.normal((batch, 2, length, 8))
    mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.4, mask=mask, **options)
    return queries, keys


@pytest.mark.parametrize("chunk", [1, 5, 8, 100])
@pytest.mark.parametrize("window", [1, 24, 80, 200])
def test_scores_are_the_windows_attention_summed_over_layers(window: int, chunk: int) -> None:
    model = tiny_bare_model()
    scores = captured(model, TOKENS, window=window, score_chunk_size=chunk)
    np.testing.assert_allclose(scores, right_scores(model, TOKENS, window), rtol=1e-4, atol=1e-6)
    assert len(set(scores.round(6))) > 40  # not flat


@pytest.mark.parametrize("step", [1, 5, 23, 24, 25, 64])
def test_a_prompt_in_chunks_scores_as_in_one_pass(step: int) -> None:
    model = tiny_bare_model()
    whole = captured(model, TOKENS)
    np.testing.assert_allclose(captured(model, TOKENS, step), whole, rtol=1e-4, atol=1e-6)


def test_it_is_the_sum_that_snapkv_d_takes_through_the_seam() -> None:
    model, was_installed = tiny_llama(), installed()
    remove()  # mlx-lm's models call mx.fast too: without the seam they are captured
    try:
        scores = captured(model, TOKENS, 13)
    finally:
        install()
    cache = make_prompt_cache(model)
    seen = observed_prefill(model, TOKENS, cache, [0, 1], window=24, policy="snapkv-d", step=13)
    views = [
        layer_view(row_groups(cache[layer])[0], layer, seen, n_layers=2, score_chunk_size=8)
        for layer in (0, 1)
    ]
    through_seam = sum(np.asarray(SnapKVD().score(view)).sum(axis=0) for view in views)
    np.testing.assert_allclose(scores, through_seam, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(scores, right_scores(model, TOKENS, 24), rtol=1e-4, atol=1e-6)
    if not was_installed:
        remove()


def test_calls_that_the_seam_handles_are_left_out() -> None:
    install()
    model = tiny_llama()
    with SnapKVAttentionCapture() as capture:
        prefilled(model, TOKENS)
        assert capture.calls == 0
        attend()
        assert capture.calls == 1


def test_nothing_captured_scores_zero() -> None:
    with SnapKVAttentionCapture() as capture:
        pass
    assert capture.snap_scores(3) == [0.0, 0.0, 0.0]
    assert capture.snap_scores(0) == []
    with pytest.raises(SelectionError, match="seq_len >= 0; got -1"):
        capture.snap_scores(-1)


def test_scores_are_cut_or_padded_to_the_length_asked_for() -> None:
    with SnapKVAttentionCapture() as capture:
        attend(12)
    scores = capture.snap_scores(12)
    assert capture.snap_scores(5) == scores[:5]
    assert capture.snap_scores(14) == [*scores, 0.0, 0.0]
    assert all(isinstance(score, float) for score in scores)


def test_it_is_restored_after_an_exception() -> None:
    with pytest.raises(RuntimeError, match="boom"), SnapKVAttentionCapture():
        assert mx.fast.scaled_dot_product_attention is not STOCK
        raise RuntimeError("boom")
    assert mx.fast.scaled_dot_product_attention is STOCK


def test_the_answer_of_a_captured_call_is_the_stock_one() -> None:
    queries, keys = mx.random.normal((2, 4, 5, 8)), mx.random.normal((2, 2, 9, 8))
    sinks = mx.random.normal((4,))
    kinds: tuple[dict[str, Any], ...] = (
        {"mask": "causal"},
        {"mask": None},
        {"sinks": sinks},
        {"mask": mx.ones((5, 9)) > 0},
    )
    for options in kinds:
        right = STOCK(queries, keys, keys, scale=0.4, **options)
        with SnapKVAttentionCapture():
            out = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.4, **options)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(right))


def test_nested_captures_each_see_the_calls_made_inside_them() -> None:
    with SnapKVAttentionCapture(window=4) as outer:
        attend()
        with SnapKVAttentionCapture(window=12) as inner:
            attend()
            assert (outer.calls, inner.calls) == (2, 1)
        assert mx.fast.scaled_dot_product_attention is not STOCK
        attend()
    assert (outer.calls, inner.calls) == (3, 1)
    assert sum(inner.snap_scores(12)) == pytest.approx(4 * 12, rel=1e-5)
    assert sum(outer.snap_scores(12)) == pytest.approx(3 * 4 * 4, rel=1e-5)


def test_a_capture_is_blind_to_other_threads() -> None:
    def other() -> None:
        attend()

    with SnapKVAttentionCapture() as capture:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert capture.calls == 0
        attend()
        assert capture.calls == 1


@pytest.mark.parametrize("first_closes_first", [True, False])
def test_two_threads_may_open_and_close_in_any_order(first_closes_first: bool) -> None:
    opened = [threading.Event(), threading.Event()]
    close = [threading.Event(), threading.Event()]
    closed = [threading.Event(), threading.Event()]
    calls = [0, 0]

    def work(number: int) -> None:
        if number == 1:
            opened[0].wait(10)
        with SnapKVAttentionCapture() as capture:
            opened[number].set()
            close[number].wait(10)
            for _ in range(number + 1):
                attend()
            calls[number] = capture.calls
        closed[number].set()

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    assert opened[1].wait(10)
    for number in (0, 1) if first_closes_first else (1, 0):
        assert mx.fast.scaled_dot_product_attention is not STOCK
        close[number].set()
        assert closed[number].wait(10)
    for thread in threads:
        thread.join()
    assert calls == [1, 2]


def test_a_capture_may_be_closed_by_another_thread() -> None:
    capture = SnapKVAttentionCapture()
    thread = threading.Thread(target=capture.__enter__)
    thread.start()
    thread.join()
    assert mx.fast.scaled_dot_product_attention is not STOCK
    capture.__exit__(None, None, None)
    assert mx.fast.scaled_dot_product_attention is STOCK


def right_mass(
    queries: mx.array, keys: mx.array, bias: np.ndarray, sinks: mx.array | None = None
) -> np.ndarray:
    """Float64 attention summed over batch, heads and queries; bias [B, H_q, n, T]."""
    q, k = np.asarray(queries, np.float64), np.asarray(keys, np.float64)
    logits = 0.4 * q @ np.repeat(k, 2, axis=1).swapaxes(2, 3) + bias
    if sinks is not None:
        extra = np.asarray(sinks, np.float64)[None, :, None, None]
        logits = np.concatenate([logits, np.broadcast_to(extra, (*logits.shape[:3], 1))], axis=-1)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return weights[..., : keys.shape[2]].sum(axis=(0, 1, 2))


HIDDEN = np.where(np.arange(12) > np.arange(12)[:, None], -np.inf, 0.0)
SEEN = mx.array(HIDDEN == 0)
PADDED = mx.array((HIDDEN == 0) & (np.arange(12) >= 3) | np.eye(12, dtype=bool))
BIAS = np.random.default_rng(5).normal(size=(2, 4, 12, 12)).astype(np.float32)


@pytest.mark.parametrize("chunk", [1, 5, 12])
@pytest.mark.parametrize(
    ("mask", "bias"),
    [
        (None, np.zeros((12, 12))),
        ("causal", HIDDEN),
        (SEEN, HIDDEN),
        (SEEN[None, None], HIDDEN),
        (PADDED, np.where(np.asarray(PADDED), 0.0, -np.inf)),
        (mx.array([True] * 7 + [False] * 5)[None, None, None], np.array([0.0] * 7 + [-np.inf] * 5)),
        (mx.array(BIAS[0, 0]), BIAS[0, 0]),
        (mx.array(BIAS), BIAS),
        (mx.array(BIAS[:1]), BIAS[:1]),
        (mx.array(BIAS[:, :1]), BIAS[:, :1]),
    ],
    ids=["none", "causal", "bool", "bool4", "padded", "row", "add", "add-b-h", "add-h", "add-b"],
)
def test_masks_of_every_kind_are_scored_with(mask: Any, bias: np.ndarray, chunk: int) -> None:
    with SnapKVAttentionCapture(window=12, score_chunk_size=chunk) as capture:
        queries, keys = attend(mask=mask, batch=2)
    expected = right_mass(queries, keys, np.broadcast_to(bias, (2, 4, 12, 12)))
    np.testing.assert_allclose(capture.snap_scores(12), expected, rtol=1e-4, atol=1e-6)


def test_sinks_take_their_share() -> None:
    sinks = mx.random.normal((4,)) + 2
    with SnapKVAttentionCapture(window=12) as capture:
        queries, keys = attend(sinks=sinks)
    expected = right_mass(queries, keys, np.broadcast_to(HIDDEN, (1, 4, 12, 12)), sinks)
    np.testing.assert_allclose(capture.snap_scores(12), expected, rtol=1e-4, atol=1e-6)
    assert sum(capture.snap_scores(12)) < 4 * 12 - 1


def test_a_row_that_may_read_nothing_does_not_spoil_the_scores() -> None:
    mask = mx.array(np.tril(np.ones((12, 12), bool), -1))  # the first query sees nothing
    with SnapKVAttentionCapture(window=12) as capture:
        attend(mask=mask)
    assert np.isfinite(capture.snap_scores(12)).all()


def test_a_layer_with_fewer_keys_is_left_out() -> None:
    """A sliding window that has forgotten the start: its keys are not these positions."""
    with SnapKVAttentionCapture() as capture:
        attend(length=30, count=1)
        attend(length=16, count=1)
    assert capture.calls == 1
    assert sum(capture.snap_scores(30)) == pytest.approx(4, rel=1e-5)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
@pytest.mark.parametrize("name", ["window", "score_chunk_size"])
def test_bad_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*>= 1; got "):
        SnapKVAttentionCapture(**{name: value})
